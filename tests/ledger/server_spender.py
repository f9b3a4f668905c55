"""Spend from a ledger on a server until its budget is used up: python server_spender.py URL OUT N.

A release is a line in OUT, written after `spend` has returned.
"""

import itertools
import os
import sys

from tacit import Ledger
from tacit.errors import BudgetExceeded
from tacit.events import PureDP


def spend_all(address: str, out: str, name: str) -> None:
    handle = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ledger = Ledger(address)
    for number in itertools.count(1):
        note = f"{name}.{number}"
        try:
            ledger.spend(PureDP(0.001), note=note)
        except BudgetExceeded:
            return
        os.write(handle, f"{note}\n".encode())


if __name__ == "__main__":
    spend_all(*sys.argv[1:])
