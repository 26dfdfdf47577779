"""Makes the protobuf module of the public contract at build time; everything else stands in pyproject.toml.

The contract lives beside the client in the repository (`proto/`, two folders up). A source distribution carries a copy
of it in its own `proto/`, so it builds anywhere.
"""

import importlib.metadata
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
CONTRACT = pathlib.Path("sinkhorn/v1/sinkhorn.proto")
PROTO_FILES = [CONTRACT, pathlib.Path("google/rpc/status.proto")]


def proto_root() -> pathlib.Path:
    """The folder that imports of .proto files are relative to."""
    candidates = [HERE / "proto", HERE.parent.parent / "proto"]
    for root in candidates:
        if (root / CONTRACT).is_file():
            return root
    raise SystemExit(f"{CONTRACT} is in none of {[str(c) for c in candidates]}: build from the repository or an sdist")


class BuildWithStubs(build_py):
    """Adds sinkhorn_client/_proto/sinkhorn_pb2.py and its .pyi to the build."""

    def run(self) -> None:
        super().run()
        root = HERE if self.editable_mode else pathlib.Path(self.build_lib)
        generate(root / "sinkhorn_client" / "_proto")


class SdistWithProtos(sdist):
    """Adds the .proto files to the source distribution."""

    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        for file in PROTO_FILES:
            copy = pathlib.Path(base_dir) / "proto" / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(proto_root() / file, copy)


def generate(folder: pathlib.Path) -> None:
    """Compiles the contract and puts its module, which protoc wants in sinkhorn/v1/, into `folder`."""
    from grpc_tools import protoc  # Only a build needs it.

    folder.mkdir(parents=True, exist_ok=True)
    well_known = pathlib.Path(protoc.__file__).parent / "_proto"
    arguments = [f"-I{proto_root()}", f"-I{well_known}", f"--python_out={folder}", f"--pyi_out={folder}", str(CONTRACT)]
    if protoc.main(["protoc", *arguments]) != 0:
        raise SystemExit(f"protoc failed: {' '.join(arguments)}")
    for suffix in (".py", ".pyi"):
        made = folder / CONTRACT.parent / f"sinkhorn_pb2{suffix}"
        text = made.read_text().replace("'sinkhorn.v1.sinkhorn_pb2'", "'sinkhorn_client._proto.sinkhorn_pb2'")
        (folder / made.name).write_text(text)
    shutil.rmtree(folder / "sinkhorn")


def dependencies() -> list[str]:
    """What the client runs with. Generated code asks for a protobuf at least as new as its compiler: the range is the
    compiler's own."""
    protobuf = [r for r in importlib.metadata.requires("grpcio-tools") or [] if r.startswith("protobuf")]
    return ["numpy>=1.23", "grpcio>=1.51", "grpcio-health-checking>=1.51", "googleapis-common-protos>=1.56", *protobuf]


if __name__ == "__main__":  # tests/python/conftest.py imports `generate`.
    setup(cmdclass={"build_py": BuildWithStubs, "sdist": SdistWithProtos}, install_requires=dependencies())
