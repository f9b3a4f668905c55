"""What a run with `engine="program"` does before anything is paid: trace, compare, choose.

The program of one example is traced for every shape that a record can have. If it cannot be traced,
the user's own Python code runs instead, on one record at a time. Either way the program is compared
with `loss_fn` on synthetic records (`comparison`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip, ClippedSum
from tacit.training.distributed import gathered
from tacit.training.engines import loop
from tacit.training.engines.examples import Examples, losses_of, views_one_by_one
from tacit.training.program import mapped
from tacit.training.program.one_example import OneExample, Untraceable
from tacit.training.program.programs import Programs
from tacit.training.tree import Batch, LossFn, map_tensors

BY_CONSTRUCTION = "by construction: one traced program per example"
ONE_AT_A_TIME = "one record at a time"


class Started(NamedTuple):
    """How a lot is summed: by traced programs, or record by record if `programs` is None."""

    engine: Callable[[Examples, Clip], ClippedSum]
    programs: Programs | None
    statement: str
    bytes_of_example: int


def start(
    model: nn.Module,
    loss_fn: LossFn,
    blanks: Sequence[Batch],
    clip: Clip,
    *,
    views: int,
    augment: Callable[[Batch], Batch] | None,
    bounded: bool,
    check: bool,
) -> Started:
    """Trace the program of one example, and compare it with `loss_fn` on synthetic records.

    `blanks` are batches of one record for each shape that a record can have. Nothing depends on
    other values of theirs, or on the data.
    """
    zeros = [map_tensors(torch.zeros_like, views_one_by_one(b, views, augment)) for b in blanks]
    with gathered(model):
        programs = Programs(model, loss_fn, views)
        for blank in zeros:
            _trace(programs, blank)
    needed = max(_bytes_of(programs.program_of(blank)) for blank in zeros)
    return Started(partial(mapped.run, programs=programs), programs, BY_CONSTRUCTION, needed)


def _trace(programs: Programs, blank: Batch) -> None:
    """Trace the program for one shape; raise `Untraceable`, or the error that the program has."""
    try:
        programs.prepare(blank)
    except IncompatibleModel:
        raise
    except Exception as error:
        # An error that tracing has nothing to do with is the program's own.
        losses_of(programs.loss_fn, programs.model, blank, programs.views)
        raise Untraceable(_reason(error)) from None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}"


def _bytes_of(program: OneExample) -> int:
    """Return the bytes of all results of a program's operators, for one example."""
    sizes = (node.meta.get("val") for node in program.graph.graph.nodes if node.op != "placeholder")
    return sum(
        math.prod(value.shape) * value.element_size()
        for value in sizes
        if isinstance(value, Tensor)
    )
