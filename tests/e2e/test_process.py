"""The server as a process: clients that die, signals, health, flags, the log."""

import http.client
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import grpc
import numpy as np
import pytest

SERVICE = "sinkhorn.v1.SinkhornService"
SERVING, NOT_SERVING = 1, 2
ROOT = pathlib.Path(__file__).parents[2]
LOADGEN = os.environ.get("SINKHORN_LOADGEN", ROOT / "bazel-bin/client/loadgen/sinkhorn_loadgen")


# ---- Clients that die -----------------------------------------------------------------------------------------------


def test_a_client_killed_in_the_middle_of_a_call(api, start, eventually, tmp_path):
    server = start()
    request = tmp_path / "request"
    request.write_bytes(api.long_problem().SerializeToString())
    script = textwrap.dedent(f"""
        import grpc, pathlib
        channel = grpc.insecure_channel("{server.address}")
        call = channel.unary_unary("/{SERVICE}/Solve", request_serializer=bytes, response_deserializer=bytes)
        call(pathlib.Path("{request}").read_bytes())
    """)
    before = server.rounds()
    client = subprocess.Popen([sys.executable, "-c", script])
    try:
        eventually(lambda: server.rounds() > before + 3)
        assert server.metric("sinkhorn_requests_in_flight") == 1
    finally:
        client.kill()
        client.wait()
    eventually(lambda: server.metric("sinkhorn_requests_in_flight") == 0, seconds=5)
    assert server.metric("sinkhorn_requests_abandoned_total", stage="running", cause="cancelled") == 1
    with api.stub(server) as stub:
        assert stub.Solve(api.normalization(np.zeros((2, 2), np.float32)), timeout=10).HasField("plan")


def test_bytes_that_are_not_http2(server, api):
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b""):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(nonsense)
    with api.stub(server) as stub:
        assert stub.Solve(api.normalization(np.zeros((2, 2), np.float32)), timeout=10).HasField("plan")


# ---- Shutting down --------------------------------------------------------------------------------------------------


def test_sigterm_under_load_loses_no_accepted_call(api, start):
    server = start("--drain_grace=500ms", "--drain_timeout=20s")
    rng = np.random.default_rng(0)
    request = api.cloud(*rng.random((2, 200, 3), dtype=np.float32), 0.01, tolerance=0, max_iterations=200)
    answered, refused, strange = [], [], []
    lock = threading.Lock()
    begun = threading.Event()

    def client():
        with api.stub(server) as stub:
            while True:
                try:
                    reply = stub.Solve(request, timeout=60)
                    with lock:
                        answered.append(reply.value[0])
                        if len(answered) > 20:
                            begun.set()
                except grpc.RpcError as error:
                    _, reason, _, _ = api.error(error)
                    # Refused by the server, or never taken: its port is closed.
                    fine = error.code() == grpc.StatusCode.UNAVAILABLE and (
                        reason == "DRAINING" or "failed to connect" in error.details().lower()
                    )
                    with lock:
                        (refused if fine else strange).append((error.code(), reason, error.details()))
                    return

    threads = [threading.Thread(target=client) for _ in range(16)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    before = len(answered)
    server.terminate()
    assert server.wait() == 0
    for thread in threads:
        thread.join()
    assert not strange
    assert len(refused) == 16
    assert len(answered) > before, "requests are still taken during the grace period"
    assert len(set(answered)) == 1, "same problem, same bits"
    assert '"event":"stopped","abandoned":"0"' in server.log()


def test_clients_that_never_pause_read_unavailable_at_most(start):
    """Unlike gRPC's own shutdown, which answers CANCELLED to tens of them: nobody tries that again."""
    server = start("--drain_grace=0s", "--drain_timeout=10s")
    flags = ["--clients=64", "--duration=3s", "--warmup=0s", "--max_attempts=1", "--json"]
    with subprocess.Popen([LOADGEN, f"--server={server.address}", *flags], stdout=subprocess.PIPE) as load:
        time.sleep(1)
        server.terminate()
        assert server.wait(10) == 0
        seen = json.loads(load.communicate(timeout=60)[0])["all"]
    assert seen["requests"] > 100
    assert {error.split("/")[0] for error in seen["errors"]} == {"UNAVAILABLE"}, seen["errors"]


def test_streams_get_their_answers_before_the_server_goes(api, start, eventually):
    server = start("--drain_grace=0s", "--drain_timeout=60s")
    rng = np.random.default_rng(0)
    problem = api.cloud(*rng.random((2, 1000, 3), dtype=np.float32), 0.01, tolerance=0, max_iterations=3000)
    done = threading.Event()

    def requests():
        for _ in range(20):
            yield api.pb.SolveStreamRequest(solve=problem)
        done.wait(60)  # Keeps the stream open: the server must end it.

    def received():
        samples = server.metrics()
        ended = sum(value for (name, *_), value in samples.items() if name == "sinkhorn_outcomes_total")
        return samples[("sinkhorn_requests_in_flight",)] + ended

    answers, error = 0, None
    with api.stub(server) as stub:
        stream = stub.SolveStream(requests(), timeout=60)
        eventually(lambda: received() == 20)
        server.terminate()
        try:
            for reply in stream:
                assert reply.HasField("solve")
                answers += 1
        except grpc.RpcError as raised:
            error = api.error(raised)
    done.set()
    assert answers == 20
    assert error[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert server.wait() == 0


def test_what_does_not_finish_in_time_is_unavailable(api, start, eventually):
    server = start("--drain_grace=0s", "--drain_timeout=500ms")
    with api.stub(server) as stub:
        running = stub.Solve.future(api.long_problem())
        eventually(lambda: server.metric("sinkhorn_requests_in_flight") == 1)
        begin = time.monotonic()
        server.terminate()
        with pytest.raises(grpc.RpcError) as error:
            running.result()
        assert api.error(error.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert server.wait() == 0
    assert time.monotonic() - begin < 5
    assert '"abandoned":"1"' in server.log()


def test_health_sees_the_drain(api, start):
    server = start("--drain_grace=1s")
    request = api.health_pb.HealthCheckRequest
    with api.health(server) as health, api.stub(server) as stub:
        watch = health.Watch(request(service=SERVICE), timeout=60)
        assert next(watch).status == SERVING
        assert health.Check(request(), timeout=10).status == SERVING
        server.terminate()
        assert next(watch).status == NOT_SERVING
        # During the grace period solves are taken and the process is alive, but nobody should send new ones.
        assert health.Check(request(), timeout=10).status == NOT_SERVING
        assert health.Check(request(service="liveness"), timeout=10).status == SERVING
        assert stub.GetServerInfo(api.pb.GetServerInfoRequest(), timeout=10).state == "draining"
        assert stub.Solve(api.normalization(np.zeros((2, 2), np.float32)), timeout=10).HasField("plan")
        with pytest.raises(grpc.RpcError):
            next(watch)  # The server ends the watch; it does not hold up the exit.
    assert server.wait(10) == 0


def web(server, path, method="GET"):
    """(status, body) of the HTTP server beside gRPC."""
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=10)
    connection.request(method, path)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_probes_that_speak_no_grpc(start, eventually):
    server = start("--drain_grace=1s")
    assert web(server, "/healthz") == (200, "ok\n")
    assert web(server, "/readyz") == (200, "ready\n")
    assert web(server, "/readyz", "HEAD") == (200, "")
    assert web(server, "/metrics")[0] == 200
    assert web(server, "/metrics", "POST")[0] == 405
    assert web(server, "/healthz/more")[0] == web(server, "/")[0] == 404
    server.terminate()
    eventually(lambda: web(server, "/readyz") == (503, "not ready\n"))
    assert web(server, "/healthz") == (200, "ok\n")
    assert server.wait(10) == 0


def test_counters_are_there_before_they_count(server):
    """And the limits beside what they limit."""
    text = web(server, "/metrics")[1]
    for name in (
        'sinkhorn_requests_rejected_total{reason="QUEUE_FULL"}',
        'sinkhorn_outcomes_total{problem="dense",outcome="DIVERGED"}',
        'sinkhorn_requests_abandoned_total{stage="running",cause="deadline"}',
        'grpc_server_call_started_total{grpc_method="sinkhorn.v1.SinkhornService/SolveStream"}',
    ):
        assert f"\n{name} " in text
    assert server.metric("process_max_fds") == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    assert server.metric("process_resident_memory_bytes") < server.metric("sinkhorn_memory_limit_bytes") <= memory


def test_a_second_signal_exits_at_once(start):
    server = start("--drain_grace=60s")
    server.terminate()
    time.sleep(0.3)
    assert server.process.poll() is None
    begin = time.monotonic()
    server.terminate()
    assert server.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 1


# ---- Flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--no_such_flag=1", "no_such_flag"),
        ("--threads=many", "many"),
        ("--threads=-1", "--threads must be in [0, 4096]; got -1"),
        ("--listen=localhost", "--listen must be HOST:PORT; got 'localhost'"),
        ("--metrics_listen=localhost:99999", "--metrics_listen must be HOST:PORT"),
        ("--backend=tpu", "--backend must be auto, cpu or cuda; got 'tpu'"),
        ("--max_queue_requests=0", "--max_queue_requests must be in [1,"),
        ("--max_queue_bytes=5", "--max_queue_bytes must hold one request"),
        ("--drain_grace=-1s", "--drain_grace must be >= 0; got -1s"),
        ("--tls_cert=x", "--tls_cert and --tls_key must be set together"),
        ("--inject_fault=rain@3", "--inject_fault must be device_lost@N"),
        ("positional", "takes flags only; got 'positional'"),
        ("--devices=0,0", "--devices must be 'all' or different indices >= 0; got '0,0'"),
        ("--devices=first", "--devices must be 'all' or"),
    ],
)
def test_bad_flags_say_what_is_wrong(run_binary, flag, says):
    result = run_binary(flag)
    assert result.returncode in (1, 2)
    assert says in result.stderr


def test_a_port_in_use_is_an_error(run_binary, server):
    result = run_binary(f"--listen=127.0.0.1:{server.port}")
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in result.stderr
    result = run_binary("--listen=127.0.0.1:0", f"--metrics_listen=127.0.0.1:{server.metrics_port}")
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{server.metrics_port}" in result.stderr


def test_help_and_version(run_binary):
    help_text = run_binary("--help").stdout
    for flag in (
        "listen",
        "metrics_listen",
        "backend",
        "max_queue_requests",
        "max_queue_bytes",
        "max_batch_delay_us",
        "max_receive_message_bytes",
        "drain_grace",
        "drain_timeout",
        "max_connection_age",
        "max_connection_age_grace",
        "keepalive_time_ms",
        "reflection",
        "tls_cert",
    ):
        assert f"--{flag} (" in help_text
    assert "absl" not in help_text, "the libraries' flags are not ours"
    assert run_binary("--version").stdout.startswith("sinkhorn_server ")


# ---- The log --------------------------------------------------------------------------------------------------------


def test_the_log_is_json_lines(api, start):
    server = start("--log_requests")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with api.stub(server) as stub:
        stub.Solve(
            api.normalization(np.zeros((2, 2), np.float32), request_id='quote " it'),
            timeout=10,
            metadata=[("traceparent", f"00-{trace}-00f067aa0ba902b7-01")],
        )
    server.terminate()
    assert server.wait() == 0
    events = [json.loads(line) for line in server.log().splitlines()]
    names = [event["event"] for event in events]
    assert names == ["backend", "listening", "ready", "request", "draining", "stopped"]
    assert events[3]["request_id"] == 'quote " it' and events[3]["problem"] == "normalization"
    assert events[3]["trace_id"] == trace


def test_a_slow_request_leaves_a_line_that_says_where_the_time_went(api, start):
    server = start("--slow_request=1us")
    request = api.normalization(np.zeros((7, 3, 2), np.float32), request_id="slow")
    with api.stub(server) as stub:
        first = time.monotonic()
        for _ in range(20):
            stub.Solve(request, timeout=10)
        seconds = time.monotonic() - first
    server.terminate()
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    slow = [line for line in lines if line["event"] == "slow_request"]
    assert 1 <= len(slow) <= 1 + seconds
    line = slow[0]
    assert (line["request_id"], line["shape"], line["slow_requests"]) == ("slow", "7x3x2", "1")
    stages = [float(line[f"{stage}_seconds"]) for stage in ("decode", "queue", "transfer", "compute", "encode")]
    assert min(stages) >= 0 and 0 < sum(stages) <= float(line["seconds"])


def test_requests_that_are_not_slow_leave_none(api, start):
    server = start()
    with api.stub(server) as stub:
        stub.Solve(api.normalization(np.zeros((2, 2), np.float32)), timeout=10)
    server.terminate()
    assert server.wait() == 0
    assert "slow_request" not in server.log()
