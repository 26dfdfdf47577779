"""The benchmarks: python tests/bench/bench.py [--only SECTIONS] [--rows TEXT] [--toy] [--no-peers] [--out DIR].

`tests/bench/run.sh` sets up what this needs and runs all of it. Tables and plot go to --out, else they are printed.
"""

import argparse
import os
import pathlib
import sys

CORES = sorted(os.sched_getaffinity(0))[:2]
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = str(len(CORES))  # Before any library reads it.
os.sched_setaffinity(0, CORES)

import cold  # noqa: E402
import fixed  # noqa: E402
import ours  # noqa: E402
import report  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="fixed,cold,serving", help="sections, separated by commas")
    parser.add_argument("--rows", default="", help="only rows whose name contains this text")
    parser.add_argument("--toy", action="store_true", help="small problems and short runs: a test of the benchmarks")
    parser.add_argument("--no-peers", action="store_true", help="ours alone; needs NumPy only")
    parser.add_argument("--seconds", type=float, default=0.8, help="time spent on each contender of a row")
    parser.add_argument("--triton-python", default=None, help="interpreter of an environment with nvidia-pytriton")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder of the tables")
    arguments = parser.parse_args()
    sections = arguments.only.split(",")
    if unknown := set(sections) - {"fixed", "cold", "serving"}:
        parser.error(f"--only: no section {sorted(unknown)}")

    with_peers = not arguments.no_peers
    if with_peers and set(sections) & {"fixed", "cold"}:
        import peers

        peers.set_threads(len(CORES))
    results = {"about": report.about(sys.argv, len(CORES))}
    if set(sections) & {"fixed", "cold"}:
        with ours.Solver(threads=len(CORES)) as solver:
            results["about"]["solver"] = solver.device()
            if "fixed" in sections:
                results["fixed"] = fixed.run(
                    solver, with_peers=with_peers, toy=arguments.toy, only=arguments.rows,
                    seconds_each=0.02 if arguments.toy else arguments.seconds,
                )  # fmt: skip
            if "cold" in sections:
                small = dict(n=60, factors=(1e-1,)) if arguments.toy else {}
                results["cold"] = cold.run(solver, with_peers=with_peers, only=arguments.rows, **small)
    if "serving" in sections:
        import serving

        results["serving"] = serving.run(
            toy=arguments.toy, triton_python=arguments.triton_python if with_peers else None
        )
    report.write(results, arguments.out)
    failures = [line for section in results.values() for line in section.get("failures", [])]
    return "\n".join(["FAILED", *failures]) if failures else 0


if __name__ == "__main__":
    sys.exit(main())
