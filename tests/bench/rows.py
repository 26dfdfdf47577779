"""The rows of the fixed-iteration table: the work, its float64 answer, what is wanted, and the floor."""

import dataclasses
from collections.abc import Callable

import numpy as np

import ours
import reference


@dataclasses.dataclass
class Row:
    name: str
    # Wanted milliseconds on two AVX-512 cores; None: not stated.
    wanted_ms: float | None
    # Largest error that counts as the same answer; see `error`.
    tolerance: float
    unit: str
    make: Callable[[], "Work"]


@dataclasses.dataclass
class Work:
    """A row's inputs, made when its turn comes."""

    ours: ours.Problem
    # Arguments of peers.transport or peers.normalization.
    peers: tuple[str, dict]
    # Error of an answer (f, g) or (plan, gradient), in the row's unit.
    error: Callable[[tuple], float]
    # For `floor`.
    demand: "list[list[Demand]]"


@dataclasses.dataclass
class Demand:
    """The least work there is, in counts. Multiply-adds and exponentials share their units, so their times add up;
    reads and writes overlap with them.
    """

    fma: float = 0
    exp: float = 0
    io_bytes: float = 0  # Inputs and outputs.


def transport_demand(n, m, dim, iterations, io_bytes):
    """Two ways: make the densities once and read them back in one pass an iteration (each serves rows and columns); or,
    for points, make them in each pass. dim 0: a cost matrix, made by one multiply-add.
    """
    pairs = n * m
    make = Demand(fma=pairs * (dim + 1), exp=pairs)
    use = Demand(fma=2 * pairs)
    kept = [make] + iterations * [dataclasses.replace(use, io_bytes=4 * pairs)]
    remade = iterations * [Demand(fma=make.fma + use.fma, exp=make.exp)]
    io = [Demand(io_bytes=io_bytes)]
    return [kept + io, remade + io] if dim else [kept + io]


def floor(ways, ceilings):
    """(milliseconds, what most of them are spent on) of the quickest way; a way is a list of phases."""
    best = (float("inf"), "")
    for phases in ways:
        total, spent = 0.0, {}
        for phase in phases:
            fma, exp = phase.fma / ceilings.fma, phase.exp / ceilings.exp
            moved = phase.io_bytes / ceilings.read(phase.io_bytes) if phase.io_bytes else 0
            kinds = {"reads": moved} if moved > fma + exp else {"multiply-adds": fma, "exponentials": exp}
            total += sum(kinds.values())
            for kind, seconds in kinds.items():
                spent[kind] = spent.get(kind, 0) + seconds
        best = min(best, (1e3 * total, max(spent, key=spent.get)))
    return best


# ---- Transport ------------------------------------------------------------------------------------------------------


def uniform_clouds(n, dim, seed=1):
    """Two clouds, uniform in a cube whose side makes the mean cost 1/2 in any dimension."""
    rng = np.random.default_rng(seed)
    return [(rng.random((n, dim)) * np.sqrt(3 / dim)).astype(np.float32) for _ in range(2)]


def cloud_row(n, dim, wanted_ms, epsilon=0.1, iterations=10):
    def make():
        x, y = uniform_clouds(n, dim)
        cost = reference.squared_distances(x, y)
        expected = reference.potentials(cost, epsilon, iterations)
        return Work(
            ours=ours.point_cloud(x, y, epsilon, iterations=iterations),
            peers=("transport", dict(x=x, y=y, epsilon=epsilon, iterations=iterations, slow_too=n <= 1000)),
            error=lambda answer: reference.potential_error(answer, expected, epsilon),
            demand=transport_demand(n, n, dim, iterations, io_bytes=8 * n * (dim + 1)),
        )

    return Row(f"clouds {n:,}, d = {dim}, {iterations} it, eps {epsilon}", wanted_ms, 2e-3, "eps", make)


def dense_row(n, epsilon, wanted_ms, iterations=100):
    def make():
        x, y = [np.random.default_rng(seed).random((n, 2)) for seed in (1, 2)]
        cost = reference.squared_distances(x, y).astype(np.float32)
        expected = reference.potentials(cost, epsilon, iterations)
        peer = dict(cost=cost, epsilon=epsilon, iterations=iterations, slow_too=False)
        return Work(
            ours=ours.dense(cost, epsilon, iterations=iterations),
            peers=("transport", peer | dict(dtypes=(np.float32, np.float64))),
            error=lambda answer: reference.potential_error(answer, expected, epsilon),
            demand=transport_demand(n, n, 0, iterations, io_bytes=4 * n * n),
        )

    return Row(f"dense {n:,} x {n:,}, {iterations} it, eps {epsilon}", wanted_ms, 2e-3, "eps", make)


# ---- Normalisation --------------------------------------------------------------------------------------------------


def normalization_row(count, n, iterations, wanted_ms, backward=False):
    def make():
        rng = np.random.default_rng(3)
        logits = rng.standard_normal((count, n, n)).astype(np.float32)
        cotangent = rng.standard_normal((count, n, n)).astype(np.float32) if backward else None
        sample = np.linspace(0, count - 1, min(count, 256)).astype(int)
        expected = reference.log_row_column(
            logits[sample], iterations, cotangent[sample].astype(np.float64) if backward else None
        )

        def error(answer):
            worst = np.abs(answer[0][sample] - expected[0]).max()
            if backward:
                worst = max(worst, np.abs(answer[1][sample] - expected[1]).max() / np.abs(expected[1]).max())
            return float(worst)

        entries = count * n * n
        # A half step: a multiply-add per entry and a reciprocal (a table look-up and a Newton step: about four
        # multiply-adds) per line. Backward: two more multiply-adds per entry for each half step.
        half_steps = 2 * iterations * (entries + 4 * count * n)
        return Work(
            ours=ours.normalization(logits, iterations=iterations, cotangent=cotangent),
            peers=("normalization", dict(logits=logits, iterations=iterations, cotangent=cotangent)),
            error=error,
            demand=[
                [
                    Demand(
                        fma=half_steps + (2 * iterations * 2 * entries if backward else 0),
                        exp=entries,
                        io_bytes=4 * entries * (4 if backward else 2),
                    )
                ]
            ],
        )

    name = f"{count:,} x {n} x {n}, {iterations} it, {'forward + backward' if backward else 'forward'}"
    return Row(name, wanted_ms, 1e-4 if backward else 1e-5, "abs", make)


# Of rows over what is wanted. One core alone in its caches, by sampling and by differences of iterations and sizes; two
# 512-bit ports at 2.6 GHz (from the multiply-adds' ceiling).
LIMITS = {
    "clouds 256, d = 3": "Solved on one core: .0035 an iteration (256 KiB of densities from its second cache, .0022 at "
    "that cache's rate) and .035 before and after. Phases of 4 us are not worth the call of a second core.",
    "clouds 256, d = 64": "Solved on one core: .0035 an iteration, .062 for the densities (products at that core's "
    "ceiling: .051), .020 for centring and packing. With the densities made on two cores it took .153: the second "
    "core's call and its half of the densities, read from the other's cache, cost more than they saved.",
    "clouds 1,000, d": "Two cores' own caches hold 4 MB, the densities take 4 MB: .14 ns a pair and sweep from further "
    "away, .07 where they fit (n = 256).",
    "dense 1,000": "As for 1,000 points: densities as large as both cores' own caches, read in each of 100 sweeps.",
    "65,536 x 4 x 4": "A matrix takes a core 20 ns: 8 at start and end (transposition, exponentials), .6 an "
    "iteration; with backward 57 ns, 2.6 an iteration. 8 MB (with backward 17 MB) pass from and to beyond the cores' "
    "own caches.",
    "65,536 x 8 x 8": "A matrix takes a core 52 ns: 25 at start and end, 2.7 an iteration; with backward 115 ns, 7.9 "
    "an iteration. Forward, an iteration of 16 matrices is 208 vector operations, 104 cycles on two ports, and takes "
    "111. 34 MB pass from and to beyond the cores' own caches.",
    "1,024 x 64 x 64": "A matrix takes a core 5.4 us: 1.8 at start and end, .18 a sweep, which is 470 cycles for 512 "
    "multiply-adds, 512 loads and the transpositions that add up 64 rows (390 at two a cycle) and for the way from the "
    "last row's sum to the next sweep; with backward 14.8 us, .48 an iteration. 34 MB pass from and to beyond the "
    "cores' own caches.",
}


def limit_of(name):
    return next((text for start, text in LIMITS.items() if name.startswith(start)), "")


def all_rows():
    return [
        cloud_row(256, 3, 0.07),
        cloud_row(256, 64, 0.07),
        cloud_row(1000, 3, 1.0),
        cloud_row(1000, 64, 1.2),
        cloud_row(4000, 3, 25),
        cloud_row(4000, 64, 40),
        dense_row(1000, 0.1, 5),
        dense_row(1000, 0.01, 6),
        normalization_row(65536, 4, 20, 0.7),
        normalization_row(65536, 4, 20, 2, backward=True),
        normalization_row(65536, 8, 10, 1.5),
        normalization_row(65536, 8, 10, 5, backward=True),
        normalization_row(4096, 16, 20, None),
        normalization_row(4096, 16, 20, None, backward=True),
        normalization_row(1024, 64, 20, 2.5),
        normalization_row(1024, 64, 20, 8, backward=True),
        normalization_row(32, 4, 20, 0.010),
        normalization_row(32, 4, 20, 0.030, backward=True),
    ]


def toy_rows():
    """One of each kind, small."""
    return [
        cloud_row(60, 3, None),
        cloud_row(33, 64, None),
        dense_row(50, 0.1, None, iterations=30),
        dense_row(50, 0.01, None, iterations=30),
        normalization_row(64, 4, 20, None),
        normalization_row(64, 8, 10, None, backward=True),
        normalization_row(9, 16, 20, None, backward=True),
        normalization_row(3, 64, 20, None),
        normalization_row(3, 64, 20, None, backward=True),
    ]
