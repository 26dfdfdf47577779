"""TLS on the wire: who gets in, what the others are told and what the log says of them, certificates that change."""

import contextlib
import datetime
import itertools
import json
import os
import socket
import ssl
import threading
import time

import grpc
import numpy as np
import pytest
import trustme
from cryptography import x509

YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


class Secret:
    """A folder as a mounted Secret is: the server's certificate and key, and the authority whose clients may call."""

    def __init__(self, folder):
        self.folder, self.authority = folder, trustme.CA()
        self.root = self.authority.cert_pem.bytes()
        (folder / "ca.crt").write_bytes(self.root)
        self.serial = self.renew()

    def renew(self):
        """Puts a new certificate in the place of the old. Returns its serial number."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        pem = issued.cert_chain_pems[0].bytes()
        for name, content in (("tls.key", issued.private_key_pem.bytes()), ("tls.crt", pem)):
            draft = self.folder / f"{name}.new"
            draft.write_bytes(content)
            os.replace(draft, self.folder / name)
        return x509.load_pem_x509_certificate(pem).serial_number

    def flags(self):
        return [f"--tls_cert={self.folder}/tls.crt", f"--tls_key={self.folder}/tls.key"]

    def mutual(self):
        return [*self.flags(), f"--tls_client_ca={self.folder}/ca.crt"]


def client_of(authority, **issue):
    """A client's key and certificate, as arguments of grpc.ssl_channel_credentials."""
    issued = authority.issue_cert("client.test", **issue)
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return {"private_key": issued.private_key_pem.bytes(), "certificate_chain": chain}


@pytest.fixture
def secret(tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir()
    return Secret(folder)


@pytest.fixture
def request_message(api):
    return api.normalization(np.zeros((2, 2), np.float32))


def said_by_grpc(server):
    events = [json.loads(line) for line in server.log().splitlines()]
    return [event["message"] for event in events if event["event"] == "grpc"]


# ---- Who gets in ----------------------------------------------------------------------------------------------------


def test_server_certificate_alone(api, start, secret, request_message):
    """Clients that trust its authority are served; those that trust another, or speak plain text, are not."""
    server = start(*secret.flags())
    with api.stub(server, root_certificates=secret.root) as stub:
        assert stub.Solve(request_message, timeout=20).HasField("plan")
    strangers = {"root_certificates": trustme.CA().cert_pem.bytes()}
    for refused in (api.stub(server, **strangers), api.stub(server)):
        with refused as stub, pytest.raises(grpc.RpcError) as caught:
            stub.Solve(request_message, timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


STRANGERS = {
    "no certificate": (lambda authority: {}, "peer did not return a certificate"),
    "another authority's certificate": (lambda authority: client_of(trustme.CA()), "certificate verify failed"),
    "an expired certificate": (
        lambda authority: client_of(authority, not_after=YESTERDAY),
        "certificate verify failed",
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_clients_need_a_certificate_of_the_authority(api, start, eventually, secret, request_message, who):
    server = start(*secret.mutual())
    credentials, reason = STRANGERS[who]
    with (
        api.stub(server, root_certificates=secret.root, **credentials(secret.authority)) as stub,
        pytest.raises(grpc.RpcError) as caught,
    ):
        stub.Solve(request_message, timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    eventually(lambda: said_by_grpc(server))
    assert all(reason in said for said in said_by_grpc(server)), said_by_grpc(server)
    with api.stub(server, root_certificates=secret.root, **client_of(secret.authority)) as stub:
        assert stub.Solve(request_message, timeout=20).HasField("plan")


def handshake(server, secret, **versions):
    """Shakes hands as a client without a certificate. Returns the server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=secret.root.decode())
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    for name, version in versions.items():
        setattr(context, name, version)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of the versions that must be refused.
def test_versions(start, eventually, secret):
    """1.2 and 1.3 alone; each handshake that fails is one line of the log."""
    server = start(*secret.flags())
    versions = ssl.TLSVersion
    for version in (versions.TLSv1_2, versions.TLSv1_3):
        handshake(server, secret, minimum_version=version, maximum_version=version)
    for count, version in enumerate((versions.TLSv1, versions.TLSv1_1), start=1):
        with pytest.raises(ssl.SSLError):
            handshake(server, secret, minimum_version=version, maximum_version=version)
        eventually(lambda count=count: len(said_by_grpc(server)) == count)
    assert all("unsupported protocol" in said for said in said_by_grpc(server)), said_by_grpc(server)


def test_plain_text_is_one_line_of_the_log(api, start, eventually, secret):
    server = start(*secret.flags())
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    eventually(lambda: said_by_grpc(server))
    (said,) = said_by_grpc(server)
    assert "wrong version number" in said


# ---- Certificates that change ---------------------------------------------------------------------------------------


def test_a_certificate_swapped_under_load(api, start, eventually, secret, request_message):
    """Old connections go on, new ones see the new certificate, and no call fails."""
    server, ending, answered = start(*secret.flags()), threading.Event(), itertools.count()

    def call_on_new_connections():
        while not ending.is_set():
            with api.stub(server, root_certificates=secret.root) as stub:
                assert stub.Solve(request_message, timeout=20).HasField("plan")
            next(answered)

    failures = []

    def run(load):
        try:
            load()
        except Exception as failure:  # Told by the assertion below.
            failures.append(failure)

    with api.stub(server, root_certificates=secret.root) as old:

        def call_on_the_old_connection():
            while not ending.is_set():
                assert old.Solve(request_message, timeout=20).HasField("plan")
                time.sleep(0.001)
                next(answered)

        threads = [
            threading.Thread(target=run, args=[load]) for load in (call_on_new_connections, call_on_the_old_connection)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                serial = secret.renew()
                eventually(lambda serial=serial: handshake(server, secret).serial_number == serial)
        finally:
            ending.set()
            for thread in threads:
                thread.join()
    assert not failures and next(answered) > 100
    assert not said_by_grpc(server)
