"""The libraries that ours is compared with, each in its fastest documented form for the work.

All iterate f from g = 0, then g from f (POT and OTT update the other way round, so they get x and y exchanged), as
often as asked, from the same inputs: clouds come as points, so the cost is part of the work. Compilation is not timed.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import geomloss
import jax
import jax.numpy as jnp
import numpy as np
import ot
import torch
import torch._dynamo
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn as ott_sinkhorn

jax.config.update("jax_enable_x64", True)
warnings.filterwarnings("ignore")


@dataclasses.dataclass
class Peer:
    name: str
    run: Callable[[], Any]
    # What `run` returned, as float64 arrays: (f, g), or (plan, gradient or None).
    answer: Callable[[Any], tuple]
    # False: another schedule than the one asked for; shown, but not compared with.
    same_work: bool = True


def set_threads(count):
    torch.set_num_threads(count)


def _numpy(array):
    if isinstance(array, torch.Tensor):
        array = array.detach()
    return np.asarray(array, np.float64)


# ---- Transport ------------------------------------------------------------------------------------------------------


def torch_cost(x, y):
    return torch.clamp((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * (x @ y.T), min=0)


def torch_log(cost, epsilon, iterations):
    n, m = cost.shape
    scaled = cost / -epsilon
    g = torch.zeros(m, dtype=cost.dtype)
    log_n, log_m = float(np.log(n)), float(np.log(m))
    for _ in range(iterations):
        f = -torch.logsumexp(scaled + (g - log_m)[None, :], 1)
        g = -torch.logsumexp(scaled + (f - log_n)[:, None], 0)
    return f * epsilon, g * epsilon


def torch_linear(cost, epsilon, iterations):
    n, m = cost.shape
    kernel = torch.exp(cost / -epsilon)
    v = torch.ones(m, dtype=cost.dtype)
    for _ in range(iterations):
        u = m / (kernel @ v)
        v = n / (kernel.T @ u)
    return epsilon * torch.log(u), epsilon * torch.log(v)


def ott_solve(cost, epsilon, iterations, lse_mode, **options):
    """cost [m, n]: OTT updates the columns' potential first."""
    if lse_mode:
        geom = geometry.Geometry(cost_matrix=cost, epsilon=epsilon)
    else:
        geom = geometry.Geometry(kernel_matrix=jnp.exp(-cost / epsilon), epsilon=epsilon)
    fixed = dict(min_iterations=iterations, inner_iterations=iterations, threshold=-1.0) | options
    solver = ott_sinkhorn.Sinkhorn(lse_mode=lse_mode, max_iterations=iterations, **fixed)
    out = solver(linear_problem.LinearProblem(geom))
    return out.g, out.f


def jax_cost(x, y):
    return jnp.maximum((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * (x @ y.T), 0)


def transport(*, x=None, y=None, cost=None, epsilon, iterations, slow_too=True, dtypes=(np.float32,)):
    """Peers for points x, y or for a cost matrix; `slow_too`: those that are never the fastest as well."""
    torch._dynamo.reset()  # It compiles a function for so many shapes only, and then no more.
    given = (x, y) if cost is None else (cost,)
    peers = []
    for dtype in dtypes:
        arrays = [np.ascontiguousarray(a, dtype) for a in given]
        made = [*_pot(arrays, epsilon, iterations, slow_too), *_ott(arrays, epsilon, iterations)]
        made += _torch(arrays, epsilon, iterations, slow_too)
        if dtype != np.float32:
            made = [dataclasses.replace(peer, name=f"{peer.name} {np.dtype(dtype)}") for peer in made]
        peers += made
    return peers if cost is not None else [*peers, _geomloss(x, y, epsilon)]


def _shape(arrays):
    return (len(arrays[0]), len(arrays[1])) if len(arrays) == 2 else arrays[0].shape


def _pot(arrays, epsilon, iterations, slow_too):
    n, m = _shape(arrays)
    tensors = [torch.from_numpy(a) for a in arrays]
    a, b = np.full(n, 1 / n, arrays[0].dtype), np.full(m, 1 / m, arrays[0].dtype)

    def exchanged(method, given, b, a):
        cost = ot.dist(given[1], given[0]) if len(given) == 2 else given[0].T
        return ot.sinkhorn(b, a, cost, epsilon, method=method, numItermax=iterations, stopThr=0, log=True, warn=False)

    def answer(result):
        log = result[1]
        if "log_u" in log:
            u, v = _numpy(log["log_u"]), _numpy(log["log_v"])
        else:
            with np.errstate(divide="ignore"):
                u, v = np.log(_numpy(log["u"])), np.log(_numpy(log["v"]))
        return epsilon * (v + np.log(n)), epsilon * (u + np.log(m))

    on_torch = (tensors, torch.from_numpy(b), torch.from_numpy(a))
    peers = [
        Peer("POT", lambda: exchanged("sinkhorn", arrays, b, a), answer),
        Peer("POT on PyTorch", lambda: exchanged("sinkhorn", *on_torch), answer),
    ]
    return peers + ([Peer("POT log", lambda: exchanged("sinkhorn_log", arrays, b, a), answer)] if slow_too else [])


def _ott(arrays, epsilon, iterations):
    n, m = _shape(arrays)
    given = [jnp.asarray(a) for a in arrays]

    def run(lse_mode):
        def solve(*given):
            cost = jax_cost(given[1], given[0]) if len(given) == 2 else given[0].T
            return ott_solve(cost, epsilon, iterations, lse_mode)

        compiled = jax.jit(solve).lower(*given).compile()
        return lambda: jax.block_until_ready(compiled(*given))

    def answer(result):
        return _numpy(result[0]) + epsilon * np.log(n), _numpy(result[1]) + epsilon * np.log(m)

    return [Peer("OTT kernel", run(False), answer), Peer("OTT log", run(True), answer)]


def _torch(arrays, epsilon, iterations, slow_too):
    tensors = [torch.from_numpy(a) for a in arrays]

    def run(solve, compiled=False):
        def whole(*given):
            return solve(torch_cost(*given) if len(given) == 2 else given[0], epsilon, iterations)

        body = torch.compile(whole, dynamic=False) if compiled else whole

        def call():
            with torch.no_grad():
                return body(*tensors)

        return call

    def answer(result):
        return _numpy(result[0]), _numpy(result[1])

    peers = [Peer("PyTorch linear", run(torch_linear), answer)]
    if slow_too:
        peers.append(Peer("PyTorch log", run(torch_log), answer))
    if iterations <= 10:  # It unrolls the loop.
        peers.append(Peer("torch.compile log", run(torch_log, compiled=True), answer))
    return peers


def _geomloss(x, y, epsilon):
    """Cost |x - y|^2 / 2 of points stretched by sqrt 2. Its own annealed schedule of averaged steps."""
    tx, ty = (torch.from_numpy(np.sqrt(np.float32(2)) * p.astype(np.float32)) for p in (x, y))
    loss = geomloss.SamplesLoss(
        "sinkhorn", p=2, blur=epsilon**0.5, scaling=0.5, debias=False, potentials=True, backend="tensorized"
    )

    def run():
        with torch.no_grad():
            return loss(tx, ty)

    return Peer("GeomLoss", run, lambda r: (_numpy(r[0]).ravel(), _numpy(r[1]).ravel()), same_work=False)


# ---- Normalisation --------------------------------------------------------------------------------------------------


def _torch_log(logits, iterations):
    log_plan = torch.clamp(logits, min=-1e5)
    for _ in range(iterations):
        log_plan = log_plan - torch.logsumexp(log_plan, 2, keepdim=True)
        log_plan = log_plan - torch.logsumexp(log_plan, 1, keepdim=True)
    return torch.exp(log_plan)


def _torch_linear(logits, iterations):
    plan = torch.softmax(logits, 2)
    plan = plan / plan.sum(1, keepdim=True)
    for _ in range(iterations - 1):
        plan = plan / plan.sum(2, keepdim=True)
        plan = plan / plan.sum(1, keepdim=True)
    return plan


def _torch_scalings(logits, iterations):
    """P = u K v with two vectors a matrix: less work a step than dividing the matrix."""
    kernel = torch.exp(logits - logits.amax(2, keepdim=True))
    v = torch.ones_like(kernel[:, :1, :])
    for _ in range(iterations):
        u = 1 / (kernel * v).sum(2, keepdim=True)
        v = 1 / (kernel * u).sum(1, keepdim=True)
    return u * kernel * v


def _torch_products(logits, iterations):
    """The same scalings by batched matrix-vector products."""
    kernel = torch.exp(logits - logits.amax(2, keepdim=True))
    transposed = kernel.transpose(1, 2)
    v = torch.ones_like(kernel[:, 0, :, None])
    for _ in range(iterations):
        u = 1 / torch.bmm(kernel, v)
        v = 1 / torch.bmm(transposed, u)
    return u * kernel * v.transpose(1, 2)


def _jax_scalings(logits, iterations):
    kernel = jnp.exp(logits - logits.max(2, keepdims=True))
    v = jnp.ones_like(kernel[:, :1, :])
    for _ in range(iterations):
        u = 1 / (kernel * v).sum(2, keepdims=True)
        v = 1 / (kernel * u).sum(1, keepdims=True)
    return u * kernel * v


def normalization(*, logits, iterations, cotangent=None):
    """Peers of LOG_ROW_COLUMN on [count, n, m], with the unrolled gradient if there is a cotangent."""
    torch._dynamo.reset()
    tensor = torch.from_numpy(logits)
    upstream = None if cotangent is None else torch.from_numpy(cotangent)

    def with_torch(body):
        if upstream is None:

            def run():
                with torch.no_grad():
                    return body(tensor, iterations), None
        else:

            def run():
                leaf = tensor.detach().requires_grad_()
                plan = body(leaf, iterations)
                return plan, torch.autograd.grad(plan, leaf, upstream)[0]

        return run

    def with_jax(body):
        given = [jnp.asarray(logits)] + ([] if cotangent is None else [jnp.asarray(cotangent)])

        def solve(w, *upstream):
            if not upstream:
                return body(w, iterations), None
            plan, pull_back = jax.vjp(lambda z: body(z, iterations), w)
            return plan, pull_back(upstream[0])[0]

        compiled = jax.jit(solve).lower(*given).compile()
        return lambda: jax.block_until_ready(compiled(*given))

    def answer(result):
        return tuple(None if part is None else _numpy(part) for part in result)

    runs = {
        "PyTorch log": with_torch(_torch_log),
        "PyTorch linear": with_torch(_torch_linear),
        "PyTorch scalings": with_torch(_torch_scalings),
        "PyTorch products": with_torch(_torch_products),
        "torch.compile scalings": with_torch(torch.compile(_torch_scalings, dynamic=False)),
        "JAX scalings": with_jax(_jax_scalings),
    }
    if cotangent is None:  # Never the faster of the two, and its backward takes long to compile.
        runs["torch.compile linear"] = with_torch(torch.compile(_torch_linear, dynamic=False))
    return [Peer(name, run, answer) for name, run in runs.items()]
