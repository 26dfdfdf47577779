"""Serving on the same cores as its clients: batched against one by one, and Triton; then what the RPC path costs."""

import contextlib
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import ours

HERE = pathlib.Path(__file__).resolve().parent
SERVER = ours.BIN / "server/sinkhorn_server"
LOADGEN = ours.BIN / "client/loadgen/sinkhorn_loadgen"
LIBC = ctypes.CDLL(None)
# Wanted: at most this part of Triton's server CPU per request; p50 of a lone client.
CPU_SHARE_WANTED = 0.1
FLOOR, CPP = "floor: an empty call", "ours, C++ client"
LONE_PYTHON_MS_WANTED, LONE_CPP_MS_WANTED = 0.5, 0.15


def run(*, toy=False, triton_python=None):
    """Results; triton_python: the interpreter of an environment with nvidia-pytriton, or None to leave Triton out.

    All servers are up at the same time, and several rounds go through all rows: these machines' speed changes from
    one minute to the next. Of a row's runs the one with the least server CPU per request counts."""
    clients = (1, 4) if toy else (1, 16, 64, 256)
    rounds = 1 if toy else 5
    times = dict(warmup=0.3, seconds=0.5) if toy else dict(warmup=0.5, seconds=1.5)
    client_python = triton_python or sys.executable  # One environment for all clients.
    runs, notes = [], []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        descriptors = make_descriptors(folder)
        server = stack.enter_context(our_server(folder))
        single = stack.enter_context(our_server(folder, "--max_batch_problems=1"))
        loads = [("ours", "ours", server), (CPP, None, server), (FLOOR, "empty", server)]
        loads += [("ours, one by one", "ours", single)]
        if triton_python:
            for label, flags in (("Triton", ()), ("Triton, compiled body", ("--compile",))):
                try:
                    loads.append((label, "triton", stack.enter_context(triton_server(triton_python, *flags))))
                except (RuntimeError, OSError, subprocess.SubprocessError) as failure:
                    notes.append(f"{label} could not be measured: {failure}")
        for _ in range(rounds):
            for label, kind, target in loads:
                for count in clients:
                    if kind is None:
                        runs.append(measure_cpp(label, target, count, **times))
                    else:
                        runs.append(measure(label, client_python, kind, target, count, descriptors, **times))
        payload = measure_payload(server, toy)
    failures = [
        f"{r['server']}, {r['clients']} clients: {r['errors']}" for r in runs if r["errors"] or not r["requests"]
    ]
    rows = least_cpu(runs)
    return {"load": rows, "payload": payload, "notes": notes + verdicts(rows), "failures": failures}


def least_cpu(runs):
    best = {}
    for run_ in runs:
        key = run_["server"], run_["clients"]
        if run_["requests"] and (key not in best or run_["server_cpu_ms"] < best[key]["server_cpu_ms"]):
            best[key] = run_
    return [best[key] for key in dict.fromkeys((r["server"], r["clients"]) for r in runs) if key in best]


# ---- Servers --------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, pid, target):
        self.pid, self.target = pid, target

    def cpu_seconds(self):
        """User and system time of the process and its descendants so far."""
        return sum(cpu_seconds(pid) for pid in [self.pid, *descendants(self.pid)])


def cpu_seconds(pid):
    """By the process's own clock: the ticks that /proc counts are 10 ms, more than a short run may take."""
    clock = ctypes.c_int()
    if LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return 0.0  # It has ended.
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return 0.0


def descendants(pid):
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


@contextlib.contextmanager
def our_server(folder, *flags):
    if not SERVER.exists():
        raise SystemExit(f"{SERVER} is missing: bazel build //server:sinkhorn_server")
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    ports = folder / "ports"
    addresses = ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", f"--port_file={ports}"]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen([SERVER, *addresses, "--backend=cpu", "--drain_grace=0s", *flags], stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not ports.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start: " + (folder / "server.log").read_text())
            time.sleep(0.01)
        yield Server(process.pid, f"127.0.0.1:{ports.read_text().split()[0]}")
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def triton_server(python, *flags):
    """PyTorch is this environment's; all else the other's."""
    import torch

    packages = pathlib.Path(torch.__file__).parents[1]
    command = [python, HERE / "triton_server.py", "--packages", packages, *flags]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = process.stdout.readline().split()
        if len(line) != 2:
            raise RuntimeError("its process ended at once")
        server = Server(int(line[1]), f"127.0.0.1:{line[0]}")
        wait_for_triton(python, server.target, process)
        yield server
    finally:
        process.stdin.close()
        process.wait(90)


def wait_for_triton(python, target, process):
    script = (
        "import sys, tritonclient.grpc as t\n"
        "c = t.InferenceServerClient(sys.argv[1])\n"
        "sys.exit(0 if c.is_model_ready('sinkhorn') else 1)\n"
    )
    deadline = time.monotonic() + 300  # It compiles ten batch sizes first.
    while time.monotonic() < deadline and process.poll() is None:
        if subprocess.run([python, "-c", script, target], capture_output=True).returncode == 0:
            return
        time.sleep(2)
    raise RuntimeError("its model did not get ready")


# ---- Load -----------------------------------------------------------------------------------------------------------


def make_descriptors(folder):
    out = folder / "sinkhorn.descriptors"
    proto = ours.ROOT / "proto"
    subprocess.run(
        ["protoc", f"-I{proto}", "--include_imports", f"--descriptor_set_out={out}", "sinkhorn/v1/sinkhorn.proto"],
        check=True,
    )
    return out


def measure(label, python, kind, server, clients, descriptors, warmup, seconds):
    """One run of load_client.py; the server's CPU time counts from the end of the warm-up to the end."""
    command = [
        python, HERE / "load_client.py", f"--kind={kind}", f"--target={server.target}", f"--clients={clients}",
        f"--descriptors={descriptors}", f"--warmup={warmup}", f"--seconds={seconds}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        before = server.cpu_seconds()
        result = process.stdout.readline()
        used = server.cpu_seconds() - before
    if not result:
        raise RuntimeError(f"load_client.py failed with {label}")
    return finish(label, clients, json.loads(result), used)


def measure_cpp(label, server, clients, warmup, seconds):
    """The same load by the C++ load generator. Its warm-up has the server's CPU time taken out by proportion."""
    before = server.cpu_seconds()
    everything = loadgen(server, f"--clients={clients}", f"--warmup={warmup}s", f"--duration={seconds}s")
    used = (server.cpu_seconds() - before) * seconds / (warmup + seconds)
    latency = everything["latency_seconds"]
    result = {
        "requests": everything["requests"],
        "requests_per_second": everything["requests_per_second"],
        "p50_ms": 1e3 * latency["p50"],
        "p99_ms": 1e3 * latency["p99"],
        "batch": everything["batch_problems"]["mean"],
        "errors": everything["errors"],
    }
    return finish(label, clients, result, used)


def loadgen(server, *flags, mix="normalization:32x4x4:20"):
    command = [LOADGEN, f"--server={server.target}", f"--mix={mix}", "--json", *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["all"]


def finish(label, clients, result, used):
    result["server_cpu_ms"] = 1e3 * used / result["requests"] if result["requests"] else None
    row = {"server": label, "clients": clients} | result
    text = f"{label}, {clients} clients: "
    if row["requests"]:
        text += (
            f"{row['requests_per_second']:,.0f} requests/s, p50 {row['p50_ms']:.3f} ms, p99 {row['p99_ms']:.3f} ms, "
        )
        text += f"server CPU {row['server_cpu_ms']:.4f} ms per request"
    print(text + (f", errors {row['errors']}" if row["errors"] else ""), file=sys.stderr, flush=True)
    return row


def measure_payload(server, toy):
    """One iteration on ever larger logits, one request at a time by the C++ client: nearly all is transport."""
    rows = []
    for direction, output in (("request only", "marginals"), ("request and reply", "plan")):
        seconds = 0.3 if toy else 2
        for kib in (64, 256) if toy else (64, 256, 1024, 4096, 16384, 65536):
            lines = max(kib // 4, 1)  # Of 1,024 floats.
            mix = f"normalization:{lines}x1024:1:{output}"
            flags = ("--clients=1", "--payloads=2", "--warmup=0.3s", f"--duration={seconds}s")
            before = server.cpu_seconds()
            all_ = loadgen(server, *flags, mix=mix)
            used = server.cpu_seconds() - before
            total, compute = 1e3 * all_["latency_seconds"]["p50"], 1e3 * all_["compute_seconds"]["p50"]
            mib = kib / 1024 * (2 if output == "plan" else 1)
            share = seconds / (seconds + 0.3)
            rows.append(
                {
                    "direction": direction, "kib": kib, "total_ms": total, "compute_ms": compute,
                    "overhead_ms": total - compute, "overhead_ms_per_mib": (total - compute) / mib,
                    "server_cpu_ms": 1e3 * used * share / max(all_["requests"], 1),
                }
            )  # fmt: skip
            print(f"{direction}, {kib} KiB: {total:.3f} ms, solve {compute:.3f} ms", file=sys.stderr, flush=True)
    return rows


def bound(mine, peer, floor):
    """What bounds a row of ours: gRPC's own cost, measured by calls that do nothing."""
    if floor is None:
        return "."
    own, empty = mine["server_cpu_ms"], floor["server_cpu_ms"]
    return (
        f"; an empty call costs {empty:.4f} of our {own:.4f} ms, 1/{peer['server_cpu_ms'] / empty:.1f} of "
        f"{peer['server']}'s, and bounds it."
    )


def verdicts(rows):
    """What was wanted, and what came out."""
    found = {(r["server"], r["clients"]): r for r in rows if r["requests"]}
    notes = []
    for (server, clients), mine in found.items():
        peers = [r for r in found.values() if r["server"].startswith("Triton") and r["clients"] == clients]
        if server == "ours" and peers:
            best = min(peers, key=lambda r: r["server_cpu_ms"])
            share = mine["server_cpu_ms"] / best["server_cpu_ms"]
            verdict = "met" if share <= CPU_SHARE_WANTED else "missed"
            notes.append(
                f"- {clients} clients: server CPU per request is 1/{1 / share:.1f} of {best['server']}'s "
                f"(wanted: at most 1/10: {verdict})"
                + bound(mine, best, found.get((FLOOR, clients)))
            )
        single = found.get(("ours, one by one", clients))
        if server == "ours" and single:
            notes.append(
                f"- {clients} clients: batched {mine['requests_per_second']:,.0f} against one by one "
                f"{single['requests_per_second']:,.0f} requests/s; server CPU {mine['server_cpu_ms']:.4f} against "
                f"{single['server_cpu_ms']:.4f} ms."
            )
    for label, wanted in (("ours", LONE_PYTHON_MS_WANTED), (CPP, LONE_CPP_MS_WANTED)):
        if (label, 1) in found:
            p50 = found[label, 1]["p50_ms"]
            client, verdict = "C++" if label == CPP else "Python", "met" if p50 < wanted else "missed"
            notes.append(f"- A lone {client} client: p50 {p50:.3f} ms (wanted: under {wanted} ms: {verdict}).")
    return ["\n".join(notes)]
