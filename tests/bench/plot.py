"""The README's plot, from the JSON files that are there: python tests/bench/plot.py [DIR]."""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

OURS, PEER, WANTED = "#1a6faf", "#c9c9c9", "#d9822b"


def draw(folder):
    """Writes folder/bench.png."""
    panels = []
    for section, paint in (("fixed", _fixed), ("cold", _cold), ("serving", _serving)):
        path = folder / f"{section}.json"
        if path.exists():
            panels.append((paint, json.loads(path.read_text())[section]))
    panels = [(paint, data) for paint, data in panels if data.get("rows") or data.get("load")]
    if not panels:
        return
    widths = [{_fixed: 5.2, _cold: 4.6, _serving: 4.2}[paint] for paint, _ in panels]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(sum(widths), 4.6), gridspec_kw={"width_ratios": widths}, squeeze=False
    )
    for axis, (paint, data) in zip(axes[0], panels):
        paint(axis, data)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(folder / "bench.png", dpi=110)
    plt.close(figure)


def _dumbbells(axis, names, ours, peers, wanted=None):
    """A line per row: ours, the fastest peer, and what was wanted, in milliseconds."""
    for y, (mine, peer) in enumerate(zip(ours, peers)):
        if mine and peer:
            axis.plot([mine, peer], [y, y], color="#e4e4e4", linewidth=3, zorder=1)
            ratio = peer / mine
            axis.annotate(
                f"{ratio:.3g} x", ((mine * peer) ** 0.5, y), fontsize=6, ha="center", va="bottom", color="#555555"
            )
    rows = range(len(names))
    axis.scatter(peers, rows, s=26, color=PEER, edgecolor="#777777", linewidth=0.5, label="fastest peer", zorder=2)
    axis.scatter(ours, rows, s=30, color=OURS, label="ours", zorder=3)
    if wanted:
        axis.scatter(wanted, rows, s=40, color=WANTED, marker="|", label="wanted", zorder=4)
    axis.set_xscale("log")
    axis.set_yticks(list(rows), names)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds", fontsize=8)
    axis.legend(fontsize=7, frameon=False, loc="best")


def _fixed(axis, data):
    rows = data["rows"]
    peers = [r["peers"][r["fastest_peer"]]["median_ms"] if r["fastest_peer"] else None for r in rows]
    names = [r["name"].replace(" it,", "it,").replace("forward + backward", "+ backward") for r in rows]
    _dumbbells(
        axis, names, [r["ours"]["median_ms"] for r in rows], _floats(peers), _floats(r["wanted_ms"] for r in rows)
    )
    axis.set_title("Fixed iterations, same answer", fontsize=9)


def _cold(axis, data):
    rows = data["rows"]
    ours = [min((e["median_ms"] for e in r["ours"].values() if e["there"]), default=None) for r in rows]
    peers = [r["peers"][r["fastest_peer"]]["median_ms"] if r["fastest_peer"] else None for r in rows]
    names = [f"{r['case'].split(',')[0]}\n{r['factor']:g}" for r in rows]
    _dumbbells(axis, names, _floats(ours), _floats(peers))
    axis.set_title(f"Cold to a marginal error of {data['target']:g}", fontsize=9)


def _serving(axis, data):
    for (label, style), color in zip(
        (
            ("ours", "-o"),
            ("ours, one by one", "--o"),
            ("floor: an empty call", ":"),
            ("Triton", "-s"),
            ("Triton, compiled body", "--s"),
        ),
        (OURS, OURS, "#444444", "#777777", "#777777"),
    ):
        rows = [r for r in data["load"] if r["server"] == label and r["requests"]]
        if rows:
            axis.plot([r["clients"] for r in rows], [r["server_cpu_ms"] for r in rows], style, color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("concurrent clients", fontsize=8)
    axis.set_ylabel("server CPU per request, ms", fontsize=8)
    axis.set_title("Serving 32 matrices 4 x 4", fontsize=9)
    axis.legend(fontsize=7, frameon=False)


def _floats(values):
    return [float("nan") if value is None else value for value in values]


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "results"))
