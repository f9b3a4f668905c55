"""The Triton functions of `tacit.training.gpu.noise`, run with numpy on machines without a GPU.

Triton's language is Python: here its names stand for numpy's, one array element for each lane. So
integers are the same to the bit; doubles differ where a GPU fuses a product with a sum.
"""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np

import tacit.training.gpu as door


class Lanes(np.ndarray):
    """An array with Triton's method `to`, which no operation changes in place."""

    def __iadd__(self, other):
        return self + other

    def __ixor__(self, other):
        return self ^ other

    def to(self, dtype, bitcast=False):
        """Convert to `dtype`, or read the same bits as `dtype`."""
        return lanes(np.asarray(self).view(dtype) if bitcast else np.asarray(self).astype(dtype))


def lanes(values, dtype=None):
    """Return `values` as lanes."""
    return np.asarray(values, dtype).view(Lanes)


class Pointer:
    """The address of an array's first element."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, offset):
        return Pointer(self.array, self.at + offset)


def _language():
    names = types.SimpleNamespace(
        constexpr=object,
        float64=np.float64,
        float32=np.float32,
        int64=np.int64,
        uint32=np.uint32,
        uint64=np.uint64,
        static_range=range,
        full=lambda shape, value, dtype: dtype(value),
        load=lambda pointer, mask=None: lanes(pointer.array[pointer.at]),
        where=lambda test, a, b: lanes(np.where(test, a, b)),
        sqrt=lambda x: lanes(np.sqrt(x)),
        maximum=lambda a, b: lanes(np.maximum(a, b)),
        minimum=lambda a, b: lanes(np.minimum(a, b)),
        min=np.min,
    )
    module = types.ModuleType("triton.language")
    module.__dict__.update(vars(names))
    return module


def emulated(monkeypatch):
    """Return the module `tacit.training.gpu.noise` with numpy in the place of Triton."""
    triton, language = types.ModuleType("triton"), _language()
    triton.jit = lambda function: function
    triton.language = language
    extra, libdevice = types.ModuleType("triton.language.extra"), types.ModuleType("libdevice")
    libdevice.rint = lambda x: lanes(np.rint(x))
    extra.libdevice = libdevice
    for name, module in {
        "triton": triton,
        "triton.language": language,
        "triton.language.extra": extra,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    path = Path(door.__file__).with_name("noise.py")
    spec = importlib.util.spec_from_file_location("emulated_noise", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
