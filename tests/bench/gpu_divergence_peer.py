"""GeomLoss (pip: geomloss) on the annealed divergences of gpu_transport: one JSON line a row, as gpu_transport prints.

    python gpu_divergence_peer.py >> lines

Debiased, symmetric, annealed by quarters from the clouds' extent to epsilon .05^2, which is how GeomLoss solves (blur .05,
scaling .5), with gradients to x and y; costs in memory. Called from Python, timed by CUDA events, median of repeats: a
CUDA graph cannot capture it, since it copies from the host. Its losses in float32 are compared with those in float64
first.
"""

import json
import math

import geomloss
import torch
from gpu_timing import milliseconds

# Problems, points, coordinates.
SHAPES = [(1, 1000, 3), (1024, 64, 3), (64, 1000, 3), (1, 4096, 3), (1, 10000, 3)]
BLUR, SCALING, REPEATS = 0.05, 0.5, 9


def measure(count, points, dim):
    torch.manual_seed(7)
    x, y = (torch.rand(count, points, dim, device="cuda", requires_grad=True) for _ in range(2))
    # The extent, which it would otherwise find by way of the host.
    diameter = dim**0.5
    loss = geomloss.SamplesLoss("sinkhorn", p=2, blur=BLUR, scaling=SCALING, diameter=diameter, backend="tensorized")

    def solve():
        return torch.autograd.grad(loss(x, y).sum(), (x, y))

    error = ((loss(x, y) - loss(x.double(), y.double())) / BLUR**2).abs().max().item()
    for _ in range(3):
        solve()
    row = {"name": "geomloss", "count": count, "n": points, "dim": dim, "version": geomloss.__version__,
           "iterations": math.ceil(math.log(BLUR / diameter) / math.log(SCALING)) + 2,  # Its schedule's epsilons.
           "eager_ms": milliseconds(solve, REPEATS), "error_eps": error}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for shape in SHAPES:
        measure(*shape)
