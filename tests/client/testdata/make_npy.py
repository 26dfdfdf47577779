"""Writes the .npy files beside it, with NumPy itself; npy_test.cc reads them.

    python3 make_npy.py
"""

import os

import numpy
from numpy.lib import format as npy

os.chdir(os.path.dirname(os.path.abspath(__file__)))
ramp = numpy.arange(6).reshape(2, 3) / 4 - 0.5  # Exact in every float format.

for dtype in ("f2", "f4", "f8"):
    numpy.save(f"{dtype}.npy", ramp.astype("<" + dtype))
numpy.save("scalar.npy", numpy.float64(2.5))
numpy.save("vector.npy", numpy.array([1, 2.5, -3], "<f4"))
numpy.save("empty.npy", numpy.zeros((0, 3), "<f4"))
numpy.save("fortran.npy", numpy.asfortranarray(ramp))
numpy.save("big_endian.npy", ramp.astype(">f4"))
numpy.save("integers.npy", numpy.arange(6))
numpy.save("structured.npy", numpy.zeros(2, [("x", "<f4"), ("y", "<f4")]))
numpy.save("specials.npy", numpy.array([numpy.nan, numpy.inf, -numpy.inf, -0.0, 6e-8], "<f2"))
with open("version2.npy", "wb") as file:
    npy.write_array(file, ramp.astype("<f4"), version=(2, 0))
with open("version3.npy", "wb") as file:
    npy.write_array(file, ramp.astype("<f4"), version=(3, 0))
