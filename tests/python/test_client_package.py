"""The package as a stranger gets it: wheel, source distribution, types, format."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "client" / "python"
TESTS = ROOT / "tests" / "python"


def run(*command, cwd=ROOT):
    """Runs a tool of this virtual environment; fails with what it printed."""
    result = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build_wheel(source, folder):
    run("pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_from_the_repository_works(tmp_path):
    wheel = build_wheel(PACKAGE, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {"sinkhorn_client/py.typed", "sinkhorn_client/_proto/sinkhorn_pb2.py"} <= names
    assert {name.split("/")[0] for name in names} == {"sinkhorn_client", "sinkhorn_client-0.1.0.dist-info"}
    metadata = (tmp_path / "site" / "sinkhorn_client-0.1.0.dist-info" / "METADATA").read_text()
    required = [line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert any(name.startswith("protobuf") for name in required) and any(name.startswith("grpcio") for name in required)
    program = "import sinkhorn_client as s; print(s.__file__); s.problems.normalize([[1.0]])"
    where = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path / "site", text=True)
    assert where.startswith(str(tmp_path))


def test_a_source_distribution_builds_outside_the_repository(tmp_path):
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    wheel = build_wheel(tmp_path / "sinkhorn_client-0.1.0", tmp_path)
    assert "sinkhorn_client/_proto/sinkhorn_pb2.py" in zipfile.ZipFile(wheel).namelist()


def test_mypy_strict():
    assert "Success" in run("mypy", "--no-incremental", cwd=PACKAGE)


def test_mypy_sees_a_callers_mistakes(tmp_path):
    program = tmp_path / "caller.py"
    program.write_text(
        "from sinkhorn_client import AsyncClient, Client\n"
        "def mistakes(client: Client, later: AsyncClient) -> None:\n"
        "    client.point_cloud([1.0], [1.0], cost='squared', epsilon=1.0)\n"
        "    client.transport([1.0], epsilom=1.0)\n"
        "    reveal_type(client.normalize([1.0]))\n"
        "    reveal_type(later.transport([1.0], epsilon=1.0))\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", PACKAGE / "pyproject.toml", program]
    output = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False).stdout
    assert 'caller.py:3: error: Argument "cost"' in output
    assert 'caller.py:4: error: Unexpected keyword argument "epsilom"' in output
    assert 'caller.py:5: note: Revealed type is "sinkhorn_client.results.NormalizationResult"' in output
    assert "Coroutine[Any, Any, sinkhorn_client.results.TransportResult]" in output


@pytest.mark.parametrize("mode", [["check"], ["format", "--check"]])
def test_ruff(mode):
    run("ruff", *mode, "--no-cache", "--config", PACKAGE / "pyproject.toml", PACKAGE, TESTS)
