"""Python outside the package, which has rules of its own (client/python/pyproject.toml): nothing unused or undefined."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_ruff():
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    command = [ruff, "check", "--no-cache", "--isolated", "--select=F", "tests", "deploy"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
