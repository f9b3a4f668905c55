"""Files that are replaced as a whole, so that no reader and no crash sees half of one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".part"  # ending of a file that is being written


@contextmanager
def replaced(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Write the new content of `path` in the block; it replaces the old one when the block ends.

    The content is written to a file beside `path`, synced to disk, and renamed to `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed have left half-written beside `path`."""
    for part in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        part.unlink(missing_ok=True)
