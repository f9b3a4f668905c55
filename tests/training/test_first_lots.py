"""What the first lot sets for good is found, wherever the program keeps it."""

import socket
import sys
import time

import first_lot_cases  # noqa: F401  # registers its cases
import numpy as np
import pytest
import torch
from mixing_cases import CASES
from slow_cases import one_fast

import tacit
from tacit.errors import IncompatibleModel
from tacit.training.first_lots import FirstLots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies of processes need Linux")


@pytest.mark.parametrize("name", one_fast([n for n in CASES if "_of_the_first_" in n], 3))
def test_what_the_first_lot_sets_is_refused_wherever_it_is_kept(name):
    case = CASES[name]()
    with pytest.raises(IncompatibleModel, match="depend on the lot before"):
        tacit.make_private(
            case.model, torch.optim.SGD(case.model.parameters(), lr=0.0), case.dataset,
            case.loss_fn, batch_size=64, steps=2, clip_norm=1.0, noise_multiplier=1.0, seed=0,
        )  # fmt: skip


def first_lots(losses):
    return FirstLots(losses, (losses,))


LOT = np.arange(3)


def test_copies_start_from_the_same_state_and_leave_nothing_here():
    seen = []

    def losses(indices, seed):
        seen.append(int(indices[0]))
        return torch.full((len(indices), 1), float(sum(seen[:2])), dtype=torch.float64), None

    copies = first_lots(losses)
    for start in (5, 7):
        first = np.array([[[start], [10]]])
        assert copies(first, LOT, 0, seconds=30)[0].tolist() == [[start + 10.0]] * 3
    assert seen == []


def test_files_of_the_first_lots_are_put_back(tmp_path):
    """A file that was there before, one that is new, and one that a copy must not find."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("5")

    def losses(indices, seed):
        if not new.exists():
            new.write_text(str(indices[0]))
        value = float(old.read_text()) + float(new.read_text())
        return torch.full((len(indices), 1), value, dtype=torch.float64), None

    copies = first_lots(losses)
    time.sleep(0.02)  # clocks of file systems are coarse
    losses(np.array([100]), 0)
    first = np.array([[[1]], [[2]]])
    found = copies(first, LOT, 0, seconds=30)
    assert [float(f[0, 0]) for f in found] == [6.0, 7.0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]
    assert new.read_text() == "100"


def test_there_is_no_result_for_a_program_that_cannot_run_in_a_copy():
    here, there = socket.socketpair()

    def asking(indices, seed):
        here.send(b"question")
        return torch.zeros(len(indices), 1), None

    def failing(indices, seed):
        raise ValueError("no")

    with here, there:
        there.send(b"message")
        for losses in (asking, failing):
            assert first_lots(losses)(LOT[None, None], LOT, 0, seconds=30) is None
        assert here.recv(7) == b"message"  # the copy did not take it


def test_a_copy_that_hangs_is_ended():
    copies = first_lots(lambda indices, seed: time.sleep(600))
    assert copies(LOT[None, None], LOT, 0, seconds=0.2) is None
    assert copies(LOT[None, None], LOT, 0, seconds=0.2) is None
