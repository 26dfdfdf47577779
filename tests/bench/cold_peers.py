"""The peers of cold.py: each iterates until its own test is met or a number of iterations is done."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ot
import torch
from ott.geometry import epsilon_scheduler, geometry
from ott.initializers.linear import initializers
from ott.problems.linear import linear_problem
from ott.solvers.linear import acceleration
from ott.solvers.linear import sinkhorn as ott_sinkhorn

import peers


@dataclasses.dataclass
class Method:
    name: str
    # Settings of its stopping test, the loosest first.
    settings: list
    # prepare(setting, most iterations) -> run() -> result. Compiles, if that is to be done.
    prepare: Callable[[Any, int], Callable[[], Any]]
    # result -> f, g (float64), iterations done.
    answer: Callable[[Any], tuple]
    # Plain alternating updates: as many iterations as any other such method.
    plain: bool = False

    def seconds_per_iteration(self, iterations=50):
        """By a short run that never meets its test; the second one, if the first was quick."""
        run = self.prepare(None, iterations)
        for _ in range(2):
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if seconds > 0.5:
                break
        return max(seconds / iterations, 1e-6)


def methods(x, y, cost, epsilon, target):
    """In about the order of their speed, so that the slow ones need not be waited for."""
    l2 = [target * s for s in (1.0, 0.3, 0.1, 0.03)]  # POT measures in L2: from n^-1/2 to 1 of the L1 norm.
    with np.errstate(all="ignore"):
        return [
            _ott("OTT log, momentum", x, y, epsilon, target, momentum=True),
            _torch("PyTorch linear", x, y, epsilon, target, linear=True),
            _torch("PyTorch linear float32", x, y, epsilon, target, linear=True, dtype=torch.float32),
            _pot("POT", "sinkhorn", x, y, epsilon, l2, plain=True),
            _pot("POT float32", "sinkhorn", x.astype(np.float32), y.astype(np.float32), epsilon, l2, plain=True),
            _ott("OTT log, annealed", x, y, epsilon, target, annealed=True),
            _ott("OTT log, annealed, momentum", x, y, epsilon, target, annealed=True, momentum=True),
            _ott("OTT kernel, momentum", x, y, epsilon, target, kernel=True, momentum=True),
            _ott("OTT kernel", x, y, epsilon, target, kernel=True),
            _ott("OTT log", x, y, epsilon, target),
            _ott("OTT log, Anderson", x, y, epsilon, target, anderson=True),
            _pot("POT stabilised", "sinkhorn_stabilized", x, y, epsilon, l2),
            _torch("PyTorch log", x, y, epsilon, target, linear=False),
            _pot("POT log", "sinkhorn_log", x, y, epsilon, l2, plain=True),
            _geomloss("GeomLoss", x, y, epsilon),
        ]


def _pot(name, method, x, y, epsilon, settings, plain=False):
    n, m = len(x), len(y)
    a, b = np.full(n, 1 / n, x.dtype), np.full(m, 1 / m, x.dtype)

    def prepare(setting, most):
        stop = 0 if setting is None else setting
        return lambda: ot.sinkhorn(
            a, b, ot.dist(x, y), epsilon, method=method, numItermax=most, stopThr=stop, log=True, warn=False
        )

    def answer(result):
        log = result[1]
        if "alpha" in log:  # Potentials of u = exp(alpha / epsilon).
            u, v = np.asarray(log["alpha"], np.float64) / epsilon, np.asarray(log["beta"], np.float64) / epsilon
        elif "log_u" in log:
            u, v = np.asarray(log["log_u"], np.float64), np.asarray(log["log_v"], np.float64)
        else:
            with np.errstate(divide="ignore"):
                u, v = np.log(np.asarray(log["u"], np.float64)), np.log(np.asarray(log["v"], np.float64))
        iterations = log.get("niter", log.get("n_iter"))
        return epsilon * (u + np.log(n)), epsilon * (v + np.log(m)), None if iterations is None else int(iterations) + 1

    return Method(name, settings, prepare, answer, plain)


def _ott(name, x, y, epsilon, target, *, kernel=False, momentum=False, annealed=False, anderson=False):
    n, m = len(x), len(y)
    given = jnp.asarray(x), jnp.asarray(y)
    options = {}
    if momentum:
        # Adaptive over-relaxation (Lehmann et al. 2021) from iteration 40 on.
        options["momentum"] = acceleration.Momentum(start=40, inner_iterations=10)
    if anderson:
        options["anderson"] = acceleration.AndersonAcceleration(memory=5, refresh_every=1)
    if not kernel:
        options["initializer"] = initializers.DefaultInitializer()

    def prepare(setting, most):
        def solve(x, y):
            cost = peers.jax_cost(x, y)
            if kernel:
                geom = geometry.Geometry(kernel_matrix=jnp.exp(-cost / epsilon), epsilon=epsilon)
            else:
                schedule = epsilon
                if annealed:
                    schedule = epsilon_scheduler.Epsilon(epsilon, init=float(_start(x_max, y_max) / epsilon), decay=0.9)
                geom = geometry.Geometry(cost_matrix=cost, epsilon=schedule)
            solver = ott_sinkhorn.Sinkhorn(
                lse_mode=not kernel, threshold=-1.0 if setting is None else setting, max_iterations=most, **options
            )
            out = solver(linear_problem.LinearProblem(geom))
            return out.f, out.g, out.n_iters

        compiled = jax.jit(solve).lower(*given).compile()
        return lambda: jax.block_until_ready(compiled(*given))

    x_max, y_max = np.asarray(x), np.asarray(y)

    def answer(result):
        f, g, iterations = (np.asarray(part, np.float64) for part in result)
        return f + epsilon * np.log(n), g + epsilon * np.log(m), int(iterations)

    # Verified in another way than it is measured: a little closer may be needed.
    plain = not (momentum or annealed or anderson)
    return Method(name, [target, 0.5 * target, 0.1 * target], prepare, answer, plain)


def _start(x, y):
    """The cost of the diagonal of the box around both clouds."""
    both = np.concatenate([x, y])
    return ((both.max(0) - both.min(0)) ** 2).sum()


def _torch(name, x, y, epsilon, target, *, linear, dtype=torch.float64):
    """The loop that people write: the L1 error of the rows every ten iterations."""
    n, m = len(x), len(y)
    tx, ty = torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)

    def linear_loop(stop, most):
        kernel = torch.exp(peers.torch_cost(tx, ty) / -epsilon)
        transposed = kernel.T
        u, v = torch.ones(n, dtype=dtype), torch.ones(m, dtype=dtype)
        for iteration in range(1, most + 1):
            sums = kernel @ v
            if iteration % 10 == 1 and iteration > 1 and float((u * sums / m - 1).abs().sum()) / n <= stop:
                break
            u = m / sums
            v = n / (transposed @ u)
        return epsilon * torch.log(u), epsilon * torch.log(v), iteration

    def log_loop(stop, most):
        scaled = peers.torch_cost(tx, ty) / -epsilon
        f, g = torch.zeros(n, dtype=dtype), torch.zeros(m, dtype=dtype)
        for iteration in range(1, most + 1):
            new = -torch.logsumexp(scaled + (g - np.log(m))[None, :], 1)
            if iteration % 10 == 1 and iteration > 1 and float((torch.exp(f - new) - 1).abs().sum()) / n <= stop:
                break
            f = new
            g = -torch.logsumexp(scaled + (f - np.log(n))[:, None], 0)
        return epsilon * f, epsilon * g, iteration

    loop = linear_loop if linear else log_loop

    def prepare(setting, most):
        def run():
            with torch.no_grad():
                return loop(-1.0 if setting is None else setting, most)

        return run

    def answer(result):
        return result[0].double().numpy(), result[1].double().numpy(), result[2]

    return Method(name, [target, 0.5 * target], prepare, answer, plain=True)


def _geomloss(name, x, y, epsilon):
    """Its schedule has a fixed length; slower annealing is the one way to more accuracy."""
    import geomloss

    tx, ty = (torch.from_numpy(np.sqrt(2) * p) for p in (x, y))

    def prepare(setting, most):
        loss = geomloss.SamplesLoss(
            "sinkhorn", p=2, blur=epsilon**0.5, scaling=0.5 if setting is None else setting, debias=False,
            potentials=True, backend="tensorized",
        )  # fmt: skip

        def run():
            with torch.no_grad():
                return loss(tx, ty)

        return run

    def answer(result):
        return result[0].numpy().ravel(), result[1].numpy().ravel(), None

    return Method(name, [0.5, 0.9], prepare, answer)
