"""Colour transfer between two photographs: each takes on the other's colours.

Colours are points of the cube [0, 1]^3. Optimal transport between the colours of two pictures says where each colour
goes; its barycentric projection is the new colour. Four independent samples of the pixels are four problems, sent over
one stream, which the server solves together; each answer holds both directions. The transport is unbalanced (`reach`):
a picture with much sky need not spend it on colours of which the other has little.

    pip install './client/python[demo]'
    python client/python/examples/colour_transfer.py --server localhost:8001 --picture colour_transfer.png

The pictures are the two photographs that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import uniform_filter
from scipy.spatial import cKDTree
from sklearn.datasets import load_sample_images

from sinkhorn_client import Client, Problem, TransportResult, problems

Array = npt.NDArray[Any]

EPSILON = 0.005  # Squared distance: colours blur by about its root, 0.07.
REACH = 0.4  # Distance beyond which a colour is rather left out than moved.


def main() -> None:
    arguments = parse_arguments()
    china, flower = (image.astype(np.float32) / 255 for image in load_sample_images().images)
    random = np.random.default_rng(0)
    samples = [(sample(random, china, arguments), sample(random, flower, arguments)) for _ in range(arguments.samples)]

    with Client(arguments.server, timeout=120) as client:
        info = client.server_info()
        print(f"server   {arguments.server}, version {info.version}, {', '.join(d.name for d in info.devices)}")
        print(
            f"problems {len(samples)}, each {arguments.colours} against {arguments.colours} colours; "
            f"squared Euclidean cost, epsilon {EPSILON}, reach {REACH}"
        )
        start = time.perf_counter()
        answers = solve(client, samples)
        print(f"solved   in {time.perf_counter() - start:.3f} s, from the first request to the last reply")
    print(
        f"check    {largest_difference(samples[0], answers[0]):.1e}: largest difference between a projection received"
    )
    print("         and the same computed here from the potentials received")

    new_china = transfer(china, [x for x, _ in samples], [answer.projection_x for answer in answers])
    new_flower = transfer(flower, [y for _, y in samples], [answer.projection_y for answer in answers])
    save_picture(arguments.picture, [[china, flower, new_china], [flower, china, new_flower]])
    print(f"picture  {arguments.picture.resolve()}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--server", default="localhost:8001", help="host:port (default: %(default)s)")
    parser.add_argument(
        "--picture", type=pathlib.Path, default="colour_transfer.png", help="written (default: %(default)s)"
    )
    parser.add_argument("--colours", type=int, default=3000, help="of each picture in a sample (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="independent ones (default: %(default)s)")
    return parser.parse_args()


def sample(random: np.random.Generator, image: Array, arguments: argparse.Namespace) -> Array:
    """Colours of pixels drawn without repetition [colours, 3]."""
    pixels = image.reshape(-1, 3)
    return np.asarray(pixels[random.choice(len(pixels), arguments.colours, replace=False)])


# ---- Transport ----------------------------------------------------------------------------------


def solve(client: Client, samples: list[tuple[Array, Array]]) -> list[TransportResult]:
    """Solves all samples over one stream and tells of each answer as it comes."""
    answers: dict[int, TransportResult] = {}
    print("         value     iterations  marginal errors    queue s  compute s  problems in a launch")
    for reply in client.solve_stream([colour_problem(x, y) for x, y in samples]):
        answer = answers[reply.index] = reply.result()
        convergence, execution = answer.convergence, answer.execution
        print(
            f"  #{reply.index}     {answer.value:.6f}  {convergence.iterations:10}  "
            f"{convergence.marginal_error_a:.1e}, {convergence.marginal_error_b:.1e}  "
            f"{execution.queue_seconds:8.4f}  {execution.compute_seconds:9.3f}  up to {execution.batch_problem_count}"
            + ("" if convergence.converged else "  NOT CONVERGED")
        )
    return [answers[index] for index in range(len(samples))]


def colour_problem(x: Array, y: Array) -> Problem[TransportResult]:
    return problems.point_cloud(
        x,
        y,
        cost="squared_euclidean",
        epsilon=EPSILON,
        reach_a=REACH,
        reach_b=REACH,
        tolerance=1e-4,
        outputs=["value", "potentials", "projection"],
    )


def largest_difference(clouds: tuple[Array, Array], answer: TransportResult) -> float:
    """Recomputes the projection of the first hundred colours: sum_j P_ij y_j / sum_j P_ij with
    P_ij ~ exp((g_j - |x_i - y_j|^2) / epsilon), where f and the masses cancel."""
    assert answer.g is not None and answer.projection_x is not None
    x, y = clouds[0][:100].astype(np.float64), clouds[1].astype(np.float64)
    exponents = (answer.g - ((x[:, None] - y) ** 2).sum(axis=2)) / EPSILON
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    projection = weights @ y / weights.sum(axis=1, keepdims=True)
    return float(np.abs(projection - answer.projection_x[:100]).max())


# ---- From the sampled colours to all pixels -----------------------------------------------------


def transfer(image: Array, colours: list[Array], projections: list[Array | None]) -> Array:
    """The picture with each pixel moved as the sampled colours around it move."""
    points = np.concatenate(colours)
    moves = np.concatenate([p for p in projections if p is not None]) - points
    distances, nearest = cKDTree(points).query(image.reshape(-1, 3), k=16, workers=-1)
    weights = 1 / (distances**2 + 1e-3)
    weights /= weights.sum(axis=1, keepdims=True)
    shift = np.einsum("pk,pkc->pc", weights, moves[nearest]).reshape(image.shape)
    return np.asarray(np.clip(image + smoothed(shift, image.mean(axis=2)), 0, 1))


def smoothed(shift: Array, guide: Array, radius: int = 8, edge: float = 1e-4) -> Array:
    """Smooths the shifts where the picture is smooth, so that they do not enlarge its noise and compression blocks, and
    keeps its edges: the guided filter (He, Sun & Tang, 2010), a linear fit to the guide in every window."""

    def mean(values: Array) -> Array:
        return np.asarray(uniform_filter(values, size=(2 * radius + 1, 2 * radius + 1), mode="nearest"))

    guide_mean = mean(guide)
    variance = mean(guide * guide) - guide_mean * guide_mean
    channels = []
    for channel in np.moveaxis(shift, 2, 0):
        slope = (mean(guide * channel) - guide_mean * mean(channel)) / (variance + edge)
        offset = mean(channel) - slope * guide_mean
        channels.append(mean(slope) * guide + mean(offset))
    return np.stack(channels, axis=2)


def save_picture(path: pathlib.Path, rows: list[list[Array]], gap: int = 12, caption: int = 30) -> None:
    """Source, target and result side by side, a row for each direction."""
    height, width, _ = rows[0][0].shape
    size = (3 * width + 4 * gap, len(rows) * (height + caption + gap) + gap)
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=18)
    for i, row in enumerate(rows):
        for j, (image, title) in enumerate(
            zip(row, ["source", "target", "source in the target's colours"], strict=True)
        ):
            left, top = gap + j * (width + gap), gap + i * (height + caption + gap)
            draw.text((left, top + 2), title, fill="black", font=font)
            page.paste(Image.fromarray((image * 255 + 0.5).astype(np.uint8)), (left, top + caption))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)


if __name__ == "__main__":
    main()
