"""Whose turn it is: which loop over a run is the newest one, and which lot it holds.

Every lot is a step and is used once. Two loops at the same time could release one lot twice.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tacit.training.loops.epochs import note_end
from tacit.training.lots.lots import Lot
from tacit.training.resume.checkpoint import keep
from tacit.training.resume.interrupts import OneStep

if TYPE_CHECKING:
    from tacit.training.private import Private


class Turns:
    """The loops over one run. `lot` is what the newest loop holds; `one_step` admits one step."""

    def __init__(self) -> None:
        self.lot: Lot | None = None
        self.one_step = OneStep()
        self._loop = 0  # number of the newest loop

    def begin(self, run: "Private") -> int:
        """Begin a new loop, end the one before it, and return the new one's number."""
        self.lot = None
        run._release.forget()
        self._loop += 1
        return self._loop

    def lots(self, run: "Private", end: int) -> Iterator[Lot]:
        """Yield the lots of the steps that remain before step `end` to a new loop.

        It must take the step of each before the next.
        """
        mine = self.begin(run)
        note_end(run, end)
        try:
            for lot in run._lots.from_step(run.steps_taken, min(end, run.steps)):
                keep(run)
                self.lot = lot
                yield lot
                if mine != self._loop:
                    raise RuntimeError(
                        "another loop over this run has begun; continue with that one."
                    )
                if run.steps_taken == lot.step:
                    raise RuntimeError(
                        "the last lot was drawn but not used. Every lot is a step, whatever it "
                        "holds: call private.step(batch), or private.backward(), for each before "
                        "the next is fetched."
                    )
        finally:
            if mine == self._loop:  # an older loop holds nothing
                self.lot = None
                run._release.forget()
        run.require_unchanged()
        if run.steps_taken == run.steps:
            keep(run)

    @staticmethod
    def require_next(lot: Lot, run: "Private") -> None:
        """Raise unless `lot` is the one that the next step of `run` is to take."""
        if not isinstance(lot, Lot):
            raise TypeError(
                f"batch must come from `for batch in private`, got {type(lot).__name__}: only lots "
                "that were drawn as billed may be stepped on."
            )
        if (lot.source, lot.key, lot.step) != (run._lots, run._lots.key, run.steps_taken):
            raise ValueError("this lot is of another step or run; each is used once, in order.")
