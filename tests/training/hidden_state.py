"""Data sets that carry what they read from one record to the next, in every place we thought of.

Each builder returns a function that is applied to a record (a vector of `WIDTH` numbers) when it is
read, and that returns the record plus something of the records before.
"""

import array
import contextvars
import ctypes
import functools
import gc
import os
import sys
import tempfile
import threading
import types
import warnings
import weakref

import numpy as np
import torch
from torch import nn

WIDTH = 6
PLACES = {}


def place(build):
    PLACES[build.__name__] = build
    return build


def running_sum(read, write):
    """Return a function that adds each record to what `read` returns, and stores the sum."""

    def visit(x):
        held = read()
        total = x + (held if isinstance(held, torch.Tensor) else torch.tensor(held)).to(x.dtype)
        write(total.detach().clone())
        return total

    return visit


@place
def a_bytearray():
    held = bytearray(4 * WIDTH)

    def write(total):
        held[:] = total.numpy().tobytes()

    return running_sum(lambda: np.frombuffer(bytes(held), np.float32).copy(), write)


@place
def a_memoryview():
    held = memoryview(bytearray(4 * WIDTH))

    def write(total):
        held[:] = total.numpy().tobytes()

    return running_sum(lambda: np.frombuffer(bytes(held), np.float32).copy(), write)


@place
def an_array_of_the_standard_library():
    held = array.array("d", [0.0] * WIDTH)

    def write(total):
        held[:] = array.array("d", total.tolist())

    return running_sum(lambda: list(held), write)


@place
def a_frozen_parameter():
    held = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
    return running_sum(lambda: held.data, held.data.copy_)


@place
def a_leaf_that_requires_a_gradient():
    held = torch.zeros(WIDTH, requires_grad=True)
    return running_sum(lambda: held.detach(), held.data.copy_)


@place
def the_gradient_of_a_parameter():
    held = nn.Parameter(torch.zeros(WIDTH))
    held.grad = torch.zeros(WIDTH)
    return running_sum(lambda: held.grad, lambda total: setattr(held, "grad", total))


@place
def an_attribute_of_a_tensor():
    held = torch.zeros(1)
    held.last = torch.zeros(WIDTH)
    return running_sum(lambda: held.last, lambda total: setattr(held, "last", total))


@place
def an_attribute_of_torch():
    return running_sum(
        lambda: getattr(torch, "running_total", torch.zeros(WIDTH)),
        lambda total: setattr(torch, "running_total", total),
    )


@place
def an_attribute_of_a_layer_class():
    return running_sum(
        lambda: getattr(nn.Linear, "last", torch.zeros(WIDTH)),
        lambda total: setattr(nn.Linear, "last", total),
    )


@place
def a_list_in_a_mapping_proxy():
    held = types.MappingProxyType({"a": [torch.zeros(WIDTH)]})
    return running_sum(lambda: held["a"][0], lambda total: held["a"].__setitem__(0, total))


@place
def a_data_frame():
    pandas = __import__("pandas")
    held = pandas.DataFrame({"a": [0.0] * WIDTH})

    def write(total):
        held["a"] = total.double().numpy()

    return running_sum(lambda: held["a"].to_numpy().copy(), write)


@place
def the_environment():
    return running_sum(
        lambda: [float(v) for v in os.environ.get("TACIT_TEST", "0 " * WIDTH).split()],
        lambda total: os.environ.__setitem__("TACIT_TEST", " ".join(map(str, total.tolist()))),
    )


@place
def a_cache_of_the_first_call():
    box = [None]

    @functools.lru_cache(maxsize=1)
    def first():
        return box[0]

    def visit(x):
        box[0] = x
        return x + first()

    return visit


@place
def a_generator_reseeded_by_a_record():
    generator = torch.Generator().manual_seed(0)

    def visit(x):
        noise = torch.randn(WIDTH, generator=generator)
        generator.manual_seed(int(1000 * x.abs().sum()))
        return x + noise

    return visit


@place
def a_generator_behind_a_c_function():
    generator = np.random.PCG64(0)

    def draw():  # the state is behind a pointer
        return generator.ctypes.next_double(generator.ctypes.state)

    def visit(x):
        for _ in range(int(10 * x.abs().sum())):
            draw()
        return x + draw()

    return visit


@place
def memory_at_an_address():
    held = (ctypes.c_float * WIDTH)()
    address = ctypes.addressof(held)

    def write(total):
        ctypes.memmove(address, total.numpy().tobytes(), 4 * WIDTH)

    return running_sum(
        lambda: np.frombuffer(ctypes.string_at(held, 4 * WIDTH), np.float32).copy(), write
    )


@place
def a_python_iterator():
    def averages():
        total = torch.zeros(WIDTH)
        while True:
            total = total + (yield total)

    held = averages()
    next(held)
    return lambda x: x + held.send(x)


@place
def a_variable_of_the_thread():
    local = threading.local()
    return running_sum(
        lambda: getattr(local, "total", torch.zeros(WIDTH)),
        lambda total: setattr(local, "total", total),
    )


@place
def a_context_variable():
    held = contextvars.ContextVar("total")
    return running_sum(lambda: held.get(torch.zeros(WIDTH)), held.set)


@place
def settings_of_the_interpreter():
    def visit(x):
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1000 + int(100 * x.abs().sum()))
        return x + limit

    return visit


@place
def the_collector_of_garbage():
    def visit(x):
        before = gc.get_threshold()[0]
        gc.set_threshold(500 + int(100 * x.abs().sum()))
        return x + before

    return visit


@place
def the_filters_of_warnings():
    def visit(x):
        seen = len(warnings.filters)
        for number in range(int(10 * x.abs().sum())):
            warnings.filterwarnings("ignore", message=f"{number} {float(x[0])}")
        return x + seen

    return visit


@place
def the_working_directory():
    def visit(x):
        depth = len(os.getcwd().split(os.sep))
        os.chdir(os.sep if x[0] > 0 else os.path.expanduser("~"))
        return x + depth

    return visit


@place
def the_default_type_of_torch():
    def visit(x):
        is_double = torch.zeros(1).dtype == torch.float64
        torch.set_default_dtype(torch.float64 if x[0] > 0 else torch.float32)
        return x + (5.0 if is_double else 0.0)

    return visit


@place
def a_weak_reference():
    held = threading.Event()
    seen = weakref.WeakKeyDictionary({held: torch.zeros(WIDTH)})
    return running_sum(lambda: seen[held], lambda total: seen.__setitem__(held, total))


@place
def memory_of_two_processes():
    held = torch.zeros(WIDTH).share_memory_()
    return running_sum(lambda: held, held.copy_)


@place
def a_mapped_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * WIDTH)
        held = np.memmap(file, np.float32, "r+", shape=(WIDTH,))
    return running_sum(lambda: held, lambda total: held.__setitem__(slice(None), total.numpy()))


@place
def the_place_in_an_open_file():
    file = os.open(__file__, os.O_RDONLY)

    def visit(x):
        before = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, int(100 * x.abs().sum()), os.SEEK_SET)
        return x + before

    return visit
