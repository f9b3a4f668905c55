"""Moving a ledger: from a file to a server, back, or to another file, with its whole history.

The rows are copied with their numbers and hashes, so the new ledger continues the same chain, and
its witness. Before anything is copied, the old ledger gets a last row that says where it went: from
then on nothing can be spent from it, because two ledgers with one budget would spend it twice. A
move that was interrupted is completed by the same call.
"""

import os
from pathlib import Path

from tacit.errors import LedgerError
from tacit.ledger.chain import MOVED, LedgerRow, chained, now
from tacit.ledger.ledger import Ledger
from tacit.ledger.postgres_store import create_on_server, server_address, without_password
from tacit.ledger.store import create_file

_CONTINUED = "ledger continues here, moved from "


def move(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: bytes | str | os.PathLike[str] | None = None,
) -> None:
    """Move the ledger at `source`, a file or an address, to `target`, which must not exist yet.

    `key` is that of a keyed chain, see `Ledger`.
    """
    address = None if isinstance(target, Path) else server_address(str(target))
    name = without_password(address) if address else str(Path(target).resolve())
    if address is None and Path(target).exists():
        raise LedgerError(f"{target} exists already. Give a file that does not exist.")
    with Ledger(source, key=key) as ledger:
        store = ledger.store
        with store.reading():
            gone = store.check().moved_to
        if gone not in ("", name):
            raise LedgerError(f"{source} was already moved to {gone}.")
        if not gone:
            ledger.seal(f"{MOVED}{name}")
        with store.reading():
            rows = store.rows()
        last = LedgerRow(
            id=len(rows) + 1, time=now(), kind="seal", note=f"{_CONTINUED}{ledger.path}", steps=0
        )
        rows.append(last._replace(hash=chained(rows[-1].hash, last, store.key)))
        if address is not None:
            is_new = create_on_server(address, store.settings, store.key, rows)
        else:
            is_new = create_file(Path(target).resolve(), store.settings, store.key, rows)
    if not is_new:
        with Ledger(target, key=key, read_only=True) as found:
            if found.id != ledger.id:
                raise LedgerError(f"there is another ledger at {name}. Give another name.")
