"""`sinkhorn_loadgen --verify` on every kind of problem, in both loops."""

import json

import pytest

MIX = ",".join(
    [
        "normalization:32x4x4:20=5",
        "normalization:7x5:10:gradient",
        "normalization:4x8x8:recipe=exact",
        "normalization:6x6:dtype=bfloat16",
        "dense:40x30:50",
        "dense:3x20x20:tolerance=1e-4:plan:value",
        "point_cloud:50x60x3:20",
        "point_cloud:2x30x30x16:10:gradient",
        "point_cloud:20x20x2:debias",
    ]
)


@pytest.fixture
def load(cli, run_program):
    """Runs the load and returns its JSON."""

    def run(**flags):
        values = [f"--{name}={value}" for name, value in (flags | {"server": cli.target, "json": "true"}).items()]
        done = run_program("SINKHORN_LOADGEN", "client/loadgen/sinkhorn_loadgen", *values)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("stream", ["false", "true"])
def test_closed_loop_answers_are_right(load, stream):
    result = load(mix=MIX, clients=16, requests=500, warmup="100ms", verify="true", stream=stream)

    assert result["all"]["requests"] == 500 and result["all"]["errors"] == {}
    assert result["verified"] and result["wrong_count"] == 0, result["wrong"]
    assert all(entry["stats"]["requests"] > 0 for entry in result["entries"])
    latency = result["all"]["latency_seconds"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert result["all"]["batch_problems"]["max"] >= 32


@pytest.mark.parametrize("stream", ["false", "true"])
def test_open_loop_answers_are_right(load, stream):
    result = load(mix=MIX, rate=200, duration="1s", warmup="100ms", verify="true", stream=stream)

    assert result["wrong_count"] == 0, result["wrong"]
    assert result["all"]["errors"] == {} and result["not_sent"] == 0
    assert 100 < result["all"]["requests"] < 300


def test_a_stream_has_one_deadline(cli, run_program):
    flags = (f"--server={cli.target}", "--stream", "--deadline_ms=10")
    done = run_program("SINKHORN_LOADGEN", "client/loadgen/sinkhorn_loadgen", *flags)
    assert done.returncode == 1 and "--deadline_ms and --stream exclude each other" in done.stderr
