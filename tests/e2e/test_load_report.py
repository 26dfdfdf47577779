"""What balancers are told in the trailers of calls (ORCA).

gRPC's own clients keep that trailer to themselves, for their balancers; so it is read here by a client that knows HTTP/2
and nothing else, and by Envoy in tests/deploy/test_balancing.py.
"""

import base64
import socket
import struct
import time

import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest

SERVICE = "sinkhorn.v1.SinkhornService"


def call(server, method, messages):
    """([bytes of a reply], {trailer: value}) of a gRPC call over a connection of its own."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", f"/{SERVICE}/{method}")]
    body = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    received, trailers = b"", {}
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
        connection.initiate_connection()
        connection.send_headers(1, [*headers, ("content-type", "application/grpc"), ("te", "trailers")])
        for begin in range(0, len(body), 16384):
            connection.send_data(1, body[begin : begin + 16384], end_stream=begin + 16384 >= len(body))
        wire.sendall(connection.data_to_send())
        ended = False
        while not ended:
            for event in connection.receive_data(wire.recv(65536)):
                if isinstance(event, h2.events.DataReceived):
                    received += event.data
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                elif isinstance(event, (h2.events.TrailersReceived, h2.events.ResponseReceived)):
                    trailers.update(event.headers)
                ended |= isinstance(event, h2.events.StreamEnded)
            wire.sendall(connection.data_to_send())
    replies = []
    while received:
        size = struct.unpack(">BI", received[:5])[1]
        replies.append(received[5 : 5 + size])
        received = received[5 + size :]
    return replies, trailers


def report_of(api, trailers):
    value = trailers.get("endpoint-load-metrics-bin")
    return None if value is None else api.orca_pb.OrcaLoadReport.FromString(base64.b64decode(value + "=="))


@pytest.fixture
def reporting(start):
    return start("--report_load", "--backend=cpu")


def cloud(api):
    """Some milliseconds of work, and cheap to send."""
    x, y = np.random.default_rng(0).random((2, 256, 2), dtype=np.float32)
    return api.cloud(x, y, 0.01, outputs=[1], tolerance=0, max_iterations=1000)


def test_nothing_is_told_unless_asked_for(api, server):
    replies, trailers = call(server, "Solve", [cloud(api).SerializeToString()])
    assert len(replies) == 1 and trailers["grpc-status"] == "0"
    assert report_of(api, trailers) is None


def test_a_call_tells_load_rate_and_cost(api, reporting):
    begin, costs = time.monotonic(), []
    while time.monotonic() < begin + 3:
        replies, trailers = call(reporting, "Solve", [cloud(api).SerializeToString()])
        reply, report = api.pb.SolveResponse.FromString(replies[0]), report_of(api, trailers)
        costs.append(report.request_cost["device_seconds"])
        assert 0 < costs[-1] <= 1.5 * reply.execution.compute_seconds + 1e-3
    seconds = time.monotonic() - begin
    assert len(costs) / 2 < report.rps_fractional * seconds < len(costs) * 2
    # One call after another: what all of them cost, over the time that they took, is how busy the device is.
    assert 0.3 < report.application_utilization * seconds / sum(costs) < 3
    assert 0 < report.application_utilization <= 1.05 and report.cpu_utilization > 0
    assert report.eps == 0 and report.named_metrics["backlog_seconds"] >= 0


def test_errors_and_streams_tell_too(api, reporting):
    _, trailers = call(reporting, "Solve", [b"\xff\xff\xff"])
    assert trailers["grpc-status"] == "3"
    report = report_of(api, trailers)
    assert report is not None and not report.request_cost

    messages = [api.pb.SolveStreamRequest(solve=cloud(api)).SerializeToString()] * 3
    replies, trailers = call(reporting, "SolveStream", messages)
    seconds = [api.pb.SolveStreamResponse.FromString(reply).solve.execution.compute_seconds for reply in replies]
    assert len(seconds) == 3
    assert 0 < report_of(api, trailers).request_cost["device_seconds"] <= 1.5 * sum(seconds) + 1e-3
