"""The hot GPU kernels keep to their registers: no spills, no local memory. Skipped without nvcc.

Read is what ptxas said when Bazel had them compiled: bazel-out/host/bin/kernels/cuda/_nvcc/LIBRARY/FILE.usage.
"""

import pathlib
import re
import shutil

import pytest

ROOT = pathlib.Path(__file__).parents[2]
USAGE = ROOT / "bazel-out/host/bin/kernels/cuda/_nvcc"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_90a'\n"
    r".*Function properties for (?P=name)\n"
    r"\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
# Each file's kernels, by a pattern of their names, and how many instances it has at least. Of PlainKernel's numbers the
# last three say: types of 2 bytes, whole tiles alone, softmax.
HOT = {
    # Of tiles of 64 what is for whole ones alone spills some ten registers.
    "normalization_plain_backward.cu": (r"PlainKernel\w*TileShapeILi(?!8ELi16ELi8ELi4EEELNS1_4WorkE1ELb[01]ELb1E)", 22),
    # Forward, tiles of 28 fill all registers and spill some, none in their iterations but after a softmax.
    "normalization_plain_forward.cu": (r"PlainKernel\w*TileShapeILi(?!14)", 24),
    # Implicit backward: float32, tiles of 4, 16, 32 and 64; in those of 8, 12 and 24 some of what a member needs once
    # lies in local memory.
    "normalization_plain_implicit.cu": (
        r"PlainKernel\w*TileShapeILi(4ELi4E|4ELi8ELi4E|8ELi8E|8ELi16E)\w*WorkE2ELb0E",
        8,
    ),
    # Backward, but for tiles of 64, which spill six registers or twelve; of 2 bytes, of tiles of 32 what is for whole
    # ones alone spills six, once.
    "normalization_softmax_backward.cu": (
        r"PlainKernel\w*TileShapeILi(?!8ELi16E|4ELi8ELi8ELi4EEELNS1_4WorkE1ELb1ELb1E)",
        19,
    ),
    "normalization_softmax_forward.cu": (r"PlainKernel\w*TileShapeILi(?!14)", 24),
    "normalization_softmax_implicit.cu": (r"PlainKernel\w*TileShapeILi(4ELi4E|4ELi8ELi[48]E)\w*WorkE2ELb0E", 6),
    # Held by clusters, up to 256 columns: of more, addresses and counters lie in local memory, no matrix entries.
    "normalization_stream.cu": (r"StreamKernel\w*StreamShapeILi[248]ELi8E", 3),
    "normalization_tiles.cu": ("TilesKernel", 8),
    "transport_cloud.cu": ("CloudStepKernel", 6),
    "transport_cloud_distances.cu": ("CloudStepKernel", 3),
    "transport_cloud_loop.cu": ("CloudLoopKernel", 18),
    "transport_exact.cu": ("FrameTilesKernel", 2),
    "transport_exact_step.cu": ("ExactStepKernel", 2),
    "transport_exponents.cu": ("ExponentKernel", 6),
    "transport_first_columns.cu": ("FirstColumnsKernel", 1),
    "transport_gradient.cu": (r"GradientKernelILi[12]ELNS0_5PartsE0", 12),  # Up to 64 coordinates; not of more.
    "transport_gradient_even.cu": ("EvenGradientKernel", 6),
    "transport_gradient_kept.cu": ("KeptGradientKernel", 3),
    "transport_gradient_wide.cu": ("DensityKernel|WideGradientKernel", 5),
    "transport_hessian_cloud.cu": ("CloudSweepKernelILi2", 6),  # STRICT; of FAST one spills a register.
    "transport_hessian_matrix.cu": ("Matrix(Setup|Store)Kernel", 12),
    "transport_hessian_weights.cu": ("BentSetupKernel|BentWeightsKernel", 2),
    # Up to 512 columns: 1,024 fill all there is; blocks of 64, six of which share a processor, spill a few registers.
    "transport_on_chip.cu": ("OnChipKernelILNS0_6SourceE[02]ELi[248]E", 6),
    "transport_on_chip_distances.cu": ("OnChipKernelILNS0_6SourceE1ELi[1248]E", 4),
    "transport_stream.cu": ("StreamKernel", 14),
    "transport_stream_end.cu": ("StreamEndKernel", 1),
    # Where rows are read again, or iterations are judged, some words are spilled.
    "transport_stream_held.cu": (r"HeldKernelILi[12]E\w*Lb0ELNS0_8HeldKindE0E", 4),
    "transport_stream_loop.cu": ("LoopKernel", 28),
    "transport_stream_self.cu": ("HeldSelfKernel", 6),
    "transport_symmetric.cu": ("SymmetricKernel", 4),
    "transport_weights.cu": ("DirectionWeightsKernel|DirectionSumsKernel", 2),
}


@pytest.mark.skipif(NVCC is None and not USAGE.is_dir(), reason="no nvcc")
@pytest.mark.parametrize("source", HOT)
def test_no_local_memory(source):
    paths = list(USAGE.glob(f"*/{pathlib.Path(source).stem}.usage"))
    assert len(paths) == 1, f"{USAGE}: bazel build //... comes first"
    said = paths[0].read_text()
    name, least = HOT[source]
    hot = [kernel.groups() for kernel in KERNEL.finditer(said) if re.search(name, kernel["name"])]
    assert len(hot) >= least, said[-4000:]
    guilty = [kernel for kernel in hot if kernel[1:] != ("0", "0", "0")]
    assert not guilty, guilty
