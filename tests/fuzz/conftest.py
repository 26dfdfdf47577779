"""Fuzzers run beside the other tests, which mostly wait: they are started first and looked at last."""

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

import pytest

HERE = pathlib.Path(__file__).parent
SECONDS = int(os.environ.get("SINKHORN_FUZZ_SECONDS", "20"))
RUN = pytest.StashKey()


class Run:
    """tests/fuzz/run.sh, with the least priority."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.output = self.folder / "output"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                ["nice", "-n", "19", HERE / "run.sh", str(SECONDS)],
                env={**os.environ, "FUZZ_DIR": str(self.folder)},
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent == HERE)


def pytest_collection_finish(session):
    wanted = any(item.path.parent == HERE for item in session.items) and not session.config.option.collectonly
    if wanted and SECONDS > 0 and shutil.which(os.environ.get("CLANG", "clang-14")):
        session.config.stash[RUN] = Run()


def pytest_unconfigure(config):
    if run := config.stash.get(RUN, None):
        run.stop()


@pytest.fixture
def run(pytestconfig):
    if RUN not in pytestconfig.stash:
        pytest.skip("SINKHORN_FUZZ_SECONDS=0" if SECONDS == 0 else "no clang-14")
    return pytestconfig.stash[RUN]
