"""A lock on an open file, which the operating system releases when the process ends."""

import os
from typing import Any

_FAR = 1 << 20  # Windows locks bytes: one beyond the content, which others may read


def lock(handle: int) -> None:
    """Lock the open file for this process; raise `OSError` if someone else has locked it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        system: Any = msvcrt  # Any: type checkers elsewhere do not know it
        os.lseek(handle, _FAR, os.SEEK_SET)
        system.locking(handle, system.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
