"""The CPU backend in a process of its own, on the same cores: twin of the structs of solver.h and solver_main.cc."""

import ctypes
import os
import pathlib
import subprocess
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What Bazel built; a variable for those who have several.
BIN = pathlib.Path(os.environ.get("BAZEL_BIN", ROOT / "bazel-bin"))
PROGRAM = BIN / "tests/bench/sinkhorn_bench_solver"

# Values of kernels/problem.h.
NORMALIZATION, DENSE, POINT_CLOUD = 0, 1, 2
STRICT, FAST, DOUBLE = 0, 1, 2
DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1}
STOP_REASONS = ("tolerance", "max_iterations", "precision", "not_iterated", "time_budget")

# Operations of solver_main.cc.
SOLVE, FMA_RATE, EXP_RATE, READ_RATE, DEVICE = range(5)

_INPUTS = ("logits", "cotangent", "cost", "x", "y")
_OUTPUTS = ("f", "g", "plan", "gradient_logits")
_pointer, _int64, _int32, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double


class _Problem(ctypes.Structure):
    _fields_ = (
        [("kind", _int32), ("dtype", _int32)]
        + [(name, _int64) for name in ("count", "n", "m", "dim")]
        + [(name, _pointer) for name in _INPUTS]
        + [("epsilon", _double), ("tolerance", _double), ("max_iterations", _int32), ("precision", _int32)]
        + [(name, _pointer) for name in _OUTPUTS]
    )


class Report(ctypes.Structure):
    _fields_ = [
        ("iterations", _int32),
        ("converged", _int32),
        ("stop_reason", _int32),
        ("padding", _int32),
        ("marginal_error_a", _double),
        ("marginal_error_b", _double),
        ("family", ctypes.c_char * 64),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("operation", _int32),
        ("warmups", _int32),
        ("repeats", _int32),
        ("padding", _int32),
        ("bytes", _int64),
        ("problem", _Problem),
    ]


class _Reply(ctypes.Structure):
    _fields_ = [
        ("ok", _int32),
        ("repeats", _int32),
        ("rate", _double),
        ("report", Report),
        ("text", ctypes.c_char * 256),
    ]


class Problem:
    """A problem and its outputs, as arrays."""

    def __init__(self, kind, *, count=1, n, m, dim=0, outputs, dtype, inputs, **scalars):
        shapes = {"f": (n,), "g": (m,), "plan": (n, m), "gradient_logits": (n, m)}
        self.inputs = {name: np.ascontiguousarray(array, dtype) for name, array in inputs.items()}
        self.outputs = {name: np.empty((count, *shapes[name]), dtype) for name in outputs}
        self.scalars = dict(kind=kind, dtype=DTYPES[np.dtype(dtype)], count=count, n=n, m=m, dim=dim, **scalars)


def point_cloud(x, y, epsilon, *, iterations, tolerance=0.0, precision=STRICT):
    (n, dim), m = x.shape, y.shape[0]
    return Problem(
        POINT_CLOUD, n=n, m=m, dim=dim, outputs=("f", "g"), dtype=x.dtype, inputs={"x": x, "y": y},
        epsilon=epsilon, tolerance=tolerance, max_iterations=iterations, precision=precision,
    )  # fmt: skip


def dense(cost, epsilon, *, iterations, tolerance=0.0, precision=STRICT):
    n, m = cost.shape
    return Problem(
        DENSE, n=n, m=m, outputs=("f", "g"), dtype=cost.dtype, inputs={"cost": cost},
        epsilon=epsilon, tolerance=tolerance, max_iterations=iterations, precision=precision,
    )  # fmt: skip


def normalization(logits, *, iterations, cotangent=None):
    count, n, m = logits.shape
    inputs = {"logits": logits} | ({} if cotangent is None else {"cotangent": cotangent})
    outputs = ("plan",) if cotangent is None else ("plan", "gradient_logits")
    return Problem(
        NORMALIZATION, count=count, n=n, m=m, outputs=outputs, dtype=logits.dtype, inputs=inputs,
        max_iterations=iterations,
    )  # fmt: skip


class Solver:
    """The process. A context manager: its end is the process's."""

    def __init__(self, threads=2):
        if not PROGRAM.exists():
            raise SystemExit(f"{PROGRAM} is missing: bazel build //tests/bench:sinkhorn_bench_solver")
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._file = tempfile.NamedTemporaryFile(dir=memory)  # noqa: SIM115
        command = [PROGRAM, self._file.name, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(60)
        self._file.close()

    def _call(self, operation, **fields):
        self._process.stdin.write(bytes(_Request(operation=operation, **fields)))
        self._process.stdin.flush()
        reply = _Reply.from_buffer_copy(self._read(ctypes.sizeof(_Reply)))
        seconds = np.frombuffer(self._read(8 * reply.repeats), np.float64)
        if not reply.ok:
            raise RuntimeError(reply.text.decode())
        return reply, seconds.tolist()

    def _read(self, size):
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"{PROGRAM.name} ended with status {self._process.wait()}")
        return data

    def solve(self, problem, repeats=1, warmups=0):
        """Solves `warmups` times, then `repeats` times: the latter's seconds, and the report. Fills the outputs."""
        offset, places = 0, {}
        for name, array in (problem.inputs | problem.outputs).items():
            places[name] = offset + 1
            offset += (array.nbytes + 127) // 128 * 128
        shared = np.memmap(self._file, np.uint8, "r+", shape=(self._grow(offset),))
        for name, array in problem.inputs.items():
            shared[places[name] - 1 :][: array.nbytes] = array.reshape(-1).view(np.uint8)
        shared.flush()
        struct = _Problem(**problem.scalars, **places)
        reply, seconds = self._call(SOLVE, warmups=warmups, repeats=repeats, bytes=offset, problem=struct)
        for name, array in problem.outputs.items():
            array.reshape(-1).view(np.uint8)[:] = shared[places[name] - 1 :][: array.nbytes]
        return seconds, reply.report

    def _grow(self, size):
        self._file.truncate(max(size, 1))
        return max(size, 1)

    def device(self):
        return self._call(DEVICE)[0].text.decode()

    def fma_rate(self):
        return self._call(FMA_RATE)[0].rate

    def exp_rate(self):
        return self._call(EXP_RATE)[0].rate

    def read_rate(self, size):
        return self._call(READ_RATE, bytes=int(size))[0].rate
