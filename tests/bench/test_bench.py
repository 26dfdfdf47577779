"""Each benchmark at toy size, ours alone: right answers, all sections, tables that have their rows."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


def run(tmp_path, *arguments):
    command = [sys.executable, HERE / "bench.py", "--toy", "--no-peers", "--out", tmp_path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fixed_iterations(tmp_path):
    table = run(tmp_path, "--only", "fixed")
    result = json.loads((tmp_path / "fixed.json").read_text())["fixed"]
    assert len(result["rows"]) == 9
    for row in result["rows"]:
        assert 0 < row["ours"]["min_ms"] <= row["ours"]["median_ms"]
        assert row["floor_ms"] > 0
        assert row["name"] in table
    assert result["ceilings"]["fma"] > result["ceilings"]["exp"] > 0


def test_floor(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    import rows

    class Ceilings:
        fma, exp = 1e9, 1e8

        @staticmethod
        def read(size):
            return 1e9 if size < 1e6 else 5e8

    # 1e6 pairs of 9 coordinates, twice: made once, 10 ms each for products and exponentials, then read in 4 MB / 5e8
    # each time; or made each time with 2 multiply-adds more. A matrix of costs is read, never made.
    assert rows.floor(rows.transport_demand(1000, 1000, 9, 2, 80), Ceilings) == (
        pytest.approx(20 + 2 * 8 + 80e-6), "reads",
    )  # fmt: skip
    assert rows.floor(rows.transport_demand(1000, 1000, 9, 1, 80), Ceilings) == (
        pytest.approx(12 + 10 + 80e-6), "multiply-adds",
    )  # fmt: skip
    assert rows.floor(rows.transport_demand(1000, 1000, 0, 1, 80), Ceilings) == (
        pytest.approx(1 + 10 + 8 + 80e-6), "exponentials",
    )  # fmt: skip
    assert rows.floor([[rows.Demand(fma=1e6, io_bytes=1e5)]], Ceilings) == (pytest.approx(1), "multiply-adds")


def test_cold(tmp_path):
    run(tmp_path, "--only", "cold")
    for row in json.loads((tmp_path / "cold.json").read_text())["cold"]["rows"]:
        for entry in row["ours"].values():
            assert entry["verified_error"] <= 1.001e-6


def test_serving(tmp_path):
    run(tmp_path, "--only", "serving")
    result = json.loads((tmp_path / "serving.json").read_text())["serving"]
    assert {row["server"] for row in result["load"]} == {
        "ours", "ours, one by one", "ours, C++ client", "floor: an empty call",
    }  # fmt: skip
    for row in result["load"]:
        assert row["requests"] > 0 and not row["errors"]
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        # The server's work per request is of one order, however it is asked: 1 us to 10 ms.
        assert 1e-3 < row["server_cpu_ms"] < 10
    assert [row["kib"] for row in result["payload"]] == [64, 256, 64, 256]


def test_row_filter_and_unknown_section(tmp_path):
    assert "dense" not in run(tmp_path, "--only", "fixed", "--rows", "clouds")
    with pytest.raises(AssertionError, match="no section"):
        run(tmp_path, "--only", "speed")
