"""The Python client is imported from its source folder, with stubs made afresh from the contract."""

import importlib.util
import pathlib

CLIENT = pathlib.Path(__file__).parents[2] / "client" / "python"


def generate():
    spec = importlib.util.spec_from_file_location("client_setup", CLIENT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    setup.generate(CLIENT / "sinkhorn_client" / "_proto")
