"""Files that are replaced in one step: whoever reads one finds the old content or the new one."""

import contextlib
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".part"  # ending of a file that is being written


@contextmanager
def whole_file(path: Path, *, mode: int = 0o600) -> Generator[BinaryIO]:
    """Open a file beside `path`, which replaces it after the block, synced to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(part, mode)
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Sync the names of the files in `folder` to disk, where the system can open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o644) -> Path:
    """Replace the file `path` by `content` in one step, and return the path."""
    with whole_file(path, mode=mode) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed have left half-written beside `path`."""
    for part in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        part.unlink(missing_ok=True)
