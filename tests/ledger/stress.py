"""Processes that race, die and run out of disk; run by `test_crashes.py`, prints JSON.

python stress.py race FILE PROCESSES SPENDS
python stress.py kill FILE TIMES SEED
python stress.py full FILE BYTES
python stress.py reopen|forked FILE
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from tacit import Budget, Ledger
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Gaussian, PureDP, Repeated

FITTING = 1_000


def race(file: Path, processes: int, spends: int) -> dict[str, object]:
    """How many spends each process was granted of a budget that fits exactly `FITTING`."""
    budget = Budget(epsilon=FITTING / 1_000)
    children = []
    for _ in range(processes):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, str(_granted(file, budget, spends)).encode())
            os._exit(0)
        os.close(writing)
        children.append((child, reading))
    granted = []
    for child, reading in children:
        os.waitpid(child, 0)
        granted.append(int(os.read(reading, 64)))
    return {"granted": granted}


def _granted(file: Path, budget: Budget, spends: int) -> int:
    ledger, granted = Ledger(file, budget), 0
    for number in range(spends):
        try:
            ledger.spend(PureDP(0.001), note=str(number))
            granted += 1
        except BudgetExceeded:
            pass
    return granted


def kill(file: Path, times: int, seed: int) -> dict[str, object]:
    """Kill a spender `times` times at random moments; every release must have its entry.

    A release is a line in FILE.released, written after `spend` or `step` has returned. Each spender
    also takes a step of a plan now and then, whose numbers must never come twice.
    """
    clock = random.Random(seed)
    released = file.with_suffix(".released")
    Ledger(file).close()
    plan = Ledger(file).plan(Repeated(PureDP(1e-6), 10**9), claim=3).id
    Ledger().spend(PureDP(0.001))  # priced once here, so that children start spending at once
    alive = 0
    for turn in range(times):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _spend_forever(file, released, turn, plan, writing)
        if turn % 4:  # every fourth may die while it still opens the file
            os.read(reading, 1)
        time.sleep(clock.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        alive += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        os.close(writing)
    lines = released.read_text().split("\n")[:-1]
    with Ledger(file) as ledger:
        found = ledger.verify()
        notes = {entry.note for entry in ledger.history()}
        steps = [line for line in lines if line.startswith("step")]
        return {
            "killed": alive,
            "released": len(lines),
            "missing": len({line for line in lines if line.startswith("spend")} - notes),
            "steps": len(steps),
            "repeated_steps": len(steps) - len(set(steps)),
            "steps_within_taken": all(
                int(line.split()[1]) <= ledger.resume(plan).taken for line in steps
            ),
            "entries": found.entries,
        }


def _spend_forever(file: Path, released: Path, turn: int, plan_id: int, ready: int) -> None:
    ledger = Ledger(file)
    plan = ledger.resume(plan_id, claim=3)
    out = os.open(released, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ready, b"x")
    number = 0
    while True:
        number += 1
        note = f"spend {turn}.{number}"
        ledger.spend(PureDP(0.001), note=note)
        os.write(out, f"{note}\n".encode())  # the release
        if number % 5 == 0:
            os.write(out, f"step {plan.step()}\n".encode())


def full(file: Path, size: int) -> dict[str, object]:
    """Spend until the disk is full, then again with more room."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ledger = Ledger(file, Budget(epsilon=1.0, delta=1e-5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    paid: list[str] = []
    message = ""
    while not message:
        try:
            paid.append(ledger.spend(Gaussian(1e5), note=str(len(paid))).note)
        except LedgerError as error:
            message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    paid.append(ledger.spend(Gaussian(1e5), note="after").note)
    ledger.close()
    with Ledger(file) as again:
        notes = [entry.note for entry in again.history()]
        again.verify()
    return {"message": message, "paid": len(paid), "missing": len(set(paid) - set(notes))}


def reopen(file: Path) -> dict[str, object]:
    """A child opens the file itself and spends while its parent lets go of it."""
    ledger = Ledger(file, Budget(epsilon=10.0))
    ledger.spend(PureDP(0.1), note="parent")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        again = Ledger(file)
        again.spend(PureDP(0.1), note="child")
        os.read(reading, 1)  # until the parent has closed its connection
        for number in range(19):
            again.spend(PureDP(0.1), note=f"child {number}")
        os._exit(0)
    ledger.spend(PureDP(0.1), note="parent, after the fork")
    ledger.close()
    os.write(writing, b"x")
    os.waitpid(child, 0)
    with Ledger(file) as found:
        return {"entries": found.verify().entries}


def forked(file: Path) -> dict[str, object]:
    """What a child hears that uses the ledgers of its parent."""
    ledger, memory = Ledger(file, Budget(epsilon=1.0)), Ledger(budget=Budget(epsilon=1.0))
    plan = ledger.plan(PureDP(0.1))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        messages = []
        for call in (
            lambda: ledger.spend(PureDP(0.1)),
            lambda: memory.spend(PureDP(0.1)),
            plan.step,
        ):
            try:
                call()
            except LedgerError as error:
                messages.append(str(error))
        os.write(writing, json.dumps(messages).encode())
        os._exit(0)
    os.waitpid(child, 0)
    ledger.spend(PureDP(0.1))
    return {"messages": json.loads(os.read(reading, 65_536)), "entries": len(ledger.history())}


if __name__ == "__main__":
    verb, file, *numbers = sys.argv[1:]
    work = {"race": race, "kill": kill, "full": full, "reopen": reopen, "forked": forked}[verb]
    print(json.dumps(work(Path(file), *map(int, numbers))))
