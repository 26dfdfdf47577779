"""What `sinkhorn` prints, and every exit code."""

import contextlib
import dataclasses
import json
import os
import pty
import socket
import subprocess

import numpy as np
import pytest

OK, USAGE, REFUSED, UNAVAILABLE, DEADLINE, NOT_CONVERGED = range(6)

# ---- What is printed ----------------------------------------------------------------------------


def test_the_summary_shows_the_answer(cli):
    done = cli.run("solve", cost="0,1;1,0", epsilon=0.5, outputs="value,plan", request_id="seen")

    # Closed form of the symmetric 2 x 2 problem: P11 / P12 = exp(1 / epsilon).
    p11 = 0.5 * np.exp(2) / (1 + np.exp(2))
    assert done.returncode == OK, done.stderr
    assert "converged" in done.stdout and "marginal errors" in done.stdout
    assert "with connecting; in the server: queue" in done.stdout
    row = [float(word) for word in done.stdout.strip().splitlines()[-2].split()]
    np.testing.assert_allclose(row, [p11, 0.5 - p11], rtol=1e-5)
    assert done.stderr == ""


def test_json_carries_small_arrays(cli):
    reply = cli.json("solve", cost="0,1;1,0", epsilon=0.5, outputs="value,plan", request_id="seen")

    p11 = 0.5 * np.exp(2) / (1 + np.exp(2))
    np.testing.assert_allclose(reply["plan"]["data"], [[p11, 0.5 - p11], [0.5 - p11, p11]], rtol=1e-5)
    assert reply["request_id"] == "seen"
    assert reply["execution"]["backend"] in ("cpu", "cuda")
    assert reply["round_trip_seconds"] > 0


def test_info_health_and_version(cli):
    info = cli.json("info")
    assert info["state"] == "ready" and info["devices"] and info["limits"]["max_iterations"] > 0
    assert "ready" in cli.run("info").stdout
    health = cli.run("health")
    assert (health.returncode, health.stdout) == (OK, "SERVING\n")
    assert cli.run("health", service="liveness").returncode == OK
    assert cli.run("health", service="nobody").returncode == REFUSED
    assert cli.run("version").stdout.startswith("sinkhorn ")


def test_progress_shows_on_a_terminal_only(cli, files):
    # 100,000 iterations take many times the budget.
    cost = files("c", np.random.default_rng(9).random((1500, 1500), np.float32))
    flags = dict(cost=cost, epsilon=1, max_iterations=100000, tolerance=0, time_budget=1.5, outputs="value")
    command = cli.command("solve", flags)
    terminal, stderr = pty.openpty()
    shown = b""
    with os.fdopen(terminal, "rb", buffering=0) as screen, subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=stderr
    ) as process:
        os.close(stderr)
        with contextlib.suppress(OSError):  # How a terminal says that nobody writes to it any more.
            while chunk := screen.read(4096):
                shown += chunk
    shown = shown.decode()
    assert process.returncode == OK
    assert "solving: 0.5 s of 60 s" in shown
    assert shown.endswith("\r\x1b[K"), "the line must be wiped"

    assert subprocess.run(command, capture_output=True, timeout=120).stderr == b""


# ---- What goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(), "--logits"),
        (dict(cost="0,1", logits="0,1"), "one problem"),
        (dict(cost="0,1;1", epsilon=1), "row 2 has 1 numbers"),
        (dict(cost="absent.npy", epsilon=1), "absent.npy"),
        (dict(x="0", y="1", epsilon=1), "--cost_function must be"),
        (dict(cost="0,1", cost_function="squared_euclidean"), "--cost_function belongs to point clouds"),
        (dict(logits="0,1", a="1"), "--a does not belong"),
        (dict(cost="0,1", epsilon=1, outputs="value,pan"), "--outputs must be one of value, "),
        (dict(cost="0,1", epsilon="big"), "epsilon"),
        (dict(cost="0,1", epsilon=1, dtype="int8"), "--dtype must be one of float32"),
        (dict(cost="0,1", epsilon=1, frobnicate=1), "frobnicate"),
        (dict(cost="0,1", epsilon=1, tls_root_cert="absent.pem"), "cannot open absent.pem"),
    ],
)
def test_a_wrong_command_line(cli, flags, words):
    done = cli.run("solve", **flags)
    assert done.returncode == USAGE
    assert words in done.stderr and done.stdout == ""


def test_unsupported_files_say_what_to_do(cli, files):
    fortran = cli.run("solve", cost=files("f", np.asfortranarray(np.eye(3))), epsilon=1)
    integers = cli.run("solve", cost=files("i", np.eye(3, dtype=int)), epsilon=1)
    assert fortran.returncode == USAGE and "ascontiguousarray" in fortran.stderr
    assert integers.returncode == USAGE and "astype" in integers.stderr


def test_the_server_refuses(cli):
    done = cli.run("solve", cost="0,1;1,0", epsilon=-1)
    assert done.returncode == REFUSED
    assert "INVALID_FIELD" in done.stderr and "epsilon" in done.stderr and "-1" in done.stderr

    done = cli.run("solve", cost="0,nan;1,0", epsilon=1, json="true")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == REFUSED
    assert error["code"] == "INVALID_ARGUMENT" and error["reason"] == "INVALID_FIELD"
    assert error["fields"][0]["field"] == "dense.cost.data"


def test_no_server(cli):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # Bound, never listening: connections are refused.
        nobody = dataclasses.replace(cli, target=f"127.0.0.1:{free.getsockname()[1]}")
        for command, flags in [("solve", dict(cost="0,1", epsilon=1)), ("info", {}), ("health", {})]:
            done = nobody.run(command, **flags)
            assert done.returncode == UNAVAILABLE and nobody.target in done.stderr
        assert nobody.run("health", wait="true", timeout="300ms").returncode == DEADLINE


def test_timeout(cli, files):
    cost = files("c", np.random.default_rng(8).random((1000, 1000)))
    done = cli.run("solve", cost=cost, epsilon=0.1, max_iterations=100000, tolerance=0, timeout="200ms")
    assert done.returncode == DEADLINE
    assert "DEADLINE_EXCEEDED" in done.stderr


def test_require_converged(cli):
    flags = dict(cost="0,1,3;1,0,2", epsilon=0.01, max_iterations=1)
    done = cli.run("solve", **flags)
    assert done.returncode == OK and "not converged" in done.stdout
    assert cli.run("solve", require_converged="true", **flags).returncode == NOT_CONVERGED


def test_tls(tmp_path, start_cli):
    # One self-signed certificate serves as authority, server and client.
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=solver.test", "-addext", "subjectAltName=DNS:solver.test", "-days", "1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    flags = [f"--tls_cert={certificate}", f"--tls_key={key}", f"--tls_client_ca={certificate}"]
    cli = start_cli(*flags)
    trust = dict(tls_root_cert=certificate, tls_server_name="solver.test")
    own = dict(tls_cert=certificate, tls_key=key)
    problem = dict(cost="0,1;1,0", epsilon=1)

    assert cli.run("solve", **problem, **trust, **own).returncode == OK
    assert cli.run("solve", **problem, **trust).returncode == UNAVAILABLE  # The server wants a certificate.
    assert cli.run("solve", **problem, **own, tls_server_name="solver.test").returncode == UNAVAILABLE
    assert cli.run("solve", **problem).returncode == UNAVAILABLE
    assert cli.run("solve", **problem, **trust, tls_cert=certificate).returncode == USAGE
