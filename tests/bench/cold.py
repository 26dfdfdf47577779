"""From cold to a marginal error: how long until both L1 marginal errors, verified in float64 from the returned
potentials, are at most the target. Inputs are points; making the cost is part of the work.

Peers stop by tests of their own (POT: an L2 norm every ten iterations), so each is given the loosest setting whose
answer passes. A peer that would need much longer than the fastest one so far is listed as such: plain alternating
iterations are the same mathematics in every library, so their count is known once one has got there.
"""

import math
import sys
import time

import numpy as np

import ours
import reference
import timing

TARGET = 1e-6
BOUND_SECONDS = 60.0
# A peer is given up beyond this many times the fastest so far, and beyond half of what is left of the case's
# time, which is twice the bound.
PATIENCE = 3.0


def uniform_square(n):
    rng = np.random.default_rng(5)
    return rng.random((n, 2)), rng.random((n, 2))


def gaussian_mixtures(n):
    """Three blobs against two, in the plane."""
    rng = np.random.default_rng(6)

    def draw(centres, widths):
        which = rng.integers(len(centres), size=n)
        return np.array(centres)[which] + np.array(widths)[which, None] * rng.standard_normal((n, 2))

    return draw([(0, 0), (2, 1), (1, 3)], [0.3, 0.5, 0.2]), draw([(1, 1), (3, 2)], [0.6, 0.3])


CASES = {"uniform square": uniform_square, "Gaussian mixtures": gaussian_mixtures}


def run(solver, *, with_peers, n=1000, factors=(1e-1, 1e-2, 1e-3), only="", bound_seconds=BOUND_SECONDS):
    results = []
    for case, make in CASES.items():
        if only not in case:
            continue
        x, y = make(n)
        cost = reference.squared_distances(x, y)
        for factor in factors:
            result = run_case(solver, x, y, cost, factor * cost.mean(), with_peers, bound_seconds)
            results.append({"case": f"{case}, n = {n:,}", "factor": factor} | result)
            print(describe(results[-1]), file=sys.stderr, flush=True)
    failures = [
        f"{r['case']}, {r['factor']:g}: ours {name} ends at {entry['verified_error']:.1e}"
        for r in results
        for name, entry in r["ours"].items()
        if not entry["there"]
    ]
    return {"target": TARGET, "rows": results, "failures": failures}


def run_case(solver, x, y, cost, epsilon, with_peers, bound_seconds):
    mine, timers = {}, {}
    for name, precision in (("strict", ours.STRICT), ("double", ours.DOUBLE)):
        problem = ours.point_cloud(x, y, epsilon, iterations=1_000_000, tolerance=TARGET, precision=precision)
        seconds, report = solver.solve(problem)
        error = reference.marginal_error(problem.outputs["f"], problem.outputs["g"], cost, epsilon)
        mine[name] = {
            "verified_error": error,
            "there": error <= 1.001 * TARGET,
            "iterations": report.iterations,
            "stop_reason": ours.STOP_REASONS[report.stop_reason],
        }
        timers[f"ours {name}"] = (lambda count, p=problem: solver.solve(p, count, warmups=1)[0], min(seconds))

    others = race(x, y, cost, epsilon, bound_seconds) if with_peers else {}
    there = {name: entry for name, entry in others.items() if entry["there"]}
    limit = PATIENCE * min((entry["seconds"] for entry in there.values()), default=0)
    for name, entry in there.items():
        if entry["seconds"] <= limit:
            timers[name] = (lambda count, run=entry["run"]: timing.time_calls(run, count), entry["seconds"])
    times = timing.interleave(timers, rounds=5, seconds_each=1.0)
    for name, entry in mine.items():
        entry.update(times[f"ours {name}"])
    for name, entry in others.items():
        entry.pop("run", None)
        entry["median_ms"] = times.get(name, {}).get("median_ms", 1e3 * entry.pop("seconds", math.nan))
    fastest = min((n for n, e in others.items() if e["there"]), key=lambda n: others[n]["median_ms"], default=None)
    best = min((e["median_ms"] for e in mine.values() if e["there"]), default=None)
    return {
        "epsilon": epsilon, "ours": mine, "peers": others, "fastest_peer": fastest,
        "ratio": others[fastest]["median_ms"] / best if fastest and best else None,
    }  # fmt: skip


# ---- Peers ----------------------------------------------------------------------------------------------------------


def race(x, y, cost, epsilon, bound_seconds):
    """{name: {there, seconds, iterations, verified_error, note}}."""
    import cold_peers

    results = {}
    plain_iterations = None  # Of alternating updates, once known.
    left = 2 * bound_seconds
    for method in cold_peers.methods(x, y, cost, epsilon, TARGET):
        fastest = min((e["seconds"] for e in results.values() if e["there"]), default=math.inf)
        limit = min(max(left / 2, 5.0), max(PATIENCE * fastest, 2.0))
        start = time.perf_counter()
        try:
            entry = attempt(method, cost, epsilon, limit, plain_iterations)
        except Exception as failure:  # A line in the table, not the end of the run.
            entry = {"there": False, "note": f"failed: {str(failure).splitlines()[0][:150]}"}
        left -= time.perf_counter() - start
        if entry["there"] and method.plain and plain_iterations is None:
            plain_iterations = entry["iterations"]
        results[method.name] = entry
        shown = {key: value for key, value in entry.items() if key != "run"}
        print(f"  {method.name}: {shown}", file=sys.stderr, flush=True)
    return results


def attempt(method, cost, epsilon, limit, plain_iterations):
    """Runs a method with its settings from the loosest on, until the verified error is reached."""
    step = method.seconds_per_iteration()
    if method.plain and plain_iterations and plain_iterations * step > limit:
        seconds = plain_iterations * step
        return {
            "there": False,
            "note": f"not run: {plain_iterations:,} iterations at {1e3 * step:.2f} ms are {seconds:.0f} s",
        }
    entry = {"there": False, "note": "no setting"}
    cap = int(limit / step / 10) * 10
    deadline = time.perf_counter() + limit
    for setting in method.settings:
        if entry.get("seconds", 0) > deadline - time.perf_counter():
            break  # A stricter setting takes longer than this one did.
        run = method.prepare(setting, max(cap, 10))
        start = time.perf_counter()
        f, g, iterations = method.answer(run())
        seconds = time.perf_counter() - start
        error = reference.marginal_error(f, g, cost, epsilon)
        entry = {
            "there": error <= 1.001 * TARGET,
            "seconds": seconds,
            "iterations": iterations,
            "verified_error": error,
        }
        if entry["there"]:
            return entry | {"run": run}
        if iterations is not None and iterations >= cap - 20:
            return entry | {"note": f"error {error:.1e} after {iterations:,} iterations, {seconds:.1f} s"}
    return entry | {
        "note": f"error {entry.get('verified_error', math.inf):.1e} at its end, {entry.get('seconds', 0):.1f} s"
    }


def describe(result):
    text = f"{result['case']}, eps {result['factor']:g} of the mean cost:"
    for name, entry in result["ours"].items():
        text += (
            f" ours {name} {entry['median_ms']:.4g} ms ({entry['iterations']} it, error {entry['verified_error']:.1e}"
        )
        text += "" if entry["there"] else f", NOT THERE: {entry['stop_reason']}"
        text += ");"
    if result["fastest_peer"]:
        entry = result["peers"][result["fastest_peer"]]
        text += f" {result['fastest_peer']} {entry['median_ms']:.4g} ms"
        text += f", {result['ratio']:.1f} x" if result["ratio"] else ""
    return text
