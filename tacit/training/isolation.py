"""Does one example see another? Tested on the program as it runs, from the records to the gradient.

The guarantee of DP-SGD needs examples that do not influence each other. `Isolation` runs the user's
program (data set, `collate_fn`, `augment`, model, `loss_fn`) on a lot and on altered copies of it:

- *replaced*: a random half of the rows is replaced by other records, in place;
- *removed*: a random half of the rows is left out;
- *alone*: one row is the whole lot;
- *after*: the same lot follows another one, so that state kept between calls shows.

Rows that were kept must keep their loss and their clipped gradient. No altered copy shows every
kind of mixing: only *removed* and *alone* show dependence on the size of the lot, and *replaced* is
best for everything else.

This is a test, not a proof. A check that replaces a random half of the rows separates a given pair
of rows (one kept, the other replaced) with probability at least 1/4. So mixing that occurs in a
share s of the lots passes n checks with probability at most (1 - s/4)^n: see `chance_of_missing`.

A program that keeps examples apart is never refused, whatever the records are, so a refusal reveals
nothing about them. That needs a tolerance that rounding cannot reach: it is measured, by how much
the results move when the parameters move by one unit of rounding.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks, gathered
from tacit.training.engines import clipped_sum
from tacit.training.engines.examples import as_views, as_written
from tacit.training.key import Key, randomness
from tacit.training.lots import Lot
from tacit.training.mixing import ROOM, moved_parameters, rounding_unit
from tacit.training.program_state import ProgramState
from tacit.training.records import Indices, Records
from tacit.training.tree import Batch, LossFn, check_losses


class Isolation:
    """States how examples were kept apart; by itself it makes no test.

    Attributes
    ----------
    statement
        What a certificate may say.
    next_check
        The step before which the next test is due.
    """

    next_check: float = math.inf

    def __init__(self, statement: str) -> None:
        self._statement = statement

    @property
    def statement(self) -> str:
        """How it was made sure that no example influences another one."""
        return self._statement

    def check_lot(self, lot: Lot, key: Key, ranks: Ranks) -> None:
        """Raise `IncompatibleModel` if a test of this lot fails; here there is none."""


class CheckedIsolation(Isolation):
    """Tests of one program, before its first release and at random steps.

    `checks` counts the altered copies of lots that showed no difference.
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
        gap: int = 64,
    ) -> None:
        self.checks = 0
        self.model, self.loss_fn, self.records, self.clip = model, loss_fn, records, clip
        self.views, self.augment, self.engine = views, augment, engine
        self.roots = (model, loss_fn, augment, *records.program)
        self._gap = gap
        self._refusal: IncompatibleModel | None = None

    @property
    def statement(self) -> str:
        """How many tests were made, or that one failed."""
        if self._refusal is not None:
            return "examples influence each other: this run has no guarantee"
        return f"tested, {self.checks} checks"

    def check_first(self, rows: int, key: Key) -> None:
        """Check a full lot of random records, hard, before anything is released."""
        rng = key.numpy("isolation", 0)
        lot = rng.integers(len(self.records), size=max(4, rows))
        self.check(lot, rng, gradients=True, halves=4)
        self._plan_next(0, key)

    def check_lot(self, lot: Lot, key: Key, ranks: Ranks) -> None:
        """Check a lot that was drawn, by one altered copy, before the payment of its step.

        Every rank checks its own share; all of them raise if one of them finds mixing.
        """
        if self._refusal is None:
            rng = key.numpy("isolation", lot.step + 1, part=ranks.rank)
            indices = next((m.indices for m in lot.pending()), np.zeros(0, np.int64))
            try:
                with gathered(self.model):
                    self._check_once(indices, rng)
            except IncompatibleModel as error:
                self._refusal = error
        if ranks.least(int(self._refusal is None)) == 0:
            reason = self._refusal or "examples influence each other on another rank."
            raise IncompatibleModel(
                f"{reason} The releases of this run so far are not covered by its guarantee either."
            )
        self._plan_next(lot.step, key)

    def _check_once(self, indices: Indices, rng: np.random.Generator) -> None:
        trial = _Trial(self, self._full(indices, rng), rng, gradients=False)
        tests = [trial.replace, trial.replace, trial.follow, trial.remove]
        try:
            tests[int(rng.integers(len(tests)))]()
        finally:
            trial.state.restore()
        self.checks += 1

    def _plan_next(self, step: int, key: Key) -> None:
        # Geometric gaps: no step is safe from a test, and the steps do not depend on the data.
        gap = key.numpy("next isolation test", step).geometric(1 / self._gap)
        self.next_check = step + int(gap)

    def check(
        self, lot: Indices, rng: np.random.Generator, *, gradients: bool, halves: int = 1
    ) -> None:
        """Raise `IncompatibleModel` if rows of this lot are seen to influence each other. Private.

        With `gradients`, clipped gradients are compared as well as losses. `rng` chooses which rows
        are replaced and by which records; it must be independent of the data. `halves` random
        halves are replaced, one after the other.
        """
        with gathered(self.model):
            trial = _Trial(self, self._full(lot, rng), rng, gradients=gradients)
            try:
                for number in range(halves):
                    trial.replace(gradients=gradients and number == 0)
                trial.follow()
                trial.remove()
                trial.isolate()
            finally:
                trial.state.restore()
        self.checks += halves + 3

    def _full(self, lot: Indices, rng: np.random.Generator) -> Indices:
        """Return the lot, filled up to four rows: an empty draw shows nothing."""
        missing = max(0, 4 - len(lot))
        return np.concatenate([lot, rng.integers(len(self.records), size=missing)])

    def losses(self, indices: Indices, seed: int) -> Tensor:
        """Run the program on these records and return losses (rows, views). Private."""
        with randomness(seed, self.records.device), torch.enable_grad(), as_written():
            losses = self.loss_fn(self.model, self.batch(indices))
            check_losses(losses, len(indices) * self.views)
            return losses.detach().double().view(len(indices), self.views)

    def gradient(self, indices: Indices, seed: int, count: Indices) -> Tensor:
        """Return the clipped sum over the rows in `count`, as one flat vector. Private."""
        weights = torch.zeros(len(indices), device=self.records.device)
        weights[torch.from_numpy(count).to(weights.device)] = 1.0
        with randomness(seed, self.records.device):
            total = clipped_sum(
                self.model,
                self.loss_fn,
                self.batch(indices),
                self.clip,
                engine=self.engine,
                weights=weights,
                augmentations=self.views,
            )
        return torch.cat([t.flatten().double() for t in total.sums.values()])

    def batch(self, indices: Indices) -> Batch:
        """Return these records as the model sees them: fetched, collated, augmented. Private."""
        return as_views(self.records.fetch(indices), self.views, self.augment)


class _Trial:
    """One check: runs of the program on one lot and on altered copies of it, and their comparison.

    Every run starts from the same Python state and the same random numbers.
    """

    def __init__(
        self, program: CheckedIsolation, rows: Indices, rng: np.random.Generator, *, gradients: bool
    ) -> None:
        self.program, self.rows, self.rng, self.gradients = program, rows, rng, gradients
        self.seed = int(rng.integers(2**31))
        self._draws: bool | None = None
        self.state = ProgramState(*program.roots)
        with rounding_unit() as unit:
            self.base = self.losses(rows)
        self.rounding = _Rounding(self, unit())
        if gradients:  # engines look at a new program more closely, and call it more often
            self.gradient(rows, np.arange(len(rows)))

    def replace(self, *, gradients: bool = False) -> None:
        """Replace a random half of the rows by other records, in place."""
        kept, rows = self._half()
        self._require_equal("replaced", self.base[kept], self.losses(rows)[kept])
        if gradients:
            before, after = self.gradient(self.rows, kept), self.gradient(rows, kept)
            self._require_close("replaced", before, after, kept)

    def follow(self) -> None:
        """Run the lot after itself, and after a lot of which half of the rows were replaced."""
        _, rows = self._half()
        after_itself = self.losses(self.rows, after=self.rows)
        after_another = self.losses(self.rows, after=rows)
        self._require_equal("after", after_itself, after_another)

    def remove(self) -> None:
        """Leave a random half of the rows out; lots of two sizes compare if nothing is random."""
        if not self._is_deterministic():
            return
        kept, _ = self._half()
        self._require_equal("removed", self.base[kept], self.losses(self.rows[kept]))
        if self.gradients:
            everything = np.arange(len(kept))
            before = self.gradient(self.rows, kept)
            after = self.gradient(self.rows[kept], everything)
            self._require_close("removed", before, after, kept)

    def isolate(self) -> None:
        """Run one row alone."""
        if not self._is_deterministic():
            return
        row = self.rng.integers(len(self.rows), size=1)
        self._require_equal("alone", self.base[row], self.losses(self.rows[row]))

    def _is_deterministic(self) -> bool:
        """Return True if the program draws no random numbers."""
        if self._draws is None:
            self.state.restore()
            other = self.program.losses(self.rows, self.seed + 7)
            self._draws = not torch.equal(other, self.base)
        return not self._draws

    def _half(self) -> tuple[Indices, Indices]:
        """Return a random half of the rows to keep, and the lot with the others replaced."""
        kept = np.sort(self.rng.permutation(len(self.rows))[: -(-len(self.rows) // 2)])
        others = self.rng.integers(len(self.program.records), size=len(self.rows))
        others[kept] = self.rows[kept]
        return kept, others

    def losses(self, rows: Indices, *, after: Indices | None = None) -> Tensor:
        self.state.restore()
        if after is not None:
            self.program.losses(after, self.seed + 1)
        return self.program.losses(rows, self.seed)

    def gradient(self, rows: Indices, count: Indices) -> Tensor:
        self.state.restore()
        return self.program.gradient(rows, self.seed, count)

    def _require_equal(self, how: str, a: Tensor, b: Tensor) -> None:
        if bool((torch.isfinite(a) != torch.isfinite(b)).any()):
            raise IncompatibleModel(_REASONS[how])
        difference = _relative(a, b)
        # Rounding is measured only if there is a difference, and longer before a refusal.
        if difference and all(difference > ROOM * self.rounding.of_losses(n) for n in (1, 8)):
            raise IncompatibleModel(_REASONS[how])

    def _require_close(self, how: str, a: Tensor, b: Tensor, kept: Indices) -> None:
        difference = float((a - b).norm())
        rounding = self.rounding.of_gradients
        if difference and all(difference > ROOM * rounding(kept, n) for n in (1, 8)):
            raise IncompatibleModel(_REASONS[how])


class _Rounding:
    """How far results move when each parameter moves by one unit of rounding, measured."""

    def __init__(self, trial: _Trial, unit: float) -> None:
        self._trial, self._unit = trial, unit
        self._losses: list[float] = []

    def of_losses(self, times: int) -> float:
        """Return the largest relative change of a loss over `times` moves of the parameters."""
        trial = self._trial
        while len(self._losses) < times:
            with moved_parameters(trial.program.model, self._unit):
                self._losses.append(_relative(trial.base, trial.losses(trial.rows)))
        return max(self._losses) + self._unit  # parameters that are zero do not move

    def of_gradients(self, kept: Indices, times: int) -> float:
        """Return the largest change of the clipped sum over the rows in `kept`."""
        trial = self._trial
        base = trial.gradient(trial.rows, kept)
        # A result is rounded itself, and so is a sum of clipped gradients in float32.
        sums = torch.finfo(torch.float32).eps * len(kept) ** 0.5 * trial.program.clip.l2_sensitivity
        found = self._unit * float(base.norm()) + sums
        for _ in range(times):
            with moved_parameters(trial.program.model, self._unit):
                found = max(found, float((trial.gradient(trial.rows, kept) - base).norm()))
        return found


def _relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of losses, relative to their size."""
    both = torch.isfinite(a) & torch.isfinite(b)
    if not bool(both.any()):
        return 0.0
    a, b = a[both], b[both]
    return float(((a - b).abs() / (a.abs() + a.abs().mean() + 1e-30)).max())


_WHERE = (
    "so no example can be clipped alone. Look at the data set, collate_fn, augment, the model and "
    "loss_fn for anything that is computed over several rows (means, norms, sorting, padding to "
    "the longest record, contrastive losses)"
)
_REASONS = {
    "replaced": "the loss or the gradient of an example changes when other examples of its lot are "
    f"replaced, {_WHERE}.",
    "removed": "the loss or the gradient of an example changes when other examples are taken out "
    f"of its lot, {_WHERE}, or divided by the number of examples.",
    "alone": f"the loss of an example changes when it is alone in its lot, {_WHERE}.",
    "after": "the losses of a lot depend on the lot before it: the program keeps records in Python "
    "objects or buffers between calls, so that their influence is not bounded.",
}


def chance_of_missing(share: float, checks: int) -> float:
    """Return a bound on the probability that mixing in a share of the lots passes all checks.

    >>> round(chance_of_missing(1.0, 10), 3)
    0.056
    """
    return (1 - share / 4) ** checks
