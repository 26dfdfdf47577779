"""Every fuzzer for a minute, two at a time: no crash, leak, hang or allocation over the limit. Needs clang, as
deploy/install.sh brings it. SINKHORN_FUZZ_SECONDS for another length; 0: not at all."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = int(os.environ.get("SINKHORN_FUZZ_SECONDS", "60"))
TARGETS = 5


@pytest.mark.skipif(SECONDS == 0, reason="SINKHORN_FUZZ_SECONDS=0")
@pytest.mark.skipif(not shutil.which(os.environ.get("CLANG", "clang-14")), reason="no clang-14")
def test_nothing_is_found(tmp_path, capsys):
    done = subprocess.run(
        [ROOT / "tests/fuzz/run.sh", str(SECONDS)],
        env={**os.environ, "FUZZ_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = re.findall(r"^\w+_fuzz +(\d+) executions .*$", done.stdout, re.MULTILINE)
    with capsys.disabled():
        print("\n" + done.stdout)
    logs = "".join(log.read_text(errors="replace")[-3000:] for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    assert len(lines) == TARGETS and all(int(executions) > 0 for executions in lines), done.stdout
