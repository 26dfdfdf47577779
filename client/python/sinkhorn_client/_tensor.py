"""numpy arrays to and from the contract's `Tensor`: little-endian, row-major bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sinkhorn_client._proto import sinkhorn_pb2 as pb

Array = npt.NDArray[Any]

_BY_NAME = {
    "float32": pb.DATA_TYPE_FLOAT32,
    "float64": pb.DATA_TYPE_FLOAT64,
    "float16": pb.DATA_TYPE_FLOAT16,
    "bfloat16": pb.DATA_TYPE_BFLOAT16,  # numpy knows it as an extension type: the package ml_dtypes.
}
_FLOATS = {pb.DATA_TYPE_FLOAT32: "<f4", pb.DATA_TYPE_FLOAT64: "<f8", pb.DATA_TYPE_FLOAT16: "<f2"}


def encode(value: npt.ArrayLike) -> pb.Tensor:
    """The tensor of `value`, typed as `as_float_array` says."""
    array = as_float_array(value)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return pb.Tensor(dtype=_BY_NAME[array.dtype.name], shape=array.shape, data=array.tobytes())


def as_float_array(value: npt.ArrayLike, like: np.dtype[Any] | None = None) -> Array:
    """`value` as an array. The four floating types stay as they are; integers, booleans and Python numbers become
    `like`, or float64 without it. Raises TypeError for other types."""
    array = np.asarray(value)
    untyped = array.dtype.kind in "biu" or not hasattr(value, "dtype")
    if untyped and array.dtype.kind in "biuf":
        return array.astype(like or np.float64, copy=False)
    if array.dtype.name not in _BY_NAME:
        raise TypeError(f"dtype must be one of {', '.join(_BY_NAME)}, or integers; got {array.dtype}")
    return array


def decode(tensor: pb.Tensor) -> Array:
    """The array of `tensor`, writable. bfloat16 needs ml_dtypes; without it the values come, unchanged, as float32."""
    shape = tuple(tensor.shape)
    if tensor.dtype == pb.DATA_TYPE_BFLOAT16:
        return _decode_bfloat16(np.frombuffer(tensor.data, "<u2").reshape(shape))
    return np.frombuffer(tensor.data, _FLOATS[tensor.dtype]).reshape(shape).astype(_FLOATS[tensor.dtype][1:])


def _decode_bfloat16(halves: npt.NDArray[np.uint16]) -> Array:
    try:
        import ml_dtypes
    except ImportError:
        wide = halves.astype(np.uint32) << 16
        return wide.view(np.float32)
    return halves.astype(np.uint16).view(ml_dtypes.bfloat16)
