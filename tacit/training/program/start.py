"""What a run does before anything is paid: trace, compare, choose.

The program of one example is traced for every shape that a record can have. If it cannot be traced,
the user's own Python code runs instead, on one record at a time. Either way the program is compared
with `loss_fn` on synthetic records (`comparison`).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from tacit._slow import told_if_slow
from tacit.errors import IncompatibleModel
from tacit.training import record_loop
from tacit.training.clip import Clip, ClippedSum
from tacit.training.distributed import gathered
from tacit.training.examples import Examples, as_views, losses_of, views_one_by_one
from tacit.training.key import randomness
from tacit.training.memory_limit import starting_limit
from tacit.training.one_by_one import random_like
from tacit.training.program import mapped
from tacit.training.program.comparison import (
    EXAMPLES,
    Comparison,
    in_double,
    random_lot,
    require_same_alone,
    resampled_like,
)
from tacit.training.program.one_example import OneExample, Untraceable
from tacit.training.program.pad_to import PadTo
from tacit.training.program.programs import Programs
from tacit.training.program.tensor_values import where
from tacit.training.tree import (
    CALLED_AS,
    Batch,
    LossFn,
    current_device,
    is_out_of_memory,
    map_tensors,
    n_rows,
    take_rows,
)

if TYPE_CHECKING:
    from tacit.training.records import Records

BY_CONSTRUCTION = "by construction: one traced program per example"
ONE_AT_A_TIME = "one record at a time"
_FAILS_ALONE = (
    "loss_fn runs on a lot, but not on one example: something in it needs several examples, such "
    "as a statistic over the batch, or loses their axis, such as squeeze(). It fails"
)
_KEEPS = (
    "loss_fn fails when it is called again. It seems to keep a value of one call for the next "
    "where it cannot be found, such as in a generator or a context variable. The error is raised"
)
_MOST = 64  # examples in the comparison of a lot of usual size


class Started(NamedTuple):
    """How a lot is summed: by traced programs, or record by record if `programs` is None."""

    engine: Callable[[Examples, Clip], ClippedSum]
    programs: Programs | None
    statement: str
    bytes_of_example: int
    blank: Batch  # an example of zeros, of the largest shape


def start(
    model: nn.Module,
    loss_fn: LossFn,
    records: "Records",
    augment: Callable[[Batch], Batch] | None,
    clip: Clip,
    *,
    views: int,
    bounded: bool,
    usual: int,
    check: bool,
) -> Started:
    """Trace the program of one example, and compare it with `loss_fn` on synthetic records.

    Of the records, only the shapes are used. `usual` is the size of a lot.
    """
    blanks, device, private = records.blanks(), records.device, records.tensors
    zeros = [map_tensors(torch.zeros_like, views_one_by_one(b, views, augment)) for b in blanks]
    if check:
        _compare_what_comes_before(records, blanks[0], views, augment)
    with gathered(model), randomness(0, device), current_device(device):
        comparison = Comparison(model, loss_fn, views, in_double(model) if check else None)
        lot = comparison.synthetic(zeros[0])
        comparison.begin()
        programs = Programs(model, loss_fn, views, private=private)
        with told_if_slow("tracing the program of one example"):
            reason = _why_untraceable(programs, zeros, lot, has_run=comparison.has_run)
        try:
            if check:
                comparison.require_same_meaning(lot)
            engine = _TracedEngine(programs)
            if not reason and check and programs.can_be_repeated:
                reason = comparison.why_not_the_program(engine, clip, lot, bounded=bounded)
            if reason or (check and programs.can_be_repeated):
                comparison.require_no_memory(lot, is_traced=not reason)
            needed = 1 if reason else max(_bytes_of(programs.program_of(b)) for b in zeros)
            rows = min(usual, starting_limit(needed, device, largest_lot=_MOST))
            if check and rows > EXAMPLES:
                losses = None if reason else engine.losses
                comparison.require_usual_size(losses, clip, lot, rows)
            if reason:
                _warn(reason, comparison.cost_of_loop(clip, lot))
                return Started(record_loop.run, None, ONE_AT_A_TIME, needed, zeros[-1])
            return Started(engine.run, programs, BY_CONSTRUCTION, needed, zeros[-1])
        except (IncompatibleModel, Warning):  # a warning, if warnings are errors
            raise
        except Exception as error:
            if is_out_of_memory(error) or not comparison.has_run:
                raise
            raise IncompatibleModel(f"{_KEEPS}{where(error)}: {error}") from error
        finally:
            comparison.begin()


def _compare_what_comes_before(
    records: "Records", blank: Batch, views: int, augment: Callable[[Batch], Batch] | None
) -> None:
    """Raise `IncompatibleModel` if `collate_fn` or `augment` combines synthetic records."""
    if augment is not None:
        lot = random_lot(blank)
        alone = [take_rows(lot, i, i + 1) for i in range(EXAMPLES)]
        views_of = partial(as_views, views=views, augment=augment)
        require_same_alone("augment", views_of, lot, alone, records.device)
    if records.collate_fn is not None and not isinstance(records.collate_fn, PadTo):
        try:
            synthetic = [random_like(records.first()) for _ in range(EXAMPLES)]
        except TypeError:
            return  # records of other things than numbers
        singles = [[record] for record in synthetic]
        require_same_alone("collate_fn", records.collate_fn, synthetic, singles, records.device)


class _TracedEngine(NamedTuple):
    """The engine that maps traced programs."""

    programs: Programs

    def __call__(self, examples: Examples, clip: Clip) -> ClippedSum:
        self.programs.begin_lot()
        return self.run(examples, clip)

    def losses(self, examples: Examples, clip: Clip) -> Tensor:
        """Return the losses of examples, without their gradients."""
        self.programs.begin_lot()
        try:
            mapped.run(examples, clip, programs=self.programs, seeded=_FirstRecordRead.stop)
        except _FirstRecordRead as seen:
            return seen.losses
        raise AssertionError("a lot has losses")

    def run(self, examples: Examples, clip: Clip) -> ClippedSum:
        """Return the clipped sum of a microbatch of the lot that has begun."""
        return mapped.run(examples, clip, programs=self.programs)


class _FirstRecordRead(Exception):
    """Raised where the backward pass would begin, with the losses of the examples."""

    def __init__(self, losses: Tensor) -> None:
        super().__init__()
        self.losses = losses.detach()

    @classmethod
    def stop(cls, losses: Tensor) -> Tensor:
        raise cls(losses)


def _why_untraceable(
    programs: Programs, blanks: Sequence[Batch], lot: Batch, *, has_run: bool
) -> str:
    """Trace the program for all shapes; return why that is impossible, or "".

    Raises the program's own error if it fails on a synthetic example as well. `has_run` says that
    the whole lot has run before.
    """
    one = take_rows(lot, 0, programs.views)
    for blank in blanks:
        try:
            programs.prepare(blank)
            continue
        except Untraceable as error:
            reason = error.reason
        except IncompatibleModel:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {text}{where(error)}"
        program = programs.loss_fn, programs.model
        if blank is not blanks[0]:
            losses_of(*program, resampled_like(one, blank), programs.views)
            return reason
        try:
            losses_of(*program, one, programs.views)
        except Exception as alone:
            if not has_run:
                if isinstance(alone, TypeError):
                    alone.add_note(CALLED_AS)
                raise
            losses_of(*program, lot, n_rows(lot))
            raise IncompatibleModel(f"{_FAILS_ALONE}{where(alone)}: {alone}") from alone
        return reason
    return ""


def _warn(reason: str, ratio: float) -> None:
    warnings.warn(
        f"The program of one example cannot be traced: {reason}. So records run one at a time, "
        f"which takes about {ratio:.0f} times as long as a plain step.",
        RuntimeWarning,
        stacklevel=6,
    )


def _bytes_of(program: OneExample) -> int:
    """Return the bytes of all results of a program's operators, for one example."""
    sizes = (node.meta.get("val") for node in program.graph.graph.nodes if node.op != "placeholder")
    return sum(
        math.prod(value.shape) * value.element_size()
        for value in sizes
        if isinstance(value, Tensor)
    )
