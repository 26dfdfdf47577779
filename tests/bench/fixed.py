"""Fixed iterations: each row's answers are checked against float64, then all contenders are timed in turns."""

import sys

import numpy as np

import rows
import timing


class Ceilings:
    """Rates of this machine, the best of all times that they were measured: other work on it hides them."""

    def __init__(self, solver, toy):
        self._solver = solver
        self._sizes = [2**k for k in range(14, 29, 7 if toy else 1)]
        self.fma = self.exp = 0.0
        self.reads = [0.0] * len(self._sizes)
        self.measure()

    def measure(self):
        self.fma = max(self.fma, self._solver.fma_rate())
        self.exp = max(self.exp, self._solver.exp_rate())
        self.reads = [max(best, self._solver.read_rate(size)) for best, size in zip(self.reads, self._sizes)]

    def read(self, size):
        """Bytes per second from a working set of `size` bytes."""
        return float(np.interp(np.log2(max(size, 1)), np.log2(self._sizes), self.reads))

    def table(self):
        return {"fma": self.fma, "exp": self.exp, "read": dict(zip(self._sizes, self.reads))}


def run(solver, *, with_peers, toy=False, only="", seconds_each=0.8):
    """Results of the rows whose name contains `only`, one dict each, and the ceilings."""
    ceilings = Ceilings(solver, toy)
    chosen = [row for row in (rows.toy_rows() if toy else rows.all_rows()) if only in row.name]
    results, failures = [], []
    for row in chosen:
        try:
            results.append(run_row(row, solver, with_peers, seconds_each))
            print(describe(results[-1]), file=sys.stderr, flush=True)
        except RuntimeError as failure:  # Ours is wrong or fails: the other rows still tell something.
            failures.append(f"{row.name}: {failure}")
            print("FAILED", failures[-1], file=sys.stderr, flush=True)
    ceilings.measure()
    for result in results:
        result["floor_ms"], result["bound"] = rows.floor(result.pop("demand"), ceilings)
    return {"rows": results, "ceilings": ceilings.table(), "failures": failures}


def run_row(row, solver, with_peers, seconds_each):
    work = row.make()
    seconds, report = solver.solve(work.ours, 3, warmups=1)
    error = work.error(tuple(work.ours.outputs.values()))
    if not error <= row.tolerance:
        raise RuntimeError(f"the answer is wrong by {error:.2e} {row.unit}")
    timers = {"ours": (lambda count: solver.solve(work.ours, count, warmups=min(count, 20))[0], min(seconds))}

    others = {}
    for peer in _peers(work.peers) if with_peers else []:
        entry = others[peer.name] = {"same_work": peer.same_work}
        try:
            entry["error"] = work.error(peer.answer(peer.run()))
            entry["right"] = entry["error"] <= row.tolerance
            if entry["right"] or not peer.same_work:
                estimate = min(timing.time_calls(peer.run, 2))
                timers[peer.name] = (lambda count, run=peer.run: timing.time_calls(run, count), estimate)
        except Exception as failure:  # A peer's trouble is a line in the table, not the end of the run.
            entry["failed"] = str(failure).splitlines()[0][:200]

    times = timing.interleave(timers, seconds_each=seconds_each)
    for name, entry in others.items():
        entry.update(times.get(name, {}))
    rivals = {name: e["median_ms"] for name, e in others.items() if e["same_work"] and "median_ms" in e}
    fastest = min(rivals, key=rivals.get) if rivals else None
    return {
        "name": row.name, "wanted_ms": row.wanted_ms, "error": error, "unit": row.unit,
        "ours": times["ours"], "family": report.family.decode(), "peers": others, "fastest_peer": fastest,
        "ratio": rivals[fastest] / times["ours"]["median_ms"] if rivals else None,
        "demand": work.demand, "limit": rows.limit_of(row.name),
    }  # fmt: skip


def _peers(spec):
    import peers  # Here: toy runs need none of its libraries.

    kind, arguments = spec
    return getattr(peers, kind)(**arguments)


def describe(result):
    ours, peer = result["ours"], result["fastest_peer"]
    text = f"{result['name']}: {ours['median_ms']:.4g} ms (min {ours['min_ms']:.4g})"
    if result["wanted_ms"]:
        text += f", wanted {result['wanted_ms']}"
    if peer:
        text += f"; {peer} {result['peers'][peer]['median_ms']:.4g} ms, {result['ratio']:.1f} x"
    return text + f"; error {result['error']:.1e} {result['unit']}"
