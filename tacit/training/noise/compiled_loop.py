"""The fast path of noise as machine code, by the optional package llvmlite (LLVM).

It does number by number what `grid_noise` does in passes of numpy (`_propose`, `in_steps`,
`_release`), with the same bits: each line of the loop below is one operation of IEEE 754, and LLVM
neither fuses nor reorders them unless it is asked to. No product is added to anything before it is
rounded, so there is nothing to fuse.

LLVM takes 0.1 seconds to load and to compile the loop, and 8 MB of memory beside some 60 MB of
pages of its library. It is loaded when a loop is asked for, never by an import of tacit, and writes
nothing to disk. The compiled code has no state: threads may run it at the same time, without
Python's lock, and it is there after a fork.
"""

import ctypes
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

Loop = Callable[..., int]
_TYPES = {"float32": "float", "float64": "double"}
_LOOP = """
declare double @llvm.rint.f64(double)
declare double @llvm.fabs.f64(double)

define i64 @release(i64 %count, ptr %words, ptr %unit, ptr %inside, double %stretch,
    ptr %total, double %per_step, double %factor, ptr %out, ptr %late, ptr %steps) {
entry:
  %is_any = icmp sgt i64 %count, 0
  br i1 %is_any, label %number, label %end

number:
  %i = phi i64 [0, %entry], [%following, %write]
  %found = phi i64 [0, %entry], [%found_now, %write]

  ; The proposed point: word * unit[layer], where the ten lowest bits of the word are the layer.
  %word_at = getelementptr i64, ptr %words, i64 %i
  %word = load i64, ptr %word_at
  %layer = and i64 %word, 1023
  %unit_at = getelementptr double, ptr %unit, i64 %layer
  %unit_here = load double, ptr %unit_at
  %place = sitofp i64 %word to double
  %point = fmul double %place, %unit_here

  ; The noise in whole steps: rint(point * stretch).
  %stretched = fmul double %point, %stretch
  %noise = call double @llvm.rint.f64(double %stretched)

  ; The sum in whole steps, limited: rint(total * per_step). NaN stays.
  %total_at = getelementptr READ, ptr %total, i64 %i
  %given = load READ, ptr %total_at
  %wide = fpext READ %given to double
  %scaled = fmul double %wide, %per_step
  %whole = call double @llvm.rint.f64(double %scaled)
  %amount = call double @llvm.fabs.f64(double %whole)
  %is_usual = fcmp ole double %amount, 0x7E70000000000000 ; 2^1000
  br i1 %is_usual, label %compare, label %limit, !prof !0

limit:
  %is_above = fcmp ogt double %whole, 0x7E70000000000000
  %below_most = select i1 %is_above, double 0x7E70000000000000, double %whole
  %is_below = fcmp olt double %below_most, 0xFE70000000000000
  %limited = select i1 %is_below, double 0xFE70000000000000, double %below_most
  br label %compare

compare:
  %sum = phi double [%whole, %number], [%limited, %limit]

  ; The point is undecided if |point| >= inside[layer].
  %inside_at = getelementptr double, ptr %inside, i64 %layer
  %bound = load double, ptr %inside_at
  %size = call double @llvm.fabs.f64(double %point)
  %is_undecided = fcmp oge double %size, %bound
  br i1 %is_undecided, label %undecided, label %write, !prof !1

undecided: ; kept for the end, when such numbers get their noise; until then they are NaN
  %late_at = getelementptr i64, ptr %late, i64 %found
  store i64 %i, ptr %late_at
  %steps_at = getelementptr double, ptr %steps, i64 %found
  store double %sum, ptr %steps_at
  %one_more = add i64 %found, 1
  br label %write

write: ; out = (noise + sum) * factor
  %found_now = phi i64 [%found, %compare], [%one_more, %undecided]
  %noise_now = phi double [%noise, %compare], [0x7FF8000000000000, %undecided]
  %both = fadd double %noise_now, %sum
  %value = fmul double %both, %factor
  %short = fptrunc double %value to WRITTEN
  %out_at = getelementptr WRITTEN, ptr %out, i64 %i
  store WRITTEN %short, ptr %out_at
  %following = add i64 %i, 1
  %is_more = icmp slt i64 %following, %count
  br i1 %is_more, label %number, label %end

end:
  %result = phi i64 [0, %entry], [%found_now, %write]
  ret i64 %result
}

!0 = !{!"branch_weights", i32 4000, i32 1}
!1 = !{!"branch_weights", i32 1, i32 300}
"""


def compiled_loop(read: str, written: str) -> Loop | None:
    """Return the loop for sums and results of these types; None without an LLVM that works.

    It takes words, unit, inside, stretch, total, per_step, factor, out, late and steps, and returns
    the number of undecided places, which are in `late`, and the sums there in `steps`.
    """
    if not {read, written} <= _TYPES.keys():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an optional package, not of the user's program
            return _Compiled(_TYPES[read], _TYPES[written])
    except Exception:  # whatever fails in an optional package, numpy does the same
        return None


class _Compiled:
    """The loop as machine code."""

    def __init__(self, read: str, written: str) -> None:
        llvm = importlib.import_module("llvmlite.binding")  # Any to a type checker
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        text = _LOOP.replace("READ", read).replace("WRITTEN", written)
        text = text.replace("fpext double %given to double", "fadd double %given, -0.0")
        text = text.replace("fptrunc double %value to double", "fadd double %value, -0.0")
        module = llvm.parse_assembly(text)
        module.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        self.assembly = str(machine.emit_assembly(module))
        self._engine = llvm.create_mcjit_compiler(module, machine)  # owns the code
        self._engine.finalize_object()
        number, address, double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
        kinds = [number, *[address] * 3, double, address, double, double, *[address] * 3]
        make = ctypes.CFUNCTYPE(number, *kinds)  # gives up Python's lock while it runs
        self._run = make(self._engine.get_function_address("release"))

    def __call__(
        self,
        words: NDArray[Any],
        unit: NDArray[Any],
        inside: NDArray[Any],
        stretch: float,
        total: NDArray[Any],
        per_step: float,
        factor: float,
        out: NDArray[Any],
        late: NDArray[Any],
        steps: NDArray[Any],
    ) -> int:
        if not (count := len(words)):
            return 0
        # The machine code does not look.
        assert len(total) == len(out) == count <= min(len(late), len(steps))
        assert len(unit) == len(inside) == 1024
        words = words if words.flags.writeable else words.copy()  # as `from_buffer` demands
        a, b, c, d, e, f, g = (
            ctypes.byref(ctypes.c_char.from_buffer(array))  # pyright: ignore[reportArgumentType]  # a buffer
            for array in (words, unit, inside, total, out, late, steps)
        )
        return self._run(count, a, b, c, stretch, d, per_step, factor, e, f, g)
