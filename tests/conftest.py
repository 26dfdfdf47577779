"""Before any test is imported: the client's stubs (tests/python/client_stubs.py)."""

import client_stubs

client_stubs.generate()
