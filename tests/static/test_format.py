"""C++ and CUDA sources are formatted as .clang-format says and keep to 120 columns."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
LONGEST_LINE = 120


def sources() -> list[pathlib.Path]:
    folders = ["client", "kernels", "server", "tests"]
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in {".cc", ".h", ".cu", ".cuh"}]
    assert len(found) > 100
    return found


def test_clang_format():
    program = pathlib.Path(sys.executable).with_name("clang-format")
    command = [program, "--dry-run", "--Werror", *sources()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


def test_line_length():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LONGEST_LINE
    ]
    assert not long, long
