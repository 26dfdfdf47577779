"""Generated from proto/sinkhorn/v1/sinkhorn.proto when the package is built: see setup.py."""
