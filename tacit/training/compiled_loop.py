"""Loops in Python as machine code, by the optional package numba.

numba takes 0.1 to 0.3 seconds and 60 MB to load, and 0.2 seconds to compile a loop. So it is loaded
when a loop is asked for, and never by an import of tacit.
"""

import importlib
import warnings
from collections.abc import Callable


def compiled(loop: Callable[..., int], signature: str) -> Callable[..., int] | None:
    """Return `loop` as machine code for arguments of these types, or None if that fails.

    It fails without numba, with a numba that does not fit the installed numpy or the processor, and
    where NUMBA_DISABLE_JIT is set. Threads may call the result at the same time: it holds no lock
    of Python's and no state, and numba starts no threads for it. Code compiled before a fork is
    there after it. Nothing is written to disk. Products and sums are as in IEEE 754: without
    `fastmath` numba neither fuses nor reorders them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an optional package: its warnings are not the user's
            numba = importlib.import_module("numba")  # without types: Any to a type checker
            if numba.config.DISABLE_JIT:
                return (
                    None  # numba would return the loop as it is, which takes a microsecond a number
                )
            return numba.njit(signature, nogil=True, fastmath=False)(loop)
    except Exception:  # whatever fails in an optional package, the caller has another way
        return None
