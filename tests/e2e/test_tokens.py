"""Bearer tokens: who may call, what others read, and that the file can change under load."""

import threading
import time

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

OLD, NEW = "the-token-of-yesterday", "the-token-of-tomorrow"
SMALL = np.zeros((2, 2), np.float32)


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


def write(path, *tokens):
    draft = path.with_suffix(".new")
    draft.write_text("\n".join(["# tests", *tokens, ""]))
    draft.rename(path)


@pytest.fixture
def guarded(start, tmp_path):
    """(server, file of tokens)"""
    path = tmp_path / "tokens"
    write(path, OLD)
    return start(f"--auth_token_file={path}"), path


def test_every_method_wants_a_token(api, guarded):
    server, _ = guarded
    request = api.normalization(SMALL)
    with api.stub(server) as stub:
        calls = {
            "Solve": lambda metadata: stub.Solve(request, timeout=10, metadata=metadata).HasField("plan"),
            "SolveStream": lambda metadata: [
                reply.HasField("solve")
                for reply in stub.SolveStream(
                    iter([api.pb.SolveStreamRequest(solve=request)] * 3), timeout=10, metadata=metadata
                )
            ]
            == [True] * 3,
            "GetServerInfo": lambda metadata: stub.GetServerInfo(
                api.pb.GetServerInfoRequest(), timeout=10, metadata=metadata
            ).state
            == "ready",
        }
        for name, call in calls.items():
            assert call(bearer(OLD)), name
            for metadata in ((), bearer("a-token-of-somebody-else"), bearer(""), (("authorization", OLD),)):
                with pytest.raises(grpc.RpcError) as error:
                    call(metadata)
                code, reason, _, _ = api.error(error.value)
                assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), (name, metadata)
    with api.health(server) as health:
        assert health.Check(api.health_pb.HealthCheckRequest(), timeout=10).status == 1, "probes have no token"
    assert server.metric("sinkhorn_requests_rejected_total", reason="UNAUTHENTICATED") == 4


def test_the_log_says_who_but_no_token(api, guarded):
    server, path = guarded
    with api.stub(server) as stub:
        for _ in range(50):
            with pytest.raises(grpc.RpcError):
                stub.Solve(api.normalization(SMALL), timeout=10, metadata=bearer("a-token-of-somebody-else"))
    write(path, "bad")
    time.sleep(2.5)
    with api.stub(server) as stub:
        assert stub.Solve(api.normalization(SMALL), timeout=10, metadata=bearer(OLD)).HasField("plan")
    log = server.log()
    assert 1 <= log.count('"event":"unauthenticated"') <= 10 and '"why":"wrong token"' in log and "127.0.0.1" in log
    assert log.count('"event":"tokens_unchanged"') >= 1
    for secret in (OLD, "somebody-else", '"bad"'):
        assert secret not in log


def test_tokens_change_under_load(api, guarded, eventually):
    """Both for a while, then the new one alone: no call of a client that moves in between fails."""
    server, path = guarded
    token, failures, answers, ending = [OLD], [], [0], threading.Event()

    def client():
        with api.stub(server) as stub:
            while not ending.is_set():
                try:
                    stub.Solve(api.normalization(SMALL), timeout=10, metadata=bearer(token[0]))
                    answers[0] += 1
                except grpc.RpcError as error:
                    failures.append(api.error(error)[:2])

    def allowed(which):
        with api.stub(server) as stub:
            try:
                stub.Solve(api.normalization(SMALL), timeout=10, metadata=bearer(which))
            except grpc.RpcError:
                return False
        return True

    thread = threading.Thread(target=client)
    thread.start()
    try:
        write(path, OLD, NEW)
        eventually(lambda: allowed(NEW))
        assert allowed(OLD)
        token[0] = NEW
        time.sleep(0.1)  # The call that has the old one ends.
        write(path, NEW)
        eventually(lambda: not allowed(OLD))
        before = answers[0]
        eventually(lambda: answers[0] > before)
    finally:
        ending.set()
        thread.join()
    assert not failures


def test_reflection_is_off_unless_asked_for(start, tmp_path):
    path = tmp_path / "tokens"
    write(path, OLD)

    def lists_services(*flags):
        server = start(f"--auth_token_file={path}", *flags)
        with grpc.insecure_channel(server.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            try:
                descriptor_pool.DescriptorPool(database).FindServiceByName("sinkhorn.v1.SinkhornService")
            except (grpc.RpcError, KeyError):
                return False
        return True

    assert not lists_services()
    assert lists_services("--reflection")


def test_a_bad_file_is_an_error_at_the_start(run_binary, tmp_path):
    path = tmp_path / "tokens"
    result = run_binary("--listen=127.0.0.1:0", "--metrics_listen=", f"--auth_token_file={path}")
    assert result.returncode == 1 and "cannot be read" in result.stderr
    write(path, "too short")
    result = run_binary("--listen=127.0.0.1:0", "--metrics_listen=", f"--auth_token_file={path}")
    assert result.returncode == 1 and "line 2 must be a token of 16" in result.stderr and "short" not in result.stderr
