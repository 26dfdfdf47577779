"""Tables of transport on a GPU from the lines that gpu_transport and gpu_hessian print.

    gpu_transport > lines; gpu_hessian >> lines
    python gpu_transport_peer.py >> lines; python gpu_divergence_peer.py >> lines
    python gpu_transport.py lines > results/gpu_transport.md

A floor is the largest of three: exponentials (4.2e12/s), products (three half-precision ones for STRICT, one for FAST,
at 788 TFLOP/s) and bytes (4.29 TB/s) of the half steps and of the one that measures; of a cloud the lesser of that and
of keeping the first iteration's exponents, which are read once an iteration if caches do not hold them. Peers that the
lines do not have are the medians of NUMERICS section 5, measured on the same kind of machine, and marked by a star.
"""

import json
import sys

EXPONENTIALS, PRODUCTS, BYTES, CACHE = 4.2e12, 788e12, 4.29e12, 50e6
# n, d: FlashSinkhorn float32, TF32, ms, forward, 10 alternating iterations.
FLASH = {
    (1024, 64): (None, 1.06), (4096, 64): (4.24, None), (10000, 64): (22.1, 3.94), (50000, 64): (None, 47.2),
    (10000, 3): (6.98, None), (10000, 128): (43.3, 5.39), (10000, 512): (164, 16.0), (4096, 784): (43.2, 6.40),
}
FLASH_GRADIENT = {
    (1024, 64): (None, 2.00), (4096, 64): (5.15, None), (10000, 64): (25.1, 4.88), (50000, 64): (None, 57.0),
    (10000, 3): (8.06, None), (10000, 128): (110, 7.18), (10000, 512): (351, 23.0), (4096, 784): (126, 10.0),
}
WANTED = {
    (1024, 64): (0.08, 0.06), (4096, 64): (0.30, 0.20), (10000, 64): (1.4, 0.75), (50000, 64): (32, 15),
    (10000, 3): (0.9, 0.8), (10000, 128): (2.8, 1.3), (10000, 512): (10, 4), (4096, 784): (2.6, 1.1),
    (1000, 64): (None, None),
}
# batch, n, d: PyTorch batched, torch.compile.
TORCH = {(256, 64, 64): (7.2, 1.00), (256, 128, 64): (9.3, 3.63), (256, 256, 64): (29.8, 12.2),
         (64, 512, 64): (30.2, 12.4), (1024, 64, 3): (9.9, 2.96)}


def floor_ms(row):
    """Of all passes over the pairs, measuring included."""
    pairs = row["count"] * row["n"] * row["m"]
    passes = 2 * row["iterations"] + 2
    products = 0 if row["dense"] else 2 * row["dim"] * (1 if row["precision"] == "FAST" else 3)
    if row["dense"] and row["n"] * row["m"] <= 128 * 128:  # Densities are made a few times, C is read once.
        return 1e3 * max(5 * pairs / EXPONENTIALS, 4 * pairs / BYTES)
    traffic = 4 * pairs * (row["iterations"] + 1) / BYTES if row["dense"] and row["n"] > 4096 else 0
    floor = 1e3 * max(passes * pairs / EXPONENTIALS, passes * pairs * products / PRODUCTS, traffic)
    if row["dense"]:
        return floor
    kept = pairs * (2 if row["precision"] == "FAST" else 4)
    traffic = kept * (row["iterations"] + 1) / BYTES if kept > CACHE else 0
    sweeps = row["iterations"] + 2  # Of one exponential a pair for both sides, but in the first iteration.
    return min(floor, 1e3 * max(sweeps * pairs / EXPONENTIALS, 3 * pairs * products / PRODUCTS, traffic))


def show(value):
    if value is None or value < 0:
        return "-"
    return f"{value:.3g}"


def table(title, head, rows):
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def dense(lines):
    rows = []
    for r in lines:
        if r["name"].startswith("dense"):
            floor = floor_ms(r)
            rows.append([f"{r['count']} x {r['n']} x {r['m']}", str(r["iterations"]), show(r["median_ms"]),
                         show(r["min_ms"]), show(floor), show(r["median_ms"] / floor), show(r["error_eps"])])
    table("Dense cost matrices (issue 4, shows 3)",
          ["problems", "iterations", "ms, median", "least", "floor", "ratio", "error / eps"], rows)


def flash_of(lines, key, tf32, name="flash"):
    """FlashSinkhorn's milliseconds: of this run, or earlier ones with a star."""
    for r in lines:
        if r["name"] == name and (r["n"], r["dim"]) == key and r["tf32"] == tf32:
            return show(r["median_ms"])
    earlier = (FLASH if name == "flash" else FLASH_GRADIENT).get(key, (None, None))[tf32]
    return show(earlier) + ("*" if earlier else "")


def clouds(lines):
    rows = []
    for r in lines:
        if r["name"] != "cloud":
            continue
        key = (r["n"], r["dim"])
        wanted = WANTED[key][r["precision"] == "FAST"]
        rows.append([f"{r['n']}, {r['dim']}", r["precision"], show(r["median_ms"]), show(floor_ms(r)), show(wanted),
                     flash_of(lines, key, False), flash_of(lines, key, True), show(r["error_eps"]),
                     show(r["workspace_mb"])])
    table("Clouds, 10 alternating iterations, forward, ms (issue 5, shows 2)",
          ["n = m, d", "precision", "ours", "floor", "wanted", "FlashSinkhorn float32", "TF32", "error / eps", "MB"],
          rows)
    rows = [[f"{r['n']}, {r['dim']}", "TF32" if r["tf32"] else "float32", show(r["median_ms"]), show(r["error_eps"])]
            for r in lines if r["name"] == "flash"]
    table("FlashSinkhorn in the same run",
          ["n = m, d", "precision", "ms", "error / eps"], rows)
    forward = {(r["n"], r["dim"]): r["median_ms"] for r in lines if r["name"] == "cloud" and r["precision"] == "STRICT"}

    def over(row):
        return f"{100 * (row['median_ms'] / forward[row['n'], row['dim']] - 1):+.0f} %"

    rows = []
    for r in lines:
        if r["name"] in ("cloud gradient", "cloud symmetric"):
            key = (r["n"], r["dim"])
            flash = ["-", "-"]
            if "gradient" in r["name"]:
                flash = [flash_of(lines, key, tf32, "flash gradient") for tf32 in (False, True)]
            rows.append([f"{r['n']}, {r['dim']}", r["name"][6:], show(r["median_ms"]), over(r),
                         show(r["gradient_error"]), *flash])
    table("The same with gradients to x and y; symmetric updates. STRICT, ms",
          ["n = m, d", "what", "ours", "against forward", "gradient's error", "FlashSinkhorn float32", "TF32"], rows)
    rows = [[f"{r['n']}, {r['dim']}", show(r["median_ms"]), over(r), show(r["error_eps"])]
            for r in lines if r["name"] == "relaxed"]
    table("The same with relaxed marginals (rho 1). STRICT, ms", ["n = m, d", "ours", "against forward", "error / eps"],
          rows)
    for name, title, iterations in (("middle", "holds on its chip", 50), ("looped", "sweeps in one launch", 50),
                                    ("multiplied", "multiplies anew in each iteration, in one launch", 10)):
        rows = []
        for r in lines:
            if r["name"].startswith(name):
                size = f"{r['count']} x {r['n']} x {r['m']}" + (", costs" if r["dense"] else f", {r['dim']}")
                rows.append([size, r["precision"], show(r["median_ms"]), show(r["error_eps"]), show(r["error_b"])])
        table(f"Sizes that a whole GPU {title}, {iterations} iterations, ms",
              ["problems x n x m, d", "precision", "ms", "error / eps", "columns' marginal error"], rows)


def hessians(lines):
    wanted, earlier = {2048: 0.06, 10000: 0.5}, {2048: 0.8, 10000: 5.6}  # At d = 64; FlashSinkhorn's.
    rows = []
    for r in lines:
        if r["name"] == "hessian":
            common = r["dim"] == 64 and r["directions"] == 1
            rows.append([f"{r['n']}, {r['dim']}", str(r["directions"]), r["precision"], show(r["iteration_ms"]),
                         show(wanted[r["n"]]) if common else "-",
                         show(earlier[r["n"]]) + "*" if common else "-",
                         str(r["iterations"]), show(r["all_ms"] - r["without_ms"]), show(r["error"])])
    table("Hessian-vector products in x and y, ms for an iteration of the conjugate gradients (issue 5, shows 2)",
          ["n = m, d", "directions", "precision", "an iteration", "wanted", "FlashSinkhorn float32, in x",
           "iterations to 1e-5", "all of them, transfers too", "error"], rows)


def batches(lines):
    rows = []
    for r in lines:
        if r["name"] == "batch":
            key = (r["count"], r["n"], r["dim"])
            eager, compiled, graph, star = *TORCH[key], None, "*"
            for t in lines:
                if t["name"] == "torch" and (t["count"], t["n"], t["dim"]) == key:
                    eager, compiled, graph, star = t["eager_ms"], t["compiled_ms"], t["graph_ms"], ""
            rows.append([f"{r['count']} x {r['n']}, {r['dim']}", show(r["median_ms"]), show(eager) + star,
                         show(compiled) + star, show(graph), show(compiled / r["median_ms"]),
                         show(graph and graph / r["median_ms"]), show(r["error_eps"])])
    table("Batches, 50 iterations, STRICT, ms (issue 5, shows 3)",
          ["batch x n, d", "ours", "PyTorch", "torch.compile", "the same in a CUDA graph", "times faster",
           "than the graph", "error / eps"], rows)
    rows = [[str(r["dim"]), show(r["uniform_ms"]), show(r["ragged_ms"]), show(r["share"]), show(r["error_eps"])]
            for r in lines if r["name"] == "ragged"]
    table("1,024 problems in one batch, 50 iterations: 512 points each; 16..1,024 points",
          ["d", "uniform, ms", "ragged, ms", "ragged / its share", "error / eps of every 16th"], rows)


def convergence(lines):
    rows = [[r["name"], f"{r['count']} x {r['n']}, {r['dim']}", show(r["epsilon"]), str(r["iterations"]),
             show(r["median_ms"]), show(max(r["error_a"], r["error_b"]))] for r in lines if "1e-6" in r["name"]]
    self_terms = [[f"{r['count']} x {r['n']}, {r['dim']}", show(r["epsilon"]), str(r["iterations"]),
                   show(r["median_ms"]), show(r["error_eps"])] for r in lines if r["name"] == "debiased"]
    table("Debiased, STRICT, ms", ["problems x n = m, d", "eps", "iterations", "ms", "error / eps"], self_terms)
    annealed = [[f"{r['count']} x {r['n']}, {r['dim']}", show(r["epsilon"]), show(r["median_ms"]), show(r["error_eps"]),
                 show(r["gradient_error"])] for r in lines if r["name"] == "annealed"]
    table("Debiased, symmetric updates, epsilon annealed by quarters from the clouds' extent, 12 iterations, with "
          "gradients, ms", ["problems x n = m, d", "eps", "ms", "error / eps", "gradient's error"], annealed)
    theirs = {(r["count"], r["n"], r["dim"]): r for r in lines if r["name"] == "geomloss"}
    divergences = []
    for r in (r for r in lines if r["name"] == "divergence"):
        peer = theirs.get((r["count"], r["n"], r["dim"]), {"eager_ms": None, "error_eps": None})
        divergences.append([f"{r['count']} x {r['n']}, {r['dim']}", show(r["median_ms"]), show(peer["eager_ms"]),
                            show(peer["eager_ms"] and peer["eager_ms"] / r["median_ms"]), show(r["error_eps"]),
                            show(r["gradient_error"]), show(peer["error_eps"])])
    table("Divergences as GeomLoss solves them (blur .05, scaling .5; 9 iterations), with gradients, ms",
          ["problems x n = m, d", "ours", "GeomLoss", "times faster", "error / eps", "gradient's error",
           "GeomLoss's loss, error / eps"], divergences)
    judged = [[f"{r['count']} x {r['n']}, {r['dim']}", "yes" if "debiased" in r["name"] else "no",
               str(r["iterations"]), show(r["median_ms"]), show(max(r["error_a"], r["error_b"]))]
              for r in lines if r["name"].startswith("symmetric to 1e-5")]
    table("Symmetric updates to a marginal error of 1e-5, eps .05, ms",
          ["problems x n = m, d", "debiased", "iterations", "ms", "marginal error"], judged)
    small = [[f"{r['n']}, {r['dim']}", show(r["epsilon"]), str(r["iterations"]), show(r["median_ms"]),
              show(r["error_eps"]), show(r["workspace_mb"])] for r in lines if r["name"] == "small epsilon"]
    table("Small epsilon: exponents need float64. Forward, STRICT, ms",
          ["n = m, d", "eps", "iterations", "ms", "error / eps", "MB"], small)
    table("To a marginal error of 1e-6, STRICT (issue 5, shows 4)",
          ["what", "problems x n = m, d", "eps", "iterations", "ms", "error reached"], rows)
    defaults = [[f"{r['n']}, {r['dim']}", r["name"].replace("default", ""), r["precision"], show(r["epsilon"]),
                 str(r["iterations"]), show(r["median_ms"]), show(max(r["error_a"], r["error_b"]))]
                for r in lines if r["name"].startswith("default")]
    table("To a marginal error of 1e-5, which the server takes where nothing is said",
          ["n = m, d", "what", "precision", "eps", "iterations", "ms", "error reached"], defaults)
    rows = [[str(r["n"]), str(r["dim"]), str(r["iterations"]), show(r["median_ms"]), show(r["workspace_mb"])]
            for r in lines if r["name"] == "million"]
    table("Memory (issue 5, shows 5)", ["n = m", "d", "iterations", "ms", "workspace, MB"], rows)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.startswith("{")]
    print("# Transport on a GPU\n")
    print("\n".join(sys.argv[2:]))
    for part in (dense, clouds, hessians, batches, convergence):
        part(lines)


if __name__ == "__main__":
    main()
