#!/usr/bin/env python3
"""Small matrices on a GPU beside PyTorch and Triton: one table.

    bazel build //tests/bench:gpu_normalization
    tests/bench/gpu_normalization.py bazel-bin/tests/bench/gpu_normalization --out FOLDER

Every number is a median of replays of a CUDA graph, ours and the peers' on the same GPU in the same run. Each answer is
first compared with float64. Needs python3 with torch and triton, and nothing else of the repository than the program.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import time

import torch
import triton
import triton.language as tl

ROWS = [
    *("32x4x20", "128x4x20", "32x8x20", "128x8x20", "65536x4x20", "65536x8x10", "65536x8x20", "1048576x4x20"),
    *("4096x16x100", "16384x32x20", "1024x64x20", "256x256x20", "65536xraggedx20", "64x1000x20"),
]
WANTED = {  # us, forward / forward + unrolled backward, float32
    "32x4x20": (2.5, 6),
    "128x8x20": (4, 10),
    "65536x4x20": (5, 15),
    "65536x8x10": (13, 40),
    "65536x8x20": (20, 60),
    "1048576x4x20": (45, 150),
    "4096x16x100": (30, 120),
    "16384x32x20": (80, 240),
}
COPY_BYTES = 4.29e12  # Per second, read plus written; measured on an H200.
LANES = 132 * 128  # FMA per clock
SPECIAL = 132 * 16  # exp, reciprocal per clock
CLOCK = 1.98e9
LAUNCH = 0.62  # us, an empty kernel in a graph


# ---- Floors ---------------------------------------------------------------------------------------------------------
def parts(row):
    """(members, side) of each shape, and the iterations."""
    count, side, iterations = row.split("x")
    if side != "ragged":
        return [(int(count), int(side))], int(iterations)
    each = int(count) // 31
    return [(each + (n < 2 + int(count) % 31), n) for n in range(2, 33)], int(iterations)


def floor(row, work, dtype):
    """The largest of three times in us, and which: each tensor over the bus once; two products with K an iteration (the
    reverse: two, and two rank-one updates); an exponential an entry and a reciprocal for two sums of rows or columns."""
    bytes_, fma, special = 0, 0, 0
    shapes, iterations = parts(row)
    for count, n in shapes:
        tensors = {"forward": 2, "unrolled": 4, "implicit": 4}[work]
        bytes_ += tensors * count * n * n * (2 if dtype == "bfloat16" else 4)
        fma += count * iterations * 2 * n * n
        if work == "unrolled":
            fma += count * iterations * 4 * n * n
        special += count * (n * n + n * iterations)
    times = {
        "bytes": bytes_ / COPY_BYTES,
        "FMA": fma / (LANES * CLOCK),
        "special": special / (SPECIAL * CLOCK),
        "launch": 1e-6 * LAUNCH,
    }
    worst = max(times, key=times.get)
    return 1e6 * times[worst], worst


# ---- Peers ----------------------------------------------------------------------------------------------------------
def normalize(logits, iterations):
    log = logits.float().clamp_min(-1e5)
    for _ in range(iterations):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return log.exp().to(logits.dtype)


@triton.jit
def _forward(logits, plan, history, count, n, width: tl.constexpr, block: tl.constexpr, iterations, keep: tl.constexpr):
    member = tl.program_id(0) * block + tl.arange(0, block)[:, None, None]
    i = tl.arange(0, width)[None, :, None]
    j = tl.arange(0, width)[None, None, :]
    inside = (member < count) & (i < n) & (j < n)
    at = member.to(tl.int64) * n * n + i * n + j
    valid = (i < n) & (j < n)
    log = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    log = tl.where(valid, tl.maximum(log, -1e5), -1e30)
    area = n.to(tl.int64) * n * count
    for step in range(iterations):
        top = tl.max(log, 2, keep_dims=True)
        log = tl.where(valid, log - (top + tl.log(tl.sum(tl.exp(log - top), 2, keep_dims=True))), -1e30)
        if keep:
            tl.store(history + 2 * step * area + at, log, mask=inside)
        top = tl.max(log, 1, keep_dims=True)
        log = tl.where(valid, log - (top + tl.log(tl.sum(tl.exp(log - top), 1, keep_dims=True))), -1e30)
        if keep:
            tl.store(history + (2 * step + 1) * area + at, log, mask=inside)
    tl.store(plan + at, tl.exp(log), mask=inside)


@triton.jit
def _backward(cotangent, gradient, history, count, n, width: tl.constexpr, block: tl.constexpr, iterations):
    member = tl.program_id(0) * block + tl.arange(0, block)[:, None, None]
    i = tl.arange(0, width)[None, :, None]
    j = tl.arange(0, width)[None, None, :]
    inside = (member < count) & (i < n) & (j < n)
    at = member.to(tl.int64) * n * n + i * n + j
    area = n.to(tl.int64) * n * count
    p = tl.exp(tl.load(history + (2 * iterations - 1) * area + at, mask=inside, other=-1e30))
    g = tl.load(cotangent + at, mask=inside, other=0.0).to(tl.float32) * p
    for back in range(iterations):
        step = iterations - 1 - back
        p = tl.exp(tl.load(history + (2 * step + 1) * area + at, mask=inside, other=-1e30))
        g -= p * tl.sum(g, 1, keep_dims=True)
        p = tl.exp(tl.load(history + 2 * step * area + at, mask=inside, other=-1e30))
        g -= p * tl.sum(g, 2, keep_dims=True)
    tl.store(gradient + at, g, mask=inside)


class TritonKernel:
    """The obvious one: a tile of matrices in registers, log-sum-exps, all iterates kept for the backward."""

    def __init__(self, logits, iterations, backward):
        self.count, self.n = logits.shape[0], logits.shape[1]
        self.width = triton.next_power_of_2(self.n)
        self.block = max(1, 1024 // (self.width * self.width))
        self.warps = min(32, max(1, self.block * self.width * self.width // 512))
        self.iterations, self.backward = iterations, backward
        self.plan, self.gradient = torch.empty_like(logits), torch.empty_like(logits)
        steps = 2 * iterations if backward else 1
        self.history = torch.empty((steps, *logits.shape), dtype=torch.float32, device="cuda")

    def __call__(self, logits, cotangent):
        grid = (triton.cdiv(self.count, self.block),)
        arguments = self.count, self.n, self.width, self.block, self.iterations
        _forward[grid](logits, self.plan, self.history, *arguments, self.backward, num_warps=self.warps)
        if not self.backward:
            return (self.plan,)
        _backward[grid](cotangent, self.gradient, self.history, *arguments, num_warps=self.warps)
        return self.plan, self.gradient


def torch_peer(function, logits, iterations, backward):
    if not backward:
        return lambda x, _: (function(x, iterations),)

    def run(x, cotangent):
        x = x.detach().requires_grad_()
        plan = function(x, iterations)
        return plan, *torch.autograd.grad(plan, x, cotangent)

    return run


def graph_time(run, seconds=0.1):
    """Median seconds of a replay among several in a graph; the replay before keeps the device busy meanwhile."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    repeats = min(max(int(2 / max(begin.elapsed_time(end), 0.02)), 1), 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    started = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < seconds and len(times) < 200):
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end) / repeats)
    return sorted(times)[len(times) // 2]


def check(run, shapes, iterations, inputs, tolerance):
    """Largest error of the first members against float64, in units of the largest entry."""
    worst = 0.0
    for (_, n), (logits, cotangent), outputs in zip(shapes, inputs, run(), strict=True):
        x = logits[:8].double().requires_grad_()
        log = x
        for _ in range(iterations):
            log = log - log.logsumexp(-1, keepdim=True)
            log = log - log.logsumexp(-2, keepdim=True)
        plan = log.exp()
        expected = [plan]
        if len(outputs) > 1:
            expected.append(torch.autograd.grad(plan, x, cotangent[:8].double())[0])
        for e, o in zip(expected, outputs, strict=True):
            worst = max(worst, ((o[:8].double() - e).abs().max() / e.abs().max()).item())
    assert worst < tolerance, f"error {worst}"
    return worst


def warm(rows, dtypes, seconds):
    """The peers' compilers at work in many processes at once; their caches keep the results for this one."""
    jobs = [(row, work, dtype) for dtype in dtypes for row in rows for work in ("forward", "unrolled")]
    jobs.sort(key=lambda job: -parts(job[0])[1])  # More iterations take longer.
    running, end = [], time.perf_counter() + seconds
    while (jobs or running) and time.perf_counter() < end:
        running = [process for process in running if process.poll() is None]
        while jobs and len(running) < 14:
            job = ":".join(jobs.pop(0))
            command = [sys.executable, __file__, "-", "--warm", job, f"--dtypes={','.join(dtypes)}"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(0.05)
    for process in running:
        process.kill()


def peer_time(name, row, backward, dtype):
    """us, or a word that says why there is none. torch.compile: of the first type alone."""
    shapes, iterations = parts(row)
    if name == "triton" and max(n for _, n in shapes) > 128:
        return "too large"
    if name == "compile" and len(shapes) > 1:
        return "31 shapes"
    torch.manual_seed(1)
    torch_type = getattr(torch, dtype)
    inputs = [
        (torch.randn(c, n, n, device="cuda").to(torch_type), torch.randn(c, n, n, device="cuda").to(torch_type))
        for c, n in shapes
    ]
    function = torch.compile(normalize, dynamic=False) if name == "compile" else normalize
    runs = [
        TritonKernel(x, iterations, backward) if name == "triton" else torch_peer(function, x, iterations, backward)
        for x, _ in inputs
    ]

    def all_runs():
        return [run(x, g) for run, (x, g) in zip(runs, inputs, strict=True)]

    try:
        check(all_runs, shapes, iterations, inputs, 2e-2 if dtype == "bfloat16" else 1e-4)
        return 1e6 * graph_time(all_runs)
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    finally:
        torch._dynamo.reset()
        torch.cuda.empty_cache()


# ---- The table ------------------------------------------------------------------------------------------------------
def ours(program, dtype, rows, works, seconds):
    command = [program, f"--dtype={dtype}", "--rows=" + ",".join(rows), f"--works={works}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        print(f"{' '.join(command)}: given up", flush=True)
        return [json.loads(line) for line in (late.stdout or b"").decode().splitlines() if line.endswith("}")]
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def show(x):
    return x if isinstance(x, str) else f"{x:.1f}" if x < 1000 else f"{x:,.0f}"


def table(measured, peers, dtype):
    works = {"forward": "forward", "unrolled": "forward + unrolled backward", "implicit": "forward + implicit backward"}
    lines = []
    for work, title in works.items():
        mine = [m for m in measured if m["dtype"] == dtype and m["work"] == work]
        if not mine:
            continue
        lines += [f"\n### {dtype}, {title}\n"]
        columns = ["members x side x iterations", "us", "wanted", "floor", "binds", "x floor", "error"]
        names = sorted({key[0] for key in peers if key[2] == work and key[3] == dtype})
        lines += ["| " + " | ".join(columns + [f"{n}, us (ratio)" for n in names]) + " |"]
        lines += ["|---" * (len(columns) + len(names)) + "|"]
        for m in mine:
            least, which = floor(m["row"], work, dtype)
            goal = (
                WANTED.get(m["row"], ("", ""))[work != "forward"] if work != "implicit" and dtype == "float32" else ""
            )
            if goal == "" and dtype == "float32" and m["row"] not in WANTED and work != "implicit":
                goal = f"{2.5 * least:.1f}"
            cells = [
                m["row"],
                show(m["us"]),
                str(goal),
                show(least),
                which,
                f"{m['us'] / least:.1f}",
                f"{m['error']:.1e}",
            ]
            for name in names:
                other = peers.get((name, m["row"], work, dtype), "not run")
                cells.append(other if isinstance(other, str) else f"{show(other)} ({other / m['us']:.0f})")
            lines += ["| " + " | ".join(cells) + " |"]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--peers", default="triton,eager,compile")
    parser.add_argument(
        "--peer-seconds", type=float, default=180, help="No more peers are begun after it, of each type."
    )
    parser.add_argument("--warm", default="", help="ROW:WORK:DTYPE: the peers' compilers' work on it, nothing else.")
    parser.add_argument("--warm-seconds", type=float, default=120, help="The peers' compilers' work on all rows.")
    parser.add_argument("--only-warm", action="store_true")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.warm:
        row, work, dtype = options.warm.split(":")
        for name in ("triton", "compile") if dtype == options.dtypes.split(",")[0] else ("triton",):
            peer_time(name, row, work != "forward", dtype)
        return
    rows = options.rows.split(",")
    warm(rows, options.dtypes.split(","), options.warm_seconds)
    if options.only_warm:
        return
    measured, peers = [], {}
    for dtype in options.dtypes.split(","):
        measured += ours(options.program, dtype, rows, "forward,unrolled", 60)
        measured += ours(options.program, dtype, rows, "implicit", 60)
    for dtype in options.dtypes.split(","):
        started = time.perf_counter()
        names = options.peers.split(",")
        if dtype != options.dtypes.split(",")[0]:
            names = [name for name in names if name != "compile"]
        for name in names:
            for row in rows if name else []:
                for work in ("forward", "unrolled"):
                    if time.perf_counter() - started > options.peer_seconds:
                        continue
                    try:
                        peers[name, row, work, dtype] = peer_time(name, row, work != "forward", dtype)
                    except Exception as error:  # noqa: BLE001
                        peers[name, row, work, dtype] = f"failed: {str(error).splitlines()[0][:40]}"
                    print(name, row, work, dtype, peers[name, row, work, dtype], flush=True)
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {options.commit}"
    lines = [
        "# Small matrices on a GPU",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {now}",
        "",
        "Command: `tests/bench/gpu_normalization.py bazel-bin/tests/bench/gpu_normalization`",
        "",
        "Recipe LOG_ROW_COLUMN, Gaussian logits. Microseconds inside a CUDA graph, median; inputs stay where the",
        "replay before left them, in L2 if they fit; certificates go to the device's memory. `error`: the largest of P",
        "and gradient against float64, in units",
        "of the largest entry, checked before the clock starts. `floor`: the largest of bytes / copy rate, FMA and",
        "special functions at 1.98 GHz, and an empty kernel. Peers in graphs too; `ratio`: theirs over ours.",
    ]
    for dtype in options.dtypes.split(","):
        lines += table(measured, peers, dtype)
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_normalization.md").write_text(text)
    (options.out / "gpu_normalization.json").write_text(
        json.dumps({"ours": measured, "peers": [[*key, value] for key, value in peers.items()]}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
