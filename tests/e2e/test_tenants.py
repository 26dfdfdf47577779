"""Tenants: a flooding one beside a quiet one, weights, and that no secret is shown."""

import hashlib
import threading
import time

import grpc
import numpy as np
import pytest

QUIET, FLOOD = "the-quiet-tenants-token", "the-flooding-tenants-token"
CALLERS = 48


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


def problem(api, iterations=2000):
    """About ten milliseconds of a core, and cheap to send."""
    x, y = np.random.default_rng(0).random((2, 256, 2), dtype=np.float32)
    return api.cloud(x, y, 0.01, outputs=[1], tolerance=0, max_iterations=iterations)


class Flood:
    """Callers of one tenant that never pause; those refused come back at once."""

    def __init__(self, stub, request, token, callers=CALLERS):
        self.over, self.answers, self.errors = threading.Event(), [], []
        self.threads = [threading.Thread(target=self.call, args=(stub, request, token)) for _ in range(callers)]

    def call(self, stub, request, token):
        while not self.over.is_set():
            begin = time.monotonic()
            try:
                stub.Solve(request, metadata=bearer(token), timeout=60)
                self.answers.append(time.monotonic() - begin)
            except grpc.RpcError as error:
                self.errors.append(error.code())
                time.sleep(0.01)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{QUIET}\n{FLOOD}\n")
    return path


def latencies(stub, request, count):
    seconds = []
    for _ in range(count):
        begin = time.monotonic()
        stub.Solve(request, metadata=bearer(QUIET), timeout=60)
        seconds.append(time.monotonic() - begin)
        time.sleep(0.03)
    return sorted(seconds)


def test_a_quiet_tenant_does_not_wait_in_a_flooding_ones_queue(api, start, tokens, capsys):
    server = start(f"--auth_token_file={tokens}", "--backend=cpu")
    with api.stub(server) as stub:
        alone = latencies(stub, problem(api), 30)
        with Flood(stub, problem(api), FLOOD) as flood:
            time.sleep(1)
            beside = latencies(stub, problem(api), 30)
        flooding = sorted(flood.answers)
    assert not flood.errors and len(flooding) > CALLERS
    with capsys.disabled():
        print(
            f"\nquiet tenant, median and longest of 30: {1e3 * alone[15]:.0f} and {1e3 * alone[-1]:.0f} ms alone, "
            f"{1e3 * beside[15]:.0f} and {1e3 * beside[-1]:.0f} ms beside {CALLERS} callers of another, "
            f"whose median is {1e3 * flooding[len(flooding) // 2]:.0f} ms"
        )
    # In arrival order it would wait for the 48 others like these do; it must not.
    assert beside[15] < flooding[len(flooding) // 2] / 4
    assert QUIET not in server.log() and FLOOD not in server.log()


def test_weights_share_the_device(api, start, tokens, tmp_path):
    digest = hashlib.sha256(QUIET.encode()).hexdigest()[:12]
    weights = tmp_path / "weights"
    weights.write_text(f"# The first pays for it.\ntoken:{digest} 3\n* 1\n")
    server = start(f"--auth_token_file={tokens}", f"--tenant_weights={weights}", "--backend=cpu")
    with api.stub(server) as stub:
        with Flood(stub, problem(api), QUIET, 16) as heavy, Flood(stub, problem(api), FLOOD, 16) as light:
            time.sleep(1.5)
            before = len(heavy.answers), len(light.answers)
            time.sleep(4)
            answers = len(heavy.answers) - before[0], len(light.answers) - before[1]
    assert not heavy.errors and not light.errors
    assert answers[0] > 1.5 * answers[1] > 0, answers


def test_a_bad_file_of_weights_ends_the_start(run_binary, tmp_path):
    weights = tmp_path / "weights"
    weights.write_text("peer:ipv4:127.0.0.1 none\n")
    done = run_binary("--listen=127.0.0.1:0", "--metrics_listen=", "--backend=cpu", f"--tenant_weights={weights}")
    assert done.returncode == 1
    assert "line 1 must be an identity and a weight > 0" in done.stderr
