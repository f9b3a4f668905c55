"""Spend from a ledger on a server until its budget is used up: python server_spender.py URL OUT N.

A release is a line in OUT, written after `spend` has returned.
"""

import os
import sys

from tacit import Ledger
from tacit.errors import BudgetExceeded
from tacit.events import PureDP

address, out, name = sys.argv[1:]
handle = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
ledger = Ledger(address)
number = 0
while True:
    number += 1
    note = f"{name}.{number}"
    try:
        ledger.spend(PureDP(0.001), note=note)
    except BudgetExceeded:
        break
    os.write(handle, f"{note}\n".encode())
