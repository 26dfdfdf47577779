"""Tenants: a flooding one beside a quiet one, weights that change, certificates, metrics, and that no secret is shown."""

import datetime
import hashlib
import os
import threading
import time

import grpc
import numpy as np
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

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


def identity(token):
    return "token:" + hashlib.sha256(token.encode()).hexdigest()[:12]


def shares(stub, api, seconds=4):
    """Answers to two tenants that never pause."""
    with Flood(stub, problem(api), QUIET, 16) as heavy, Flood(stub, problem(api), FLOOD, 16) as light:
        time.sleep(1.5)
        before = len(heavy.answers), len(light.answers)
        time.sleep(seconds)
        answers = len(heavy.answers) - before[0], len(light.answers) - before[1]
    assert not heavy.errors and not light.errors
    return answers


def test_weights_share_the_device_and_change_while_serving(api, start, tokens, tmp_path, eventually):
    weights, draft = tmp_path / "weights", tmp_path / "weights.new"
    weights.write_text(f"# The first pays for it.\n{identity(QUIET)} 3\n* 1\n")
    server = start(f"--auth_token_file={tokens}", f"--tenant_weights={weights}", "--backend=cpu")
    with api.stub(server) as stub:
        answers = shares(stub, api)
        assert answers[0] > 1.5 * answers[1] > 0, answers

        draft.write_text("a line without a weight\n")
        os.replace(draft, weights)

        def logged(event):
            stub.Solve(problem(api, 1), metadata=bearer(QUIET), timeout=60)  # Calls look at the file.
            return event in server.log()

        eventually(lambda: logged("tenants_unchanged"))
        draft.write_text(f"{identity(FLOOD)} 3\n")
        os.replace(draft, weights)
        eventually(lambda: logged("tenants_changed"))
        answers = shares(stub, api)
        assert answers[1] > 1.5 * answers[0] > 0, answers


def requests_of(server, tenant, outcome):
    return server.metric("sinkhorn_tenant_requests_total", tenant=tenant, outcome=outcome)


def test_metrics_tell_named_tenants_apart(api, start, tokens, tmp_path):
    weights = tmp_path / "weights"
    weights.write_text(f"{identity(QUIET)} 1\n")
    server = start(f"--auth_token_file={tokens}", f"--tenant_weights={weights}", "--backend=cpu")
    with api.stub(server) as stub:
        for _ in range(3):
            stub.Solve(problem(api), metadata=bearer(QUIET), timeout=60)
        for _ in range(2):
            stub.Solve(problem(api, 10), metadata=bearer(FLOOD), timeout=60)
        with pytest.raises(grpc.RpcError):
            stub.Solve(problem(api, -1), metadata=bearer(QUIET), timeout=60)
        with pytest.raises(grpc.RpcError):
            stub.Solve(api.endless_problem(), metadata=bearer(QUIET), timeout=0.2)
    named = identity(QUIET)
    assert [requests_of(server, named, outcome) for outcome in ("answered", "refused", "failed")] == [3, 1, 1]
    assert [requests_of(server, "other", outcome) for outcome in ("answered", "refused", "failed")] == [2, 0, 0]
    seconds = [server.metric("sinkhorn_tenant_device_seconds_total", tenant=tenant) for tenant in (named, "other")]
    assert seconds[0] > 10 * seconds[1] > 0  # 6,000 iterations and more, and 20.
    assert server.metric("sinkhorn_tenant_queue_seconds_count", tenant=named) == 4
    assert server.metric("sinkhorn_tenants") == 2
    tenants = {dict(key[1:]).get("tenant") for key in server.metrics()} - {None}
    assert tenants == {named, "other"}


def certificate(authority, subject, name):
    """A client's key and certificate with this subject and this URI as its other name."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    signer = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    builder = x509.CertificateBuilder(issuer.subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name)])
    made = builder.add_extension(names, critical=False).sign(signer, hashes.SHA256())
    pkcs8 = serialization.PrivateFormat.PKCS8
    return {
        "private_key": key.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption()),
        "certificate_chain": made.public_bytes(serialization.Encoding.PEM),
    }


def test_certificates_are_identities(api, start, tmp_path):
    """By subject, else by the first other name; one that the file does not name is "other"."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    for name, blob in (
        ("tls.crt", issued.cert_chain_pems[0]),
        ("tls.key", issued.private_key_pem),
        ("ca.crt", authority.cert_pem),
    ):
        (tmp_path / name).write_bytes(blob.bytes())
    subject = x509.Name.from_rfc4514_string("CN=trainer one,OU=vision,O=us")
    workload = "spiffe://cluster.test/ns/research/sa/embedder"
    clients = {
        "cert:" + subject.rfc4514_string(): certificate(authority, subject, "spiffe://cluster.test/unused"),
        "cert:" + workload: certificate(authority, x509.Name([]), workload),
        "other": certificate(authority, x509.Name.from_rfc4514_string("CN=nobody"), "spiffe://cluster.test/nobody"),
    }
    (tmp_path / "weights").write_text("".join(f"{name} 2\n" for name in clients if name != "other"))
    server = start(
        *(f"--tls_cert={tmp_path}/tls.crt", f"--tls_key={tmp_path}/tls.key", f"--tls_client_ca={tmp_path}/ca.crt"),
        *(f"--tenant_weights={tmp_path}/weights", "--backend=cpu"),
    )
    for count, (name, client) in enumerate(clients.items(), 1):
        with api.stub(server, root_certificates=authority.cert_pem.bytes(), **client) as stub:
            for _ in range(count):
                stub.Solve(problem(api, 10), timeout=60)
        assert requests_of(server, name, "answered") == count, server.metrics()
    assert server.metric("sinkhorn_tenants") == 3


def test_a_bad_file_of_weights_ends_the_start(run_binary, tmp_path):
    weights = tmp_path / "weights"
    weights.write_text("peer:ipv4:127.0.0.1 none\n")
    done = run_binary("--listen=127.0.0.1:0", "--metrics_listen=", "--backend=cpu", f"--tenant_weights={weights}")
    assert done.returncode == 1
    assert "line 1 must be an identity and a weight > 0" in done.stderr
