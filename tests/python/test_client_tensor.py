"""Arrays become tensors and come back, to the bit, in every type."""

import builtins

import ml_dtypes
import numpy as np
import pytest

from sinkhorn_client import _tensor
from sinkhorn_client._proto import sinkhorn_pb2 as pb

TYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ENUMS = [pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_FLOAT64, pb.DATA_TYPE_FLOAT16, pb.DATA_TYPE_BFLOAT16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 4, 3)])
def test_round_trip(dtype, shape):
    array = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    back = _tensor.decode(_tensor.encode(array))
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(("dtype", "enum"), list(zip(TYPES, ENUMS, strict=True)))
def test_wire_form(dtype, enum):
    tensor = _tensor.encode(np.array([[1.0, -2.0, 0.5]], dtype))
    assert tensor.dtype == enum
    assert list(tensor.shape) == [1, 3]
    assert len(tensor.data) == 3 * np.dtype(dtype).itemsize


def test_little_endian_row_major():
    tensor = _tensor.encode(np.array([[1, 2], [3, 4]], "<f4"))
    assert tensor.data == bytes.fromhex("0000803f 00000040 00004040 00008040")


def test_bfloat16_is_the_upper_half_of_float32():
    assert _tensor.encode(np.array([1.0], ml_dtypes.bfloat16)).data == bytes.fromhex("803f")


def test_any_memory_layout():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[::2, ::-1], np.asfortranarray(array), array.astype(">f4")):
        assert np.array_equal(_tensor.decode(_tensor.encode(view)), view)


def test_untyped_values():
    half = np.dtype(np.float16)
    assert _tensor.encode([1, 2]).dtype == pb.DATA_TYPE_FLOAT64
    assert _tensor.encode(np.arange(3)).dtype == pb.DATA_TYPE_FLOAT64
    assert _tensor.as_float_array([0.5, 2], like=half).dtype == half
    assert _tensor.as_float_array(np.arange(3), like=half).dtype == half
    # Typed ones stay as they are: nothing is rounded unasked.
    assert _tensor.as_float_array(np.zeros(2), like=half).dtype == np.float64


@pytest.mark.parametrize(
    "value", [np.zeros(2, np.complex64), np.array(["a"]), np.zeros(2, np.longdouble), [1j], "text"]
)
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="dtype must be one of float32"):
        _tensor.encode(value)


def test_decoded_arrays_are_writable():
    for dtype in TYPES:
        array = _tensor.decode(_tensor.encode(np.zeros(3, dtype)))
        array[0] = 1
        assert array[0] == 1


def test_bfloat16_without_ml_dtypes_comes_as_float32(monkeypatch):
    array = np.random.default_rng(2).standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    tensor = _tensor.encode(array)
    real_import = builtins.__import__

    def without_ml_dtypes(name, *args, **kwargs):
        if name == "ml_dtypes":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ml_dtypes)
    back = _tensor.decode(tensor)
    assert back.dtype == np.float32
    assert np.array_equal(back, array.astype(np.float32))
