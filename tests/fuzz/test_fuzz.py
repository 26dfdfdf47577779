"""Every fuzzer for twenty seconds, two at a time: no crash, leak, hang or allocation over the limit. Needs clang, as
deploy/install.sh brings it. SINKHORN_FUZZ_SECONDS for another length; 0: not at all."""

import re

TARGETS = 5


def test_nothing_is_found(run, capsys):
    status = run.process.wait()
    output = run.output.read_text(errors="replace")
    with capsys.disabled():
        print("\n" + output)
    lines = re.findall(r"^\w+_fuzz +(\d+) executions .*$", output, re.MULTILINE)
    logs = "".join(log.read_text(errors="replace")[-3000:] for log in run.folder.glob("*.log"))
    assert status == 0, output[-3000:] + logs
    assert len(lines) == TARGETS and all(int(executions) > 0 for executions in lines), output
