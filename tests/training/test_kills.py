"""Processes that are killed at random moments, watched from outside.

Each child trains from the checkpoint of the child before it. Before every release it sends the hash
of its sums and the first words of its noise through a pipe, which the parent empties when the child
is dead. So what a killed process has released is known to a process that was never killed.
"""

import hashlib
import json
import multiprocessing
import os
import random
import time
import warnings
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.training import Banded, Checkpoint, Speed
from tacit.training import noise as noises
from tacit.training.checkpoint_file import CheckpointWriter

STEPS = 120
PLAIN, BANDED = {}, {"noise": Banded(bands=2)}


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def send(pipe, **found):
    pipe.send_bytes(json.dumps(found).encode())


def watch(pipe, release):
    """Report the sums and the noise of every release, and every checkpoint that is begun."""
    add_noise, write = noises.add_noise, CheckpointWriter._write

    def released(parts, factor, *, source, **options):
        sums = hashlib.sha256()
        for part in parts:
            gradients = getattr(part.total, "_total", part.total)  # of mixed sums, too
            sums.update(np.ascontiguousarray(gradients).tobytes())
        words = source.sequence(0)(4).tobytes().hex()
        send(pipe, words=words, sums=sums.hexdigest())
        time.sleep(release)
        return add_noise(parts, factor, source=source, **options)

    def written(self, state):
        send(pipe, writes=state["private"]["steps_taken"])
        time.sleep(release)
        write(self, state)

    noises.add_noise, CheckpointWriter._write = released, written


def child(pipe, folder, options, changed, rank, ranks):
    """Train to the end, or to the SIGKILL of the parent."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet-{changed['attempt']}", rank=rank,
            world_size=ranks, timeout=timedelta(seconds=60),
        )  # fmt: skip
    watch(pipe, 0.002)
    torch.manual_seed(0)
    x = torch.randn(64, 4) + changed["data"]
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(changed["dropout"]), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=changed["lr"], momentum=0.9)
    ledger = tacit.Ledger(f"{folder}/a.ledger")
    place = Checkpoint(path=f"{folder}/last.pt", lost_steps="pay")
    private = tacit.make_private(
        model, optimizer, (x, y), loss_fn, batch_size=16, steps=STEPS, clip_norm=1.0,
        noise_multiplier=1.0, ledger=ledger, checkpoint=place, seed=changed["seed"],
        speed=Speed(max_microbatch=changed["max_microbatch"], check=False), **options,
    )  # fmt: skip
    for lot in private:
        private.step(lot)
    send(pipe, end=private.steps_taken)


def emptied(pipe):
    found = []
    with suppress(EOFError, OSError):
        while pipe.poll(0):
            found.append(json.loads(pipe.recv_bytes()))
    return found


def killed_child(folder, options, changed, ranks, moment):
    """Start the ranks of one attempt, kill them at `moment`, and return what they reported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tacit.training.make", __name__])
    pipes, children = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        one = context.Process(target=child, args=(there, folder, options, changed, rank, ranks))
        one.start()
        there.close()
        pipes.append(here)
        children.append(one)
    found, deadline = [], time.monotonic() + 120
    while any(one.is_alive() for one in children) and not moment(found):
        assert time.monotonic() < deadline, "the child neither ends nor comes to its moment"
        found += [row for pipe in pipes for row in emptied(pipe)]
        time.sleep(0.0005)
    for one in random.sample(children, ranks):
        one.kill()
    for one in children:
        one.join()
    return found + [row for pipe in pipes for row in emptied(pipe)]


def run_until_done(folder, options, ranks, kills, chance):
    """Kill `kills` children in a row, let the last one finish, and return all reports by child."""
    folder.mkdir(exist_ok=True)
    reports = []
    for attempt in range(kills + 1):
        changed = {
            "attempt": attempt,
            "data": chance.choice([0.0, 0.0, 0.1 * attempt]),
            "dropout": chance.choice([0.1, 0.1, 0.4]),
            "lr": chance.choice([0.1, 0.1, 0.05]),
            "seed": chance.choice([None, None, 7]),
            "max_microbatch": chance.choice([7, 64]),
        }
        releases, writes = chance.randrange(0, 14), chance.randrange(1, 4)
        kind = chance.choice(["after releases", "while it writes", "at the start"])

        def moment(found, kind=kind, releases=releases, writes=writes, last=attempt == kills):
            if last:
                return False
            if kind == "at the start":
                return bool(found)
            name, count = ("words", releases) if kind == "after releases" else ("writes", writes)
            return sum(name in row for row in found) >= count * ranks ** (name == "words")

        reports.append(killed_child(folder, options, changed, ranks, moment))
    return reports


def check(folder, reports, ranks):
    """Raise unless the run is finished and whole, its noise is used once, and all is paid."""
    words: dict[str, set[str]] = {}
    for row in (row for report in reports for row in report if "words" in row):
        words.setdefault(row["words"], set()).add(row["sums"])
    assert all(len(sums) == 1 for sums in words.values()), "noise fell on two sums"
    assert [row["end"] for row in reports[-1] if "end" in row] == [STEPS] * ranks
    for number, report in enumerate(reports):  # no process repeats what another one has drawn
        own = {row["words"] for row in report if "words" in row}
        others = [row["words"] for n, r in enumerate(reports) if n != number
                  for row in r if "words" in row]  # fmt: skip
        assert not own & set(others)
    with tacit.Ledger(folder / "a.ledger") as ledger:
        ledger.verify()
        plans = [ledger.resume(entry.id) for entry in ledger.history()]
        assert sum(plan.taken for plan in plans) >= len(words) >= STEPS
        assert sum(plan.steps for plan in plans) >= STEPS + 2
    assert torch.load(folder / "last.pt", weights_only=True)["private"]["steps_taken"] == STEPS
    assert {path.suffix for path in folder.glob("*last.pt*")} == {".pt"}
    assert not list(folder.glob(".*.part"))
    return sum(any("words" in row or "writes" in row for row in report) for report in reports[:-1])


CASES = {
    "plain": (PLAIN, 1),
    "banded": (BANDED, 1),
    "plain, two ranks": (PLAIN, 2),
    "banded, two ranks": (BANDED, 2),
}


@pytest.mark.parametrize("name", ["plain", "banded, two ranks"])
def test_killed_runs_resume_with_other_noise_and_pay(tmp_path, name):
    options, ranks = CASES[name]
    reports = run_until_done(tmp_path / "run", options, ranks, 3, random.Random(name))
    assert check(tmp_path / "run", reports, ranks) == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_children_are_killed(tmp_path, name, number):
    """Five kills in each of twenty runs; false alarms have no chance, as words are of 256 bits."""
    options, ranks = CASES[name]
    chance = random.Random(f"{name} {number} {os.environ.get('TACIT_TEST_SEED', '')}")
    reports = run_until_done(tmp_path / "run", options, ranks, 5, chance)
    assert check(tmp_path / "run", reports, ranks) == 5
