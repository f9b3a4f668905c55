"""Does one example see another? Tested on the program as it runs, from the records to the gradient.

The guarantee of DP-SGD needs examples that do not influence each other. `Isolation` runs the user's
program (data set, `collate_fn`, `augment`, model, `loss_fn`) on a lot and on altered copies of it:

- *replaced*: a random half of the rows is replaced by other records, in place;
- *removed*: a random half of the rows is left out;
- *alone*: one row is the whole lot;
- *after*: the same lot follows another one, so that state kept between calls shows.

Rows that were kept must keep their loss and their clipped gradient. No altered copy shows every kind
of mixing: only *removed* and *alone* show dependence on the size of the lot, and *replaced* is best
for everything else.

This is a test, not a proof. A check that replaces a random half of the rows separates a given pair
of rows (one kept, the other replaced) with probability at least 1/4. So mixing that occurs in a
share s of the lots passes n checks with probability at most (1 - s/4)^n: see `chance_of_missing`.

A program that keeps examples apart is never refused, whatever the records are, so a refusal reveals
nothing about them. That needs a tolerance that rounding cannot reach: it is measured, by how much
the results move when the parameters move by one unit of rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip
from tacit.training.clipping import clipped_sum
from tacit.training.engines.batch import as_written, rounding_of
from tacit.training.program_state import ProgramState, randomness
from tacit.training.records import Batch, Indices, Records, map_tensors

_ROOM = 32.0
"""Difference, in units of measured rounding, that is taken for mixing."""


class Isolation:
    """Checks of one program; `checks` counts those that passed."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Batch], Tensor],
        records: Records,
        clip: Clip,
        *,
        views: int = 1,
        augment: Callable[[Batch], Batch] | None = None,
        engine: str = "auto",
    ) -> None:
        self.checks = 0
        self.model, self.loss_fn, self.records, self.clip = model, loss_fn, records, clip
        self.views, self.augment, self.engine = views, augment, engine
        self.roots = (model, loss_fn, augment, *records.program)

    def check(
        self, lot: Indices, rng: np.random.Generator, *, gradients: bool, halves: int = 1
    ) -> None:
        """Raise `IncompatibleModel` if rows of this lot are seen to influence each other. Private.

        With `gradients`, clipped gradients are compared as well as losses. `rng` chooses which rows
        are replaced and by which records; it must be independent of the data. `halves` random
        halves are replaced, one after the other.
        """
        trial = _Trial(self, self._full(lot, rng), rng, gradients=gradients)
        try:
            for _ in range(halves):
                trial.replace()
            trial.follow()
            if trial.is_deterministic():
                trial.remove()
                trial.isolate()
        finally:
            trial.state.restore()
        self.checks += halves

    def _full(self, lot: Indices, rng: np.random.Generator) -> Indices:
        """Return the lot, filled up to four rows: an empty draw shows nothing."""
        missing = max(0, 4 - len(lot))
        return np.concatenate([lot, rng.integers(len(self.records), size=missing)])

    def losses(self, indices: Indices, seed: int) -> Tensor:
        """Run the program on these records and return losses (rows, views). Private."""
        with randomness(seed, self.records.device), torch.enable_grad(), as_written():
            losses = self.loss_fn(self.model, self.batch(indices))
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
        batch, times = self.records.fetch(indices), self.views
        if times > 1:
            batch = map_tensors(lambda t: t.repeat_interleave(times, 0) if t.dim() else t, batch)
        return batch if self.augment is None else self.augment(batch)


class _Trial:
    """One check: runs of the program on one lot and on altered copies of it, and their comparison.

    Every run starts from the same Python state and the same random numbers.
    """

    def __init__(
        self, program: Isolation, rows: Indices, rng: np.random.Generator, *, gradients: bool
    ) -> None:
        self.program, self.rows, self.rng, self.gradients = program, rows, rng, gradients
        self.seed = int(rng.integers(2**31))
        self.state = ProgramState(*program.roots)
        dtypes = _Dtypes()
        with dtypes:
            self.base = self._losses(rows)
        self.rounding = _Rounding(self, dtypes.unit())
        if gradients:  # engines look at a new program more closely, and call it more often
            self._gradient(rows, np.arange(len(rows)))

    def replace(self) -> None:
        """Replace a random half of the rows by other records, in place."""
        kept, rows = self._half()
        self._require_equal("replaced", self.base[kept], self._losses(rows)[kept])
        if self.gradients:
            before, after = self._gradient(self.rows, kept), self._gradient(rows, kept)
            self._require_close("replaced", before, after, kept)

    def follow(self) -> None:
        """Run the lot after itself, and after a lot of which half of the rows were replaced."""
        _, rows = self._half()
        after_itself = self._losses(self.rows, after=self.rows)
        after_another = self._losses(self.rows, after=rows)
        self._require_equal("after", after_itself, after_another)

    def remove(self) -> None:
        """Leave a random half of the rows out."""
        kept, _ = self._half()
        self._require_equal("removed", self.base[kept], self._losses(self.rows[kept]))
        if self.gradients:
            everything = np.arange(len(kept))
            before = self._gradient(self.rows, kept)
            after = self._gradient(self.rows[kept], everything)
            self._require_close("removed", before, after, kept)

    def isolate(self) -> None:
        """Run one row alone."""
        row = self.rng.integers(len(self.rows), size=1)
        self._require_equal("alone", self.base[row], self._losses(self.rows[row]))

    def is_deterministic(self) -> bool:
        """Return True if the program draws no random numbers, so that lots of two sizes compare."""
        self.state.restore()
        return bool(torch.equal(self.program.losses(self.rows, self.seed + 7), self.base))

    def _half(self) -> tuple[Indices, Indices]:
        """Return a random half of the rows to keep, and the lot with the others replaced."""
        kept = np.sort(self.rng.permutation(len(self.rows))[: -(-len(self.rows) // 2)])
        others = self.rng.integers(len(self.program.records), size=len(self.rows))
        others[kept] = self.rows[kept]
        return kept, others

    def _losses(self, rows: Indices, *, after: Indices | None = None) -> Tensor:
        self.state.restore()
        if after is not None:
            self.program.losses(after, self.seed + 1)
        return self.program.losses(rows, self.seed)

    def _gradient(self, rows: Indices, count: Indices) -> Tensor:
        self.state.restore()
        return self.program.gradient(rows, self.seed, count)

    def _require_equal(self, how: str, a: Tensor, b: Tensor) -> None:
        if bool((torch.isfinite(a) != torch.isfinite(b)).any()):
            raise IncompatibleModel(_REASONS[how])
        difference = _relative(a, b)
        if difference > _ROOM * self.rounding.of_losses(1):
            if difference > _ROOM * self.rounding.of_losses(8):
                raise IncompatibleModel(_REASONS[how])

    def _require_close(self, how: str, a: Tensor, b: Tensor, kept: Indices) -> None:
        difference = float((a - b).norm())
        if difference > _ROOM * self.rounding.of_gradients(kept, 1):
            if difference > _ROOM * self.rounding.of_gradients(kept, 8):
                raise IncompatibleModel(_REASONS[how])


class _Rounding:
    """How far results move when each parameter moves by one unit of rounding, measured."""

    def __init__(self, trial: _Trial, unit: float) -> None:
        self._trial, self._unit = trial, unit
        self._losses: list[float] = []

    def of_losses(self, times: int) -> float:
        """Return the largest relative change of a loss over `times` moves of the parameters."""
        while len(self._losses) < times:
            with self._moved():
                self._losses.append(_relative(self._trial.base, self._trial._losses(self._trial.rows)))
        return max(self._losses)

    def of_gradients(self, kept: Indices, times: int) -> float:
        """Return the largest change of the clipped sum over the rows in `kept`."""
        trial = self._trial
        base, found = trial._gradient(trial.rows, kept), 0.0
        for _ in range(times):
            with self._moved():
                found = max(found, float((trial._gradient(trial.rows, kept) - base).norm()))
        return found

    @contextmanager
    def _moved(self) -> Iterator[None]:
        parameters = [p for p in self._trial.program.model.parameters() if p.is_floating_point()]
        held = [p.detach().clone() for p in parameters]
        try:
            with torch.no_grad():
                for p in parameters:
                    p.mul_(1 + torch.randn_like(p) * max(self._unit, torch.finfo(p.dtype).eps))
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, held, strict=True):
                    p.copy_(value)


class _Dtypes(TorchFunctionMode):
    """Watches in which types a program computes: autocast need not show in its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.seen.add(result.dtype)
        return result

    def unit(self) -> float:
        """Return the coarsest unit of rounding among these types."""
        return max(
            (max(torch.finfo(d).eps, rounding_of(d) / 64) for d in self.seen), default=0.0
        )


def _relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of losses, relative to their size."""
    both = torch.isfinite(a) & torch.isfinite(b)
    if not bool(both.any()):
        return 0.0
    a, b = a[both], b[both]
    return float(((a - b).abs() / (a.abs() + a.abs().mean() + 1e-30)).max())


_REASONS = {
    "replaced": "replaced",
    "removed": "removed",
    "alone": "alone",
    "after": "after",
}


def chance_of_missing(share: float, checks: int) -> float:
    """Return a bound on the probability that mixing in a share of the lots passes all checks.

    >>> round(chance_of_missing(1.0, 10), 3)
    0.056
    """
    return (1 - share / 4) ** checks
