"""Triton kernels on machines without a GPU: run by Triton's interpreter, or compiled for an H200.

The kernels of `tacit.training.gpu` are not altered, only how Triton starts them. So a test calls
the same functions of the package as training does, with tensors of the CPU.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

HOMES = (
    "banded_blocks", "conv_norms", "gram", "noise", "take_rows", "update", "weighted_rows",
)  # fmt: skip


def modules() -> list[Any]:
    """Return the modules that define kernels."""
    return [import_module(f"tacit.training.gpu.{name}") for name in HOMES]


@contextmanager
def interpreted() -> Iterator[None]:
    """Return a context in which kernels are computed by Triton's interpreter, with numpy.

    It computes a float32 product in float32, where a GPU may round its factors first.
    """
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    class Rounding:  # of `libdevice`, which the interpreter does not have
        @staticmethod
        def rint(x: Any) -> Any:
            data = interpreter.TensorHandle(np.rint(x.handle.data), x.handle.dtype)
            return language.core.tensor(data, x.type)

    with suppress(ImportError):  # newer versions load it with the first kernel, from what is there
        import_module("triton.experimental.gluon")
    ours = modules()
    tritons = [m for name, m in sys.modules.items() if name.startswith("triton.language")]
    builder = interpreter.InterpreterBuilder
    multiply, prepare = builder.create_dot, interpreter._patch_lang_tensor

    def widened(x: Any) -> Any:  # the interpreter would multiply the bits of bfloat16 as integers
        if x.dtype != language.bfloat16:
            return x
        values = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, language.float32)

    def product(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, widened(a), widened(b), *others)

    def prepared(tensor: type, *scope: Any) -> None:
        prepare(tensor, *scope)
        # Triton 3.6 converts arrays of one number, which numpy 2.5 refuses.
        tensor.__index__ = lambda self: self.handle.data.item()  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", prepared)
        patch.setattr(builder, "create_dot", product)
        patch.setattr(interpreter.InterpretedFunction, "rewritten_fn", {})
        for module in [*ours, *tritons]:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
        for module in ours:
            if hasattr(module, "libdevice"):
                patch.setattr(module, "libdevice", Rounding)
        before = {module: set(vars(module)) for module in ours}
        yield
        for module, names in before.items():  # the interpreter leaves names of its own there
            for name in set(vars(module)) - names:
                delattr(module, name)


class Compiled(NamedTuple):
    """What became of one kernel."""

    name: str
    seconds: float  # of processor time, with the assembler's
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    instructions: str


@contextmanager
def compiled_for_h200() -> Iterator[list[Compiled]]:
    """Return a context in which a kernel is compiled for an H200, assembled, and not started.

    Types, constants and alignments are those of the call. The context's value lists the kernels.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class H200:
        @staticmethod
        def get_current_target() -> Any:
            return GPUTarget("cuda", 90, 32)

        @staticmethod
        def get_current_device() -> int:
            return 0

        @staticmethod
        def get_current_stream(device: int) -> int:
            return 0

    found: list[Compiled] = []
    started: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started.append(self)
        begin = _seconds()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_looked_at(kernel, _seconds() - begin))
        return kernel

    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        pytest.MonkeyPatch.context() as patch,
    ):
        knobs.cache.dir = folder
        patch.setattr(driver, "_active", H200())
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        try:
            yield found
        finally:
            for function in started:  # these kernels belong to no device
                function.device_caches.clear()


def _seconds() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


def _looked_at(kernel: Any, seconds: float) -> Compiled:
    from triton.backends import nvidia

    dump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([dump, option, file.name], capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    held = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = held["STACK"] + held["LOCAL"]
    return Compiled(kernel.name, seconds, held["REG"], spilled, kernel.metadata.shared, code)
