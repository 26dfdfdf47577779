"""PyTorch on the batches, and FlashSinkhorn (pip: flash-sinkhorn) on the clouds, of gpu_transport: one JSON line a row,
as gpu_transport prints.

    python gpu_transport_peer.py [SECONDS [FIRST]] >> lines

Clouds: ten alternating iterations, forward and with gradients to x and y, timed by CUDA events, median of repeats after
the calls that tune it. Potentials are compared with the same iterations in float64 where a dense matrix of them fits.
Batches: 50 iterations in float32 with the costs in memory, call by call, by torch.compile's kernels, and by those in one
CUDA graph. Rows end when SECONDS are over; a second run goes on at row FIRST of the clouds. FlashSinkhorn's kernels are
compiled before, several rows at once: up to six minutes on 16 cores.
"""

import json
import math
import multiprocessing
import sys
import time

import flash_sinkhorn
import torch
from gpu_timing import milliseconds

EPSILON, ITERATIONS, BATCH_ITERATIONS = 0.1, 10, 50
# batch, n, d.
BATCHES = [(256, 64, 64), (256, 128, 64), (256, 256, 64), (64, 512, 64), (1024, 64, 3)]
# n, d, TF32, gradients; the most telling first.
SHAPES = [(10000, 64), (4096, 64), (1024, 64), (50000, 64), (10000, 3), (10000, 128), (4096, 784), (10000, 512)]
ROWS = [(*shape, tf32, gradient) for gradient in (False, True) for shape in SHAPES for tf32 in (True, False)]
COMPILERS = 8  # Processes.


def exact(x, y):
    """The potentials after the same iterations in float64."""
    x, y = x.double(), y.double()
    cost = (x * x).sum(1)[:, None] + (y * y).sum(1)[None, :] - 2 * x @ y.T
    f, g = torch.zeros(len(x), device="cuda").double(), torch.zeros(len(y), device="cuda").double()
    for _ in range(ITERATIONS):
        f = -EPSILON * (torch.logsumexp((g[None, :] - cost) / EPSILON, 1) - torch.log(torch.tensor(float(len(y)))))
        g = -EPSILON * (torch.logsumexp((f[:, None] - cost) / EPSILON, 0) - torch.log(torch.tensor(float(len(x)))))
    return f, g


def cloud(count, dim, tf32, gradient):
    """(x, y, options, a solve)."""
    torch.manual_seed(7)
    x, y = (torch.rand(count, dim, device="cuda", requires_grad=gradient) for _ in range(2))
    options = {"backend": "alternating", "use_epsilon_scaling": False, "eps": EPSILON, "n_iters": ITERATIONS,
               "allow_tf32": tf32, "half_cost": False}
    solver = flash_sinkhorn.SamplesLoss(**options)

    def solve():
        return torch.autograd.grad(solver(x, y), (x, y)) if gradient else solver(x, y)

    return x, y, options, solve


def compile_row(row):
    cloud(*row)[-1]()
    torch.cuda.synchronize()


def measure(count, dim, tf32, gradient):
    """One row."""
    x, y, options, solve = cloud(count, dim, tf32, gradient)
    error = -1
    if count <= 10000 and not gradient:
        f, g = flash_sinkhorn.SamplesLoss(potentials=True, **options)(x, y)
        f64, g64 = exact(x, y)
        # They share one free constant.
        constant = (f.double() - f64).mean() - (g.double() - g64).mean()
        error = max((f.double() - f64 - constant / 2).abs().max().item(),
                    (g.double() - g64 + constant / 2).abs().max().item()) / EPSILON
        del f64, g64
    with torch.set_grad_enabled(gradient):
        for _ in range(3):
            solve()
        torch.cuda.synchronize()
        median = milliseconds(solve, 3 if count > 10000 else 9)
    print(json.dumps({"name": "flash gradient" if gradient else "flash", "n": count, "dim": dim, "tf32": tf32,
                      "median_ms": median, "error_eps": error, "version": flash_sinkhorn.__version__}), flush=True)


def batched_step(cost, f, g):
    """One iteration of a batch with uniform masses; the logarithms of the counts are in the costs' units."""
    f = -EPSILON * (torch.logsumexp((g[:, None, :] - cost) / EPSILON, 2) - math.log(cost.shape[2]))
    g = -EPSILON * (torch.logsumexp((f[:, :, None] - cost) / EPSILON, 1) - math.log(cost.shape[1]))
    return f, g


def measure_batch(count, points, dim):
    """One row of batches."""
    torch.manual_seed(7)
    x, y = torch.rand(count, points, dim, device="cuda"), torch.rand(count, points, dim, device="cuda")

    def solve(step):
        cost = (x * x).sum(2)[:, :, None] + (y * y).sum(2)[:, None, :] - 2 * torch.bmm(x, y.transpose(1, 2))
        f, g = torch.zeros(count, points, device="cuda"), torch.zeros(count, points, device="cuda")
        for _ in range(BATCH_ITERATIONS):
            f, g = step(cost, f, g)
        return f, g

    compiled = torch.compile(batched_step, dynamic=False)
    for step in (batched_step, compiled):
        for _ in range(3):
            solve(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = solve(compiled)
    graph.replay()
    error = max((a - b).abs().max().item() for a, b in zip(result, solve(batched_step))) / EPSILON
    print(json.dumps({"name": "torch", "count": count, "n": points, "dim": dim, "version": torch.__version__,
                      "eager_ms": milliseconds(lambda: solve(batched_step), 5),
                      "compiled_ms": milliseconds(lambda: solve(compiled), 15),
                      "graph_ms": milliseconds(graph.replay, 15), "difference_eps": error}), flush=True)


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    end = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else 1e9)
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    clouds = ROWS[first:]
    with multiprocessing.get_context("spawn").Pool(COMPILERS, maxtasksperchild=4) as pool:
        pool.map(compile_row, clouds, chunksize=1)
    for measure_one, rows in ((measure_batch, BATCHES if first == 0 else []), (measure, clouds)):
        for row in rows:
            if time.monotonic() < end:
                measure_one(*row)


if __name__ == "__main__":
    main()
