"""Does one example see another? Tested on the program as it runs, from the records to the gradient.

The guarantee of DP-SGD needs examples that do not influence each other. `Isolation` runs the user's
program (data set, `collate_fn`, `augment`, model, `loss_fn`) on a lot and on altered copies of it:

- *replaced*: a random half of the rows is replaced by other records, in place;
- *removed*: a random half of the rows is left out;
- *alone*: one row is the whole lot;
- *after*: the same lot follows another one, so that state kept between calls shows;
- *first*: the same lot follows two different first lots, each in a process of its own.

Rows that were kept must keep their loss and their clipped gradient. No altered copy shows every
kind of mixing: only *removed* and *alone* show dependence on the size of the lot, and *replaced* is
best for everything else.

This is a test, not a proof. A check that replaces a random half of the rows separates a given pair
of rows (one kept, the other replaced) with probability at least 1/4. So mixing that occurs in a
share s of the lots passes n checks with probability at most (1 - s/4)^n: see `chance_of_missing`.

Every run gets the same random numbers. Where that cannot be, because a lot of another size or of
other records draws others, the laws of the losses and gradients are compared (`sequential_test`).

A program that keeps examples apart is never refused, whatever the records are, so a refusal reveals
nothing about them; by a comparison of laws, it is refused with probability 10^-9 at most. That
needs a tolerance that rounding cannot reach: it is measured, row by row (`rounding`).
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tacit._check import in_closed_unit
from tacit.errors import IncompatibleModel
from tacit.training.altered_lots import FEW_ROWS, LEAST_ROWS, AlteredLots
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks, gathered
from tacit.training.engines import engine_named
from tacit.training.engines.examples import Examples, as_views, as_written
from tacit.training.first_lots import FirstLots, can_run_first_lots
from tacit.training.key import Key, randomness
from tacit.training.lots import Lot, Lots
from tacit.training.program_state import drawn_so_far
from tacit.training.records import Indices, Records
from tacit.training.rounding import Gradient, as_double
from tacit.training.tree import (
    Batch,
    LossFn,
    check_losses,
    current_device,
    is_out_of_memory,
    with_rows,
)
from tacit.training.withheld_errors import ErrorGuard

T = TypeVar("T")


class Isolation:
    """States how examples were kept apart; by itself it makes no test.

    Attributes
    ----------
    statement
        What a certificate may say.
    next_check
        The step before which the next test is due.
    guard
        Runs the user's program and withholds the text of its errors.
    is_certain
        Whether examples are kept apart by construction, in `Private.step` alone.
    """

    next_check: float = math.inf
    is_certain: bool = False

    def __init__(self, statement: str, *, guard: ErrorGuard, is_certain: bool = False) -> None:
        self._statement = statement
        self.is_certain = is_certain
        self.guard = guard

    @property
    def statement(self) -> str:
        """How it was made sure that no example influences another one."""
        return self._statement

    @property
    def is_void(self) -> bool:
        """Whether examples were seen to influence each other, so that the run has no guarantee."""
        return False

    def chance_of_missing(self, share: float) -> float:
        """Return a bound on the probability that mixing in a share of the lots was not found."""
        return 0.0 if self.is_certain else chance_of_missing(share, 0)

    def check_first(self, rows: int, key: Key, *, usual: Sequence[int]) -> int:  # noqa: ARG002  # for `CheckedIsolation`
        """Raise `IncompatibleModel` if a test before the run fails; here there is none.

        Returns the rows of a lot that fit in memory.
        """
        return rows

    def check_lot(self, lot: Lot, key: Key, ranks: Ranks) -> None:
        """Raise `IncompatibleModel` if a test of this lot fails; here there is none."""


class CheckedIsolation(Isolation):
    """Tests of one program, before its first release and at random steps.

    `checks` counts the altered copies of lots that showed no difference, `halves` those among them
    of which a random half was replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        records: Records,
        clip: Clip,
        *,
        views: int = 1,
        augment: Callable[[Batch], Batch] | None = None,
        engine: str = "auto",
        steps: int = 256,
        guard: ErrorGuard | None = None,
    ) -> None:
        self.guard = ErrorGuard() if guard is None else guard
        self.checks = self.halves = 0
        self.is_double = False
        self.loss_unit = 0.0  # unit of rounding of the losses, known after a run
        self.model, self.loss_fn, self.records, self.clip = model, loss_fn, records, clip
        self.views, self.augment, self.engine = views, augment, engine
        self.roots = (model, loss_fn, augment, *records.program)
        self._gap = max(1, min(80, steps // 4))  # steps between two tests, on average
        self.first_lots: FirstLots | None = None
        self._takes_gradients = False  # whether the program has been seen to
        self._refusal: IncompatibleModel | None = None

    @property
    def statement(self) -> str:
        """How many tests were made, or that one failed."""
        if self.is_void:
            return "examples influence each other: this run has no guarantee"
        return f"tested, {self.checks} checks"

    @property
    def is_void(self) -> bool:
        """Whether a test of this run has failed."""
        return self._refusal is not None

    def chance_of_missing(self, share: float) -> float:
        """Return a bound on the probability that mixing in a share of the lots was not found."""
        return chance_of_missing(share, self.halves)

    def before_the_first_record(self, ranks: Ranks) -> None:
        """Keep a copy of this process, in which the program has seen no record, for `check_first`.

        There is none for programs on a GPU or on several ranks: a copy can use neither.
        """
        if ranks.size == 1 and can_run_first_lots(self.records.device):
            with contextlib.suppress(OSError):  # out of memory or of processes
                self.first_lots = FirstLots(self.losses, self.roots)

    def check_first(self, rows: int, key: Key, *, usual: Sequence[int]) -> int:
        """Check lots of random records, hard, before anything is released.

        The first lot has `rows` rows, the others have the rows that `usual` says, but not more: a
        program may mix at some sizes only. Returns the most rows of a lot for which there was
        memory.
        """
        rng, rows = key.numpy("isolation", 0), max(LEAST_ROWS, rows)
        sizes = np.clip(np.asarray(usual, np.int64), LEAST_ROWS, rows)
        n = len(self.records)
        lots = [rng.choice(n, size, replace=int(size) > n) for size in (rows, *sizes)]
        most = self.guard(self.check, lots, rng)
        self._plan_next(0, key)
        return most

    def check_lot(self, lot: Lot, key: Key, ranks: Ranks) -> None:
        """Check a lot that was drawn, by one altered copy, before the payment of its step.

        Every rank checks its own share; all of them raise if one of them finds mixing. If memory
        runs out, later microbatches of the run are as small as the part that could be checked.
        """
        most = lot.source.limit
        if self._refusal is None:
            rng = key.numpy("isolation", lot.step + 1, part=ranks.rank)
            indices = next((m.indices for m in lot.pending()), np.zeros(0, np.int64))
            indices = self._full(indices, rng)
            try:
                with gathered(self.model), self.guard:
                    fits = _within_memory(
                        lambda n: self._check_once(indices[:n], rng), len(indices)
                    )
                most = fits if fits < len(indices) else most
            except IncompatibleModel as error:
                self._refusal = error
        if ranks.least(int(self._refusal is None)) == 0:
            reason = self._refusal or "examples influence each other on another rank."
            raise IncompatibleModel(
                f"{reason} The releases of this run so far are not covered by its guarantee either."
            ) from None
        lot.source.lower_limit(ranks.least(most))
        self._plan_next(lot.step, key)

    def _check_once(self, indices: Indices, rng: np.random.Generator) -> None:
        trial, number = AlteredLots(self, indices, rng), int(rng.integers(8))
        tests = [trial.replace] * 4 + [trial.replace_gradients, trial.follow]
        tests += [trial.remove, trial.isolate]
        try:
            tests[number]()
        finally:
            trial.state.restore()

    def _plan_next(self, step: int, key: Key) -> None:
        # Geometric gaps: no step is safe from a test, and the steps do not depend on the data.
        gap = key.numpy("next isolation test", step).geometric(1 / self._gap)
        self.next_check = step + int(gap)

    def check(self, lots: Sequence[Indices], rng: np.random.Generator) -> int:
        """Raise `IncompatibleModel` if rows of these lots influence each other. Private.

        The first lot goes through every test. The others go through those that can miss by chance:
        a program may mix in some lots only, because of their records, their sizes or its random
        numbers. `rng` chooses which rows are replaced and by which records; it must be independent
        of the data. Returns the most rows of a lot for which there was memory.
        """
        rows = max(map(len, lots))
        try:
            with gathered(self.model):
                return _within_memory(lambda n: self._check([lot[:n] for lot in lots], rng), rows)
        finally:
            self.first_lots = None

    def _check(self, lots: Sequence[Indices], rng: np.random.Generator) -> None:
        self.checks = self.halves = 0
        began = time.monotonic()
        trial = AlteredLots(self, lots[0], rng, is_thorough=True)
        try:
            trial.replace()
            trial.isolate()
            trial.keep_shortest()
            trial.follow()
            trial.remove()
            trial.warm_up()
            trial.follow_by_gradients()
            trial.replace_gradients()
            trial.remove_gradients()
            for number, lot in enumerate(lots[1:]):
                trial.begin(lot)
                trial.replace()
                trial.isolate(rows=1 if number % 2 else 8)
                trial.keep_shortest()
                if number >= _WHOLE_LOOKS_AT_GRADIENTS:
                    trial.begin(lot[:FEW_ROWS], is_part=True)
                trial.replace_gradients()
            trial.begin(lots[0][:FEW_ROWS], is_part=True)
            trial.follow_first_lots(seconds=3 + time.monotonic() - began)
        finally:
            trial.state.restore()

    def _full(self, lot: Indices, rng: np.random.Generator) -> Indices:
        """Return the lot, filled up to four rows: an empty draw shows nothing."""
        if len(lot) >= LEAST_ROWS:
            return lot
        others = rng.choice(len(self.records), min(8, len(self.records)), replace=False)
        return np.resize(np.concatenate([lot, others[~np.isin(others, lot)]]), LEAST_ROWS)

    def losses(self, indices: Indices, seed: int) -> tuple[Tensor, list[Any]]:
        """Run the program on these records and return losses (rows, views). Private.

        The state of the global random generators afterwards is returned as well: two runs that
        drew equally many numbers end in the same state.
        """
        device = self.records.device
        with randomness(seed, device), torch.enable_grad(), as_written():
            losses = self.loss_fn(self.model, self.batch(indices))
            check_losses(losses, len(indices) * self.views)
            self.loss_unit = torch.finfo(losses.dtype).eps
            return losses.detach().double().view(len(indices), self.views), drawn_so_far(device)

    def without_graph(self, run: Callable[[], T]) -> T:
        """Return `run()`, in which autograd saves nothing for a backward pass that never comes.

        Losses then need the memory of a forward pass alone. A program that takes gradients itself
        needs what was saved, so `run` is called again, as it is; `run` puts the state back first.
        """
        if not self._takes_gradients:
            nothing = _NothingSaved()
            try:
                with nothing:
                    found = run()
                if not nothing.was_needed:
                    return found
            except Exception as error:  # whatever else is wrong shows again
                if is_out_of_memory(error):
                    raise
            self._takes_gradients = True
        return run()

    def gradient(self, indices: Indices, seed: int, count: Indices) -> Gradient:
        """Return the clipped sum over the rows in `count`. Private."""
        is_counted = torch.zeros(len(indices), dtype=torch.bool, device=self.records.device)
        is_counted[torch.from_numpy(count).to(is_counted.device)] = True
        program = self.model, self.loss_fn
        with randomness(seed, self.records.device), current_device(self.records.device):
            batch = self.batch(indices)
            sparse = self.records.device.type == "cpu"
            examples = Examples(*program, batch, is_counted, self.views, sparse=sparse)
            total = engine_named(self.engine)(examples, self.clip)
        return list(total.sums.values())

    def with_double(self, model: nn.Module) -> "CheckedIsolation":
        """Return this program with records in float64 and a `model` in float64."""
        double = copy.copy(self)
        double.model, double.is_double = model, True
        double.roots = (model, *self.roots[1:])
        return double

    def batch(self, indices: Indices) -> Batch:
        """Return these records as the model sees them: fetched, collated, augmented. Private."""
        batch = as_views(self.records.fetch(indices), self.views, self.augment)
        if self.is_double:
            batch = as_double(batch)
        self.shapes = [t.shape for t in with_rows(batch)[0]]
        return batch


def check_first_lots(
    isolation: Isolation, lots: Lots, key: Key, ranks: Ranks, *, rows: int, steps: int
) -> None:
    """Test isolation before a run of `steps` steps, on lots of up to `rows` rows."""
    # Keys of their own, so that lots of the run are not looked at, and no lot twice.
    others = [Key(key.bytes("isolation lot", number, 32)) for number in range(_LOOKS - 1)]
    of_steps = key.numpy("isolation lot", 0, part=1).integers(steps, size=len(others))
    usual = [lots.usual_rows(k, int(step)) for k, step in zip(others, of_steps, strict=True)]
    most = ranks.on_all(lambda: isolation.check_first(rows, key, usual=usual))
    if ranks.least(int(most >= rows)) == 0:  # memory ran out on some rank
        lots.lower_limit(ranks.least(most))


def _within_memory(test: Callable[[int], None], rows: int) -> int:
    """Call `test` with a number of rows, halved until there is memory; return the last one.

    A run halves its microbatches in the same way (`engines.in_halves`).
    """
    while True:
        try:
            test(rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or rows <= LEAST_ROWS:
                raise
        else:
            return rows
        # Outside the except block, whose traceback would keep the failed attempt's tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows = max(LEAST_ROWS, -(-rows // 2))


class _NothingSaved(torch.autograd.graph.saved_tensors_hooks):
    """Lets autograd keep no tensor for the backward pass, and notes if one is asked for."""

    def __init__(self) -> None:
        self.was_needed = False

        def unpack(_: None) -> Tensor:
            self.was_needed = True
            raise RuntimeError("the program takes gradients")

        super().__init__(lambda _: None, unpack)


_LOOKS = 16  # lots tested before the run: mixing in half of all lots is missed once in 2^16 runs
# Lots of which whole gradients are compared, beside the first one; of the others those of few rows.
_WHOLE_LOOKS_AT_GRADIENTS = 4


def chance_of_missing(share: float, checks: int) -> float:
    """Return a bound on the probability that mixing in a share of the lots passes all checks.

    Each check replaces a random half of the rows of one lot.

    >>> round(chance_of_missing(1.0, 10), 3)
    0.056
    """
    return (1 - in_closed_unit(share=share) / 4) ** checks
