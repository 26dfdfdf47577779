"""The contract keeps the rules that proto/buf.yaml names."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_buf_lint():
    buf = pathlib.Path(sys.executable).with_name("buf")
    result = subprocess.run([buf, "lint"], cwd=ROOT / "proto", capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
