#!/usr/bin/env python3
"""On a machine with a GPU: the server starts, answers and drains; what it solves has the same bits each time, whatever
all lanes solve beside it; with its GPU hidden it serves on the CPU; and when a kernel that traps takes the GPU away,
health turns NOT_SERVING, calls get UNAVAILABLE, and the process leaves with 1.

  tests/e2e/gpu_lifecycle.py [--bin FOLDER]     # a folder with sinkhorn_server and sinkhorn_loadgen; else bazel-bin's

Needs Python's grpc package and no generated code. Prints a line for each finding; exits 0 if all hold.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import grpc

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVING, NOT_SERVING = 1, 2

# Normalisations, dense costs and clouds of sizes and dimensions that different kernels serve.
EVERYTHING = (
    "normalization:32x4x4:20",
    "normalization:16x8x8:20:dtype=bfloat16",
    "normalization:8x30x30:20:recipe=exact",
    "normalization:2x300x200:20",
    "normalization:1x1000x900:10",
    "normalization:1x1200x1100:20",
    "normalization:2x300x200:100:recipe=exact",
    "normalization:4x700x40:20",
    "normalization:3x3000x60:20",
    "dense:128x128:20",
    "dense:500x600:20:plan",
    "dense:1500x1100:10",
    "dense:2000x1600:20",
    "point_cloud:60x50x3:50",
    "point_cloud:256x256x64:10:gradient",
    "point_cloud:900x1000x100:10",
    "point_cloud:700x600x784:10:gradient",
    "point_cloud:1200x1300x2:20:symmetric",
    "point_cloud:1100x1200x3:20:debias",
    "point_cloud:2000x1500x64:10:gradient",
    "point_cloud:3000x3000x128:10",
    "point_cloud:1300x1200x3:20",
    "point_cloud:4000x3500x64:10:fast",
    "point_cloud:5000x4500x32:10:fast",
    "point_cloud:1100x15000x32:10:fast",
    "point_cloud:1300x34000x16:5:fast",
    "point_cloud:4600x5000x64:10",
    "point_cloud:5000x5000x3:20",
    "point_cloud:500x300x3:300:epsilon=0.001:tolerance=1e-4",
    "point_cloud:1500x1500x5:20:double",
    "point_cloud:2000x1900x3:20:gradient:epsilon=0.002",
    "point_cloud:1500x1400x40:40:gradient:epsilon=0.03:tolerance=1e-5",
    "point_cloud:2000x1700x64:400:gradient:tolerance=1e-5",
    "point_cloud:3400x3300x3:400:tolerance=1e-4",
    "point_cloud:4600x5000x64:gradient",
    "point_cloud:4600x5000x20:fast",
    "point_cloud:5000x4500x3:400:gradient:tolerance=1e-5",
    "point_cloud:1400x1500x64:gradient:debias",
    "point_cloud:4300x4500x64:400:debias:tolerance=1e-5",
    "point_cloud:7x1300x1200x40:400:gradient:tolerance=1e-5",
    "point_cloud:5x1100x4300x3:400:tolerance=1e-5",
    "point_cloud:5x1100x4300x20:60:fast",
)


def binaries(folder):
    if folder:
        return folder.resolve() / "sinkhorn_server", folder.resolve() / "sinkhorn_loadgen"
    return ROOT / "bazel-bin/server/sinkhorn_server", ROOT / "bazel-bin/client/loadgen/sinkhorn_loadgen"


class Server:
    def __init__(self, path, *flags, hide_gpus=False):
        self.folder = tempfile.TemporaryDirectory()
        ports, self.log_path = pathlib.Path(self.folder.name) / "ports", pathlib.Path(self.folder.name) / "log"
        addresses = ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", f"--port_file={ports}"]
        environment = dict(os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}))
        begin = time.monotonic()
        self.process = subprocess.Popen([path, *addresses, *flags], stderr=open(self.log_path, "wb"), env=environment)
        while not ports.exists():
            if self.process.poll() is not None or time.monotonic() > begin + 60:
                raise SystemExit(f"the server did not start: {self.log()}")
            time.sleep(0.01)
        self.start_seconds = time.monotonic() - begin
        self.address = "127.0.0.1:" + ports.read_text().split()[0]

    def log(self):
        return self.log_path.read_text()

    def events(self, name):
        return [json.loads(line) for line in self.log().splitlines() if f'"event":"{name}"' in line]


class HealthWatch:
    """The states that grpc.health.v1's Watch tells of a server, in order."""

    def __init__(self, address):
        self.states = []
        self.channel = grpc.insecure_channel(address)
        watch = self.channel.unary_stream("/grpc.health.v1.Health/Watch", lambda b: b, lambda b: b)
        self.thread = threading.Thread(target=self.follow, args=(watch(b"", timeout=60),), daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 10
        while not self.states and time.monotonic() < deadline:
            time.sleep(0.01)

    def follow(self, replies):
        try:
            for reply in replies:
                self.states.append(reply[1] if len(reply) == 2 and reply[0] == 8 else 0)
        except grpc.RpcError:
            pass


def load(loadgen, server, *flags):
    command = [loadgen, f"--server={server.address}", "--json", "--warmup=0s", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


FAILURES = []


def check(what, holds, detail=""):
    print(f"{'ok  ' if holds else 'FAIL'} {what}{': ' if detail != '' else ''}{detail}", flush=True)
    if not holds:
        FAILURES.append(what)


def answers_and_drains(server_path, loadgen, backend, name, hide_gpus=False):
    server = Server(server_path, f"--backend={backend}", "--drain_grace=500ms", hide_gpus=hide_gpus)
    ready = server.events("ready")
    check(f"{name}: ready", bool(ready), f"{ready[0]['device']} after {server.start_seconds:.2f} s")
    watch = HealthWatch(server.address)
    check(f"{name}: health says SERVING", watch.states == [SERVING], watch.states)
    mix = "--mix=normalization:32x4x4:20,dense:16x16:20"
    done = load(loadgen, server, "--clients=16", "--duration=1s", "--verify", mix)
    result = json.loads(done.communicate(timeout=60)[0])
    answered = result["all"]["requests"]
    right = answered > 100 and result["wrong_count"] == 0 and not result["all"]["errors"]
    check(f"{name}: every answer is right", right, f"{answered} answers, {result['wrong']}, {result['all']['errors']}")
    running = load(loadgen, server, "--rate=500", "--duration=3s", "--connections=1")
    time.sleep(1)
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(30)
    stopped = server.events("stopped")
    clean = code == 0 and stopped and stopped[0]["abandoned"] == "0"
    check(f"{name}: drains under load and leaves with 0", clean, f"exit {code}, {stopped}")
    result = json.loads(running.communicate(timeout=60)[0])
    errors = result["all"]["errors"]
    check(f"{name}: calls fail only with UNAVAILABLE then", all(e.startswith("UNAVAILABLE") for e in errors), errors)
    check(f"{name}: health said NOT_SERVING", watch.states == [SERVING, NOT_SERVING], watch.states)


def solves_everything_at_once(server_path, loadgen, seconds):
    server = Server(server_path, "--backend=cuda")

    def run(what, *flags):
        running = load(loadgen, server, "--threads=4", "--verify", "--mix=" + ",".join(EVERYTHING), *flags)
        result = json.loads(running.communicate(timeout=60 + seconds)[0])
        answered, errors = result["all"]["requests"], result["all"]["errors"]
        check(f"everything at once, {what}: every answer is right, to the same bits",
              answered > 0 and result["wrong_count"] == 0, f"{answered} answers, {result['wrong']}")
        return errors

    for clients in (32, 128):
        errors = run(f"{clients} clients", f"--clients={clients}", f"--seed={clients}", f"--duration={seconds}s")
        check(f"everything at once, {clients} clients: no error", not errors, errors)
    errors = run("streams", "--clients=128", "--connections=16", "--stream", f"--duration={seconds}s")
    check("everything at once, streams: no error", not errors, errors)
    # Most end in the queue or between two slices, beside others that go on.
    errors = run("deadlines", "--clients=64", "--deadline_ms=12", f"--duration={seconds}s")
    check("everything at once, deadlines: errors are theirs alone",
          errors and all(name.startswith("DEADLINE_EXCEEDED") for name in errors), errors)
    errors = run("after them", "--clients=32", f"--duration={seconds}s")
    check("everything at once, after them: no error", not errors, errors)
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(60)
    check("everything at once: leaves with 0", code == 0, f"exit {code}")


def loses_its_device(server_path, loadgen):
    server = Server(server_path, "--backend=cuda", "--inject_fault=kernel_trap@500")
    watch = HealthWatch(server.address)
    running = load(loadgen, server, "--clients=64", "--duration=3s")
    begin = time.monotonic()
    code = server.process.wait(30)
    result = json.loads(running.communicate(timeout=60)[0])
    errors = result["all"]["errors"]
    check("trap: the process leaves with 1", code == 1, f"exit {code} after {time.monotonic() - begin:.2f} s")
    check("trap: requests were answered before", result["all"]["requests"] > 100, result["all"]["requests"])
    check("trap: calls get UNAVAILABLE, DEVICE_LOST", errors.get("UNAVAILABLE/DEVICE_LOST", 0) > 0, errors)
    others = {name: count for name, count in errors.items() if not name.startswith("UNAVAILABLE")}
    check("trap: and nothing but UNAVAILABLE", not others, others)
    check("trap: health said NOT_SERVING", watch.states == [SERVING, NOT_SERVING], watch.states)
    check("trap: the log says so", len(server.events("device_lost")) == 1, server.log().splitlines()[-2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--without-gpu", action="store_true", help="only what needs none")
    parser.add_argument("--seconds", type=int, default=10, help="of each load with everything at once")
    options = parser.parse_args()
    server_path, loadgen = binaries(options.bin)
    answers_and_drains(server_path, loadgen, "auto", "without a GPU", hide_gpus=True)
    if not options.without_gpu:
        answers_and_drains(server_path, loadgen, "auto", "with a GPU")
        solves_everything_at_once(server_path, loadgen, options.seconds)
        loses_its_device(server_path, loadgen)
    print(f"{len(FAILURES)} failed")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
