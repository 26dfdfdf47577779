"""The hot GPU kernels keep to their registers: no spills, no local memory. Skipped without nvcc."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
# Each file's kernels, by a pattern of their names, and how many instances it has at least. Implicit backward: tiles of
# 4, 16, 32 and 64; in those of 8, 12 and 24 some of what a member needs once lies in local memory.
HOT = {
    "normalization_plain_backward.cu": ("PlainKernel", 11),
    "normalization_plain_backward_short.cu": ("PlainKernel", 11),
    "normalization_plain_forward.cu": ("PlainKernel", 12),
    "normalization_plain_forward_short.cu": ("PlainKernel", 12),
    "normalization_plain_implicit.cu": (r"PlainKernelINS\w*9TileShapeILi(4ELi4E|4ELi8ELi[48]E|8ELi16E)", 7),
    "normalization_tiles.cu": ("TilesKernel", 8),
    "transport_cloud.cu": ("CloudStepKernel", 6),
    "transport_hessian_cloud.cu": ("CloudSweepKernelILi2", 6),  # STRICT; of FAST one spills a register.
}


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("source", HOT)
def test_no_local_memory(source, tmp_path):
    command = [NVCC, "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", f"-I{ROOT}"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-cubin", "-o", tmp_path / "out.cubin"]
    result = subprocess.run([*command, ROOT / "kernels/cuda" / source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    usage = re.findall(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        result.stderr,
    )
    name, least = HOT[source]
    hot = [row for row in usage if re.search(name, row[0])]
    assert len(hot) >= least, result.stderr[-4000:]
    guilty = [row for row in hot if row[1:] != ("0", "0", "0")]
    assert not guilty, guilty
