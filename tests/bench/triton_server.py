"""Triton Inference Server from the nvidia-pytriton package as a peer: its Python backend, dynamic batching.

Run by that environment's interpreter (Debian's own python3; it must not be another build): prints port and process,
then serves until its standard input ends. PyTorch may lie in another environment, which --packages names.
"""

import argparse
import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile

CONFIG = """
name: "sinkhorn"
backend: "python"
max_batch_size: 512
input [ { name: "LOGITS" data_type: TYPE_FP32 dims: [ 32, 4, 4 ] } ]
output [ { name: "PLAN" data_type: TYPE_FP32 dims: [ 32, 4, 4 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { }
"""

# Scalings in one compiled function over all that a batch holds; sizes are rounded up, so that few are compiled.
# Triton's interpreter ignores PYTHONPATH.
MODEL = """
import sys

sys.path += PACKAGES
import numpy as np
import torch
import torch._dynamo
import triton_python_backend_utils as utils

torch.set_num_threads(THREADS)
torch._dynamo.config.recompile_limit = 64  # One function a batch size.


def normalize(logits):
    plan = torch.softmax(logits, 2)
    plan = plan / plan.sum(1, keepdim=True)
    for _ in range(19):
        plan = plan / plan.sum(2, keepdim=True)
        plan = plan / plan.sum(1, keepdim=True)
    return plan


class TritonPythonModel:
    def initialize(self, args):
        self.normalize = COMPILE
        with torch.no_grad():
            for power in range(10):
                for _ in range(3):
                    self.normalize(torch.randn(32 << power, 4, 4))

    def execute(self, requests):
        inputs = [utils.get_input_tensor_by_name(r, "LOGITS").as_numpy() for r in requests]
        sizes = [len(a) * 32 for a in inputs]
        together = np.concatenate(inputs).reshape(-1, 4, 4)
        count = len(together)
        padded = 32
        while padded < count:
            padded *= 2
        batch = np.zeros((padded, 4, 4), np.float32)
        batch[:count] = together
        with torch.no_grad():
            plan = self.normalize(torch.from_numpy(batch)).numpy()
        replies, begin = [], 0
        for size in sizes:
            part = plan[begin : begin + size].reshape(-1, 32, 4, 4)
            begin += size
            replies.append(utils.InferenceResponse([utils.Tensor("PLAN", np.ascontiguousarray(part))]))
        return replies
"""


def lay_out(folder, packages, threads, compiled):
    """Model repository and backends under `folder`."""
    version = folder / "models/sinkhorn/1"
    version.mkdir(parents=True)
    (folder / "models/sinkhorn/config.pbtxt").write_text(CONFIG)
    body = "torch.compile(normalize, dynamic=False)" if compiled else "normalize"
    fields = {"PACKAGES": repr(packages), "THREADS": str(threads), "COMPILE": body}
    text = MODEL
    for name, value in fields.items():
        text = text.replace(name, value)
    (version / "model.py").write_text(text)
    package = pathlib.Path(importlib.util.find_spec("pytriton").origin).parent / "tritonserver"
    backend = folder / "backends/python"
    shutil.copytree(package / "backends/python", backend)
    stub = (
        package / f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"
    )
    shutil.copy(stub, backend)
    return package / "bin/tritonserver"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", default="", help="site-packages of another environment, behind this one's")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; batches are too small for more")
    parser.add_argument("--compile", action="store_true", help="torch.compile the body")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        packages = [sysconfig.get_paths()["purelib"]] + ([arguments.packages] if arguments.packages else [])
        program = lay_out(pathlib.Path(name), packages, arguments.threads, arguments.compile)
        port = free_port()
        command = [
            program, f"--model-repository={name}/models", f"--backend-directory={name}/backends", "--allow-http=false",
            "--allow-metrics=false", "--grpc-address=127.0.0.1", f"--grpc-port={port}", "--log-verbose=0",
        ]  # fmt: skip
        libraries = pathlib.Path(packages[0]) / "nvidia_pytriton.libs"
        environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
        server = subprocess.Popen(command, env=environment, stdout=sys.stderr)
        print(port, server.pid, flush=True)
        try:
            sys.stdin.read()  # Until whoever started this closes it.
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
