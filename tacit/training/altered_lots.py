"""Runs of a program on one lot and on altered copies of it, and their comparison.

See `isolation` for the tests that are made of them, and `rounding` for what is not mixing.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import IncompatibleModel
from tacit.training.key import randomness
from tacit.training.program_state import ProgramState, drawn_so_far
from tacit.training.records import Indices
from tacit.training.rounding import (
    ROOM,
    Gradient,
    Rounding,
    distance,
    in_double,
    norm_of_difference,
    rounding_unit,
    summary_of,
)
from tacit.training.sequential_test import differ_in_law
from tacit.training.tree import is_out_of_memory

if TYPE_CHECKING:
    from tacit.training.isolation import CheckedIsolation


class AlteredLots:
    """One check: what is run, always from the same Python state and the same random numbers.

    Every run starts from the same Python state and the same random numbers.
    """

    def __init__(
        self,
        program: "CheckedIsolation",
        rows: Indices,
        rng: np.random.Generator,
        *,
        is_thorough: bool = False,
    ) -> None:
        self.program, self.rng = program, rng
        self.is_thorough = is_thorough
        self._earlier = _EARLIER if is_thorough else 1
        self._has_replaced_in_law = self._is_ragged = False
        self._shapes: list[torch.Size] = []
        self.state = ProgramState(*program.roots)
        try:
            self.begin(rows)
        except BaseException:
            self.state.restore()
            raise

    def begin(self, rows: Indices, *, is_part: bool = False) -> None:
        """Run a lot with random numbers that were not used before.

        A lot that `is_part` of one is no full test: it may lack the rows that mix.
        """
        self.rows, self._is_part, self._is_counted = rows, is_part, is_part
        self.seed = int(self.rng.integers(2**31))
        self.state.restore()
        with randomness(self.seed, self.program.records.device):
            global_generators = drawn_so_far(self.program.records.device)
        self._start = [*global_generators, *self.state.generators()]
        with rounding_unit() as unit:
            self.base = self.losses(self.rows)
        self.draws, self._shapes = self._last_draws, self.program.shapes
        self.rounding = Rounding(self, unit())

    def warm_up(self) -> None:
        """Compute a gradient: engines look at a new program closely, and call it more often."""
        self.gradient(self.rows, np.arange(len(self.rows)))

    def replace(self) -> None:
        """Replace a random half of the rows by other records, in place.

        Lots padded to another length run other kernels. If these may round coarsely, a small
        difference says nothing, and another half is replaced.
        """
        for _ in range(_REPETITIONS):
            kept, rows = self._half()
            after = self.losses(rows)[kept]
            if self._is_alike() or self._differ(kept, after, (rows, kept), is_fine=False):
                break
        else:
            return self._passed()
        if _are_equal(self.base[kept], after):
            return self._passed(is_half=True)
        if self.rounding.is_unrepeatable:
            return self._replace_in_law()
        if not self._differ(kept, after, (rows, kept), is_fine=True):
            return self._passed(is_half=True)
        # Random programs cannot be run on clones, which tell mixing from coarse rounding.
        if self._draws_alike() and not (self.is_random() and self.rounding.is_coarse):
            self._refuse("replaced")
        return self._replace_in_law()

    def _replace_in_law(self) -> None:
        """Compare laws of losses: here other rows get other random numbers.

        They do if a record decides how many are drawn, seeds the generators, or if generators
        cannot be put back. Rows before all replaced ones get the same, as a rule. Unless this check
        is thorough, they are compared first, which is cheaper. Laws are compared once in a check,
        since it takes many runs.
        """
        if not self.is_thorough:
            kept = np.arange(len(self.rows) // 2)
            rows = np.concatenate([self.rows[kept], self._others()[len(kept) :]])
            after = self.losses(rows)[kept]
            if _are_equal(self.base[kept], after):
                return
            if not self._differ(kept, after, (rows, kept), is_fine=True):
                return
        if not self._has_replaced_in_law:
            self._has_replaced_in_law = True
            for first, second, kept in self._filled_lots():
                self._compare_laws("replaced", (first, kept), (second, kept))

    def _filled_lots(self) -> Iterator[tuple[Indices, Indices, Indices]]:
        """Yield pairs of lots that share some rows, and the places of these rows.

        One record in place of all others moves a law that averages over the lot the most. The lot
        itself is paired with one that is filled with the record of the largest loss. Then two lots
        are paired that keep the other half and are filled with the records of the smallest and of
        the largest loss. So every row is replaced in one of the pairs.
        """
        by_loss = self._by_loss()
        half, _ = self._half()
        for kept in (half, np.setdiff1d(np.arange(len(self.rows)), half)):
            low, high = (np.full_like(self.rows, record) for record in by_loss[[0, -1]])
            low[kept] = high[kept] = self.rows[kept]
            yield self.rows if kept is half else low, high, kept

    def _compare_laws(
        self, how: str, first: tuple[Indices, Indices], second: tuple[Indices, Indices]
    ) -> None:
        """Refuse if the losses of the same records in two lots have different laws.

        A lot is given with the places of these records in it. Every run has random numbers of its
        own, so it takes many runs.
        """
        slack = self.rounding.slack(8, is_fine=how == "replaced")[first[1]].cpu()
        if differ_in_law(
            lambda: self._random_losses(*first),
            lambda: self._random_losses(*second),
            self.rng,
            slack=slack,
        ):
            raise IncompatibleModel(_REASONS[how])
        self._passed()

    def _compare_laws_of_gradients(self, how: str) -> None:
        """Refuse if the gradient of a few rows changes in law when others are altered.

        Gradients take longer than losses, so it is done with a small part of the lot.
        """
        rows = self.rows[:FEW_ROWS]
        kept = np.arange(-(-len(rows) // 4))
        altered = rows[kept]
        if how == "replaced":
            altered = np.resize(self._others()[:1], len(rows))
            altered[kept] = rows[kept]
        if differ_in_law(
            lambda: self._random_gradient(rows, kept),
            lambda: self._random_gradient(altered, kept),
            self.rng,
            slack=self.rounding.slack_of_gradients(rows, kept, 2, is_fine=how == "replaced"),
        ):
            raise IncompatibleModel(_REASONS[how])
        self._passed()

    def _random_losses(
        self, rows: Indices, kept: Indices, *, after: Indices | None = None
    ) -> Tensor:
        def run() -> Tensor:
            seed = self._reseed()
            if after is not None:
                for number in range(self._earlier):
                    self.program.losses(after, seed + 1 + number)
            return self.program.losses(rows, seed)[0]

        return self.program.without_graph(run)[kept].cpu()

    def _random_gradient(self, rows: Indices, kept: Indices) -> Tensor:
        return summary_of(self.program.gradient(rows, self._reseed(), kept)).cpu()

    def _reseed(self) -> int:
        """Put the state back, give all generators new random numbers, and return their seed."""
        seed = int(self.rng.integers(2**31))
        self.state.restore()
        self.state.seed_generators(seed)
        return seed

    def replace_gradients(self) -> None:
        """Replace a random half of the rows, and compare the clipped gradients of the others."""
        kept, rows = self._half()

        def run(lots: AlteredLots) -> list[Gradient]:
            return [lots.gradient(self.rows, kept), lots.gradient(rows, kept)]

        if not norm_of_difference(*run(self)):
            return self._passed(is_half=True)
        if not self.rounding.is_unrepeatable:
            if not self._are_far(run, kept, is_fine=self._is_alike()):
                return self._passed(is_half=True)
            if self._draws_alike():
                self._refuse("replaced")
        if self.is_thorough and not self._is_part:
            self._compare_laws_of_gradients("replaced")
        return None

    def follow(self) -> None:
        """Run the lot after itself, and after lots of which half of the rows were replaced.

        A thorough test compares several calls, each with random numbers of its own: a program may
        use what it kept in some calls only.
        """
        _, rows = self._half()
        calls = _CALLS if self.is_thorough else _CALLS[:1]
        after_itself, after_another = (self._repeated(lot, calls) for lot in (self.rows, rows))
        for call, *losses in zip(calls, after_itself, after_another, strict=True):
            if not self._seem_different(*losses):
                continue
            self._earlier, seed, self.seed = call - 1, self.seed, self.seed + call
            if self._has_memory(rows):
                self._refuse("after")
            self.seed = seed
            if self.rounding.is_unrepeatable:
                return self._follow_in_law()
        return self._passed()

    def _seem_different(self, a: Tensor, b: Tensor) -> bool:
        """Return whether losses of the lot differ by more than measured rounding."""
        if _are_equal(a, b):
            return False
        is_far = distance(a, b) > self.rounding.slack(8, is_fine=True)
        return bool((is_far | (a.isfinite() != b.isfinite())).any())

    def _repeated(self, before: Indices, calls: Sequence[int]) -> list[Tensor]:
        """Return the losses of the lot in some calls; the lot `before` is run in the others."""
        self.state.restore()
        found = []
        for call in range(1, calls[-1] + 1):
            if call in calls:
                self.state.restore_generators()  # what they draw now is as random as before
                found.append(self.program.losses(self.rows, self.seed + call)[0])
            else:
                self.program.losses(before, self.seed + call)
        return found

    def _follow_in_law(self) -> None:
        """Compare laws of the losses after a lot of the record of the largest loss and another lot.

        That is the lot itself, and one filled with the record of the smallest loss.
        """
        if not self.is_thorough and self.rng.random() >= _SHARE_OF_LAWS:
            return
        low, high = (np.full_like(self.rows, record) for record in self._by_loss()[[0, -1]])
        every, slack = np.arange(len(self.rows)), self.rounding.slack(8, is_fine=True).cpu()
        after_high = functools.partial(self._random_losses, self.rows, every, after=high)
        for other in (low, self.rows):
            after_other = functools.partial(self._random_losses, self.rows, every, after=other)
            if differ_in_law(after_high, after_other, self.rng, slack=slack):
                self._refuse("after")
            self._passed()

    def follow_first_lots(self, *, seconds: float) -> None:
        """Compare the lot after two different first lots: what they set may stay for good."""
        if self.program.first_lots is None:
            return None
        run = functools.partial(
            self.program.first_lots, lot=self.rows, seed=self.seed, seconds=seconds
        )
        records = self.rng.permutation(len(self.program.records))
        first = np.resize(records, (2, _EARLIER, len(self.rows)))
        found = run(list(first))
        if found is None:
            return None
        if not self._seem_different(*found):
            return self._passed()
        again = run(list(first))  # a program that differs by chance is no proof
        if again is not None and all(map(_are_equal, found, again)):
            self._refuse("after")
        return None

    def _by_loss(self) -> Indices:
        """Return the records of the lot, that of the smallest loss first."""
        return self.rows[self.base.nan_to_num().mean(1).argsort().cpu().numpy()]

    def follow_by_gradients(self) -> None:
        """Compare the clipped gradient after the lot itself and after another: losses may hide it.

        Unless the program draws random numbers that the state before decides on, or that cannot be
        put back.
        """
        every = np.arange(len(self.rows))
        _, rows = self._half()

        def run(lots: AlteredLots) -> list[Gradient]:
            return [lots.gradient(self.rows, every, after=lot) for lot in (self.rows, rows)]

        for call in _CALLS_OF_GRADIENTS:
            self._earlier = call - 1
            if not all(self._are_far(run, every, is_fine=True) for _ in range(_PAIRS_OF_GRADIENTS)):
                continue
            if self.rounding.is_unrepeatable or (self.is_random() and not self._draws_alike()):
                return None
            self._refuse("after")
        return self._passed()

    def _has_memory(self, rows: Indices) -> bool:
        """Return whether the lot's losses depend on whether `rows` or the lot itself came before.

        Kernels may round at random, so both are repeated. What earlier records do comes back each
        time, even if the program keeps them where no state can be put back, as in a file.
        """
        pairs = [
            (self.losses(self.rows, after=rows), self.losses(self.rows, after=self.rows))
            for _ in range(_PAIRS)
        ]
        # The first pairs are left out: some libraries choose their kernels in the first runs, and
        # averages that cannot be put back still hold what was run before.
        another, itself = (torch.stack(group) for group in zip(*pairs[3:], strict=True))
        if bool((another.isfinite().all(0) != itself.isfinite().all(0)).any()):
            return True
        between = distance(itself.mean(0), another.mean(0))
        if not bool(between.any()):
            return False
        spreads = [distance(g.mean(0), run) for g in (another, itself) for run in g]
        within = torch.stack([*spreads, self.rounding.after_itself()]).amax(0)
        return bool((between > ROOM * within + self.rounding.of_results).any())

    def remove(self) -> None:
        """Leave a random half of the rows out."""
        kept, _ = self._half()
        after = self.losses(self.rows[kept])
        if _are_equal(self.base[kept], after):
            return self._passed()
        if not self.rounding.is_unrepeatable:
            fewer = (self.rows[kept], np.arange(len(kept)))
            if not self._differ(kept, after, fewer, is_fine=False):
                return self._passed()
            if not self.is_random():
                self._refuse("removed")
        if self.is_thorough or self.rng.random() < _SHARE_OF_LAWS:
            self._remove_in_law()
        return None

    def remove_gradients(self) -> None:
        """Leave a random half of the rows out, and compare the clipped gradients of the others."""
        if self.is_random() or self.rounding.is_unrepeatable:
            return self._compare_laws_of_gradients("removed")
        kept, _ = self._half()

        def run(lots: AlteredLots) -> list[Gradient]:
            fewer = lots.gradient(self.rows[kept], np.arange(len(kept)))
            return [lots.gradient(self.rows, kept), fewer]

        if self._are_far(run, kept, is_fine=False):
            self._refuse("removed")
        return self._passed()

    def _remove_in_law(self) -> None:
        """Leave three rows in four out: laws that depend on the size then differ the most."""
        kept = np.sort(self.rng.permutation(len(self.rows))[: -(-len(self.rows) // 4)])
        places = np.arange(len(kept))
        self._compare_laws("removed", (self.rows, kept), (self.rows[kept], places))

    def isolate(self, *, rows: int = 1) -> None:
        """Run one row alone, or a few of them, half of the lot at most."""
        few = max(1, min(rows, len(self.rows) // 2))
        kept = np.sort(self.rng.permutation(len(self.rows))[:few])
        self._run_without_others(kept, "alone" if few == 1 else "removed")

    def keep_shortest(self) -> None:
        """Leave the longer half of the records out, if lots are padded to several lengths.

        Half of the rows chosen at random nearly always hold a record that is as long as the
        longest, so that their padding stays.
        """
        if not self._is_ragged:
            return
        lengths = self._lengths()
        kept = np.sort(lengths.argsort(kind="stable")[: -(-len(lengths) // 2)])
        if lengths[kept].max() < lengths.max():
            self._run_without_others(kept, "removed")

    def _lengths(self) -> Indices:
        """Return how many numbers each record has when it is collated alone. Private."""
        found = []
        self.state.restore()
        for row in self.rows:
            with randomness(self.seed, self.program.records.device):
                self.program.batch(np.array([row]))
            found.append(sum(shape.numel() for shape in self.program.shapes))
        return np.array(found)

    def _run_without_others(self, kept: Indices, how: str) -> None:
        """Run the rows in `kept` as a lot of their own."""
        after = self.losses(self.rows[kept])
        if _are_equal(self.base[kept], after):
            self._passed()
        elif not self.is_random() and not self.rounding.is_unrepeatable:
            alone = (self.rows[kept], np.arange(len(kept)))
            if self._differ(kept, after, alone, is_fine=False):
                self._refuse(how)
            self._passed()
        elif self.is_random():
            self._in_evaluation(lambda quiet: quiet._run_without_others(kept, how))

    def _in_evaluation(self, test: Callable[["AlteredLots"], None]) -> None:
        """Make a test with all modules in evaluation mode, where dropout draws nothing.

        In training mode fewer rows get other random numbers than in the lot, so losses differ
        whether rows mix or not. Programs that draw in this mode too, or fail in it, are not tested.
        """
        modes = [(module, module.training) for module in self.program.model.modules()]
        try:
            self.program.model.eval()
            try:
                quiet = AlteredLots(self.program, self.rows, self.rng)
            except Exception as error:  # a program need not run in evaluation mode
                if is_out_of_memory(error):
                    raise
                return
            try:
                if not quiet.is_random():
                    test(quiet)
            finally:
                quiet.state.restore()
        finally:
            for module, mode in modes:
                module.training = mode
            self.state.restore()

    def _is_alike(self) -> bool:
        """Return whether the last batch had the shapes of the lot's, or rounding is fine anyway."""
        return self.program.shapes == self._shapes or not self.rounding.is_coarse

    def is_random(self) -> bool:
        """Return whether the lot's run drew random numbers; a lot of another size draws others."""
        return self.draws != self._start

    def _draws_alike(self) -> bool:
        """Return whether lots of other records draw equally many random numbers as this one."""
        if not self.is_random():
            return True
        for _ in range(_LOTS):
            self.losses(self._others())
            if self._last_draws != self.draws:
                return False
        return True

    def _half(self) -> tuple[Indices, Indices]:
        """Return a random half of the rows to keep, and the lot with the others replaced."""
        kept = np.sort(self.rng.permutation(len(self.rows))[: -(-len(self.rows) // 2)])
        others = self._others()
        others[kept] = self.rows[kept]
        return kept, others

    def _others(self) -> Indices:
        """Return other records for all rows: different ones, unless there are few records."""
        records, size = len(self.program.records), len(self.rows)
        if records < 2 * size:
            return self.rng.integers(records, size=size)
        drawn = self.rng.choice(records, 2 * size, replace=False)
        return drawn[~np.isin(drawn, self.rows)][:size]

    def losses(self, rows: Indices, *, after: Indices | None = None) -> Tensor:
        def run() -> tuple[Tensor, list[Any]]:
            self.state.restore()
            if after is not None:
                for number in range(self._earlier):
                    self.program.losses(after, self.seed + 1 + number)
                self.state.restore_generators()  # what they draw later is as random as before
            return self.program.losses(rows, self.seed)

        found, draws = self.program.without_graph(run)
        self._last_draws = [*draws, *self.state.generators()]
        of_rows, usual = ([shape[1:] for shape in s] for s in (self.program.shapes, self._shapes))
        self._is_ragged |= bool(usual) and of_rows != usual
        return found

    def gradient(self, rows: Indices, count: Indices, *, after: Indices | None = None) -> Gradient:
        self.state.restore()
        if after is not None:
            for number in range(self._earlier):
                self.program.gradient(after, self.seed + 1 + number, np.arange(len(after)))
            self.state.restore_generators()
        return self.program.gradient(rows, self.seed, count)

    def _differ(
        self, kept: Indices, after: Tensor, altered: tuple[Indices, Indices], *, is_fine: bool
    ) -> bool:
        """Return whether a loss of the rows in `kept` has moved by more than rounding explains.

        `altered` is the lot that gave the losses `after`, and the places of these rows in it.
        Before a refusal, rounding is measured longer, on clones of the rows that moved the most,
        and the lots are run in float64.
        """
        base = self.base[kept]
        moved = distance(base, after)
        is_lost = torch.isfinite(base) != torch.isfinite(after)
        for times in (1, 8):
            excess = moved - self.rounding.slack(times, is_fine=is_fine)[kept]
            if not bool(((excess > 0) | is_lost).any()):
                return False
        if is_fine and not self.is_random() and not bool(is_lost.any()):
            worst = excess.amax(1).argsort(descending=True)[:_SUSPECTS].cpu().numpy()
            if not any(
                bool((moved[i] > self.rounding.slack_of_clones(int(kept[i]))).any())
                for i in worst
                if bool((excess[i] > 0).any())
            ):
                return False
        moved[is_lost] = torch.inf
        return self._differ_in_double(kept, altered, moved, (excess > 0) | is_lost)

    def _differ_in_double(
        self, kept: Indices, altered: tuple[Indices, Indices], moved: Tensor, is_far: Tensor
    ) -> bool:
        """Return whether losses that have `moved` too far also do so in float64."""

        def run(lots: AlteredLots) -> bool:
            before, after = lots.losses(self.rows)[kept], lots.losses(altered[0])[altered[1]]
            # Losses that are finite in one of the lots only have overflowed, and are compared in
            # full.
            overflow = ROOM * torch.finfo(torch.float32).eps * before.abs()
            limit = torch.where(moved.isfinite(), moved / ROOM, overflow)
            is_lost = torch.isfinite(before) != torch.isfinite(after)
            return bool((((distance(before, after) > limit) | is_lost) & is_far).any())

        return self._is_found_in_double(run)

    def _is_found_in_double(self, run: Callable[["AlteredLots"], bool]) -> bool:
        """Return whether `run` finds a difference in the same program in float64.

        Rounding is 2^29 times smaller there, while mixing stays. A program that cannot be run in
        float64 is taken to mix. One that draws random numbers draws others in float64, and may mix
        by chance, so it is run with several seeds.
        """
        is_copied = False
        try:
            with in_double(self.program.model) as model:
                is_copied = True
                lots = AlteredLots(self.program.with_double(model), self.rows, self.rng)
                for number in range(_SEEDS if self.is_random() else 1):
                    lots.seed = self.seed + number
                    if run(lots):
                        return True
                return False
        except Exception as error:  # the program has types of its own
            if is_copied and is_out_of_memory(error) and len(self.rows) > LEAST_ROWS:
                raise  # fewer rows may fit
            return True

    def _are_far(
        self, run: Callable[["AlteredLots"], list[Gradient]], kept: Indices, *, is_fine: bool
    ) -> bool:
        """Return whether two clipped sums over the rows in `kept` differ by more than rounding."""
        difference = norm_of_difference(*run(self))
        if not difference or not all(
            difference > self.rounding.slack_of_gradients(self.rows, kept, n, is_fine=is_fine)
            for n in (1, 8)
        ):
            return False

        def run_again(lots: AlteredLots) -> bool:
            lots.warm_up()  # or the first gradient would get other random numbers than the second
            return norm_of_difference(*run(lots)) > difference / ROOM

        return self._is_found_in_double(run_again)

    def _refuse(self, how: str) -> None:
        raise IncompatibleModel(_REASONS[how])

    def _passed(self, *, is_half: bool = False) -> None:
        """Count a test; a lot of which random halves were replaced counts once."""
        self.program.checks += 1
        if is_half and not self._is_counted:
            self.program.halves += 1
            self._is_counted = True


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(torch.inf), b.nan_to_num(torch.inf))


_EARLIER = 5  # lots that come before, since a program may keep what it saw for some calls
# Calls of a lot that follows others, among them all remainders when divided by 2, 3 or 4.
_CALLS = (2, 4, 7, 9, 11, 14, 16)
_CALLS_OF_GRADIENTS = (2, 5)
_PAIRS_OF_GRADIENTS = 3  # all of which must differ: some kernels round at random
_REPETITIONS = 4  # halves that are replaced if lots are padded to other lengths
_LOTS = 8  # lots whose numbers of random draws are compared, before a refusal
_PAIRS = 8  # repetitions of a lot after itself and after another one, if they seem to differ
_SEEDS = 8  # of a program that draws random numbers, in float64
_SUSPECTS = 3  # rows whose clones are run before a refusal
FEW_ROWS = 16  # rows of the lots whose gradients are compared in law
LEAST_ROWS = 4  # of a lot that is tested
_SHARE_OF_LAWS = 0.25  # of the tests during a run that leave rows out of random programs
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
