"""Clipped sums of one example at a time: what the traced program must equal."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tacit.training import record_loop
from tacit.training.automatic_clipping import Automatic
from tacit.training.clip import Clip, ClippedSum, trainable
from tacit.training.examples import Examples
from tacit.training.gpu.compiled import CompiledSum
from tacit.training.program import start
from tacit.training.program.programs import Programs
from tacit.training.tree import n_rows


def alone(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,  # as `loss_fn` takes it
    clip: Clip,
    *,
    weights: Tensor | None = None,
    augmentations: int = 1,
    bounded: bool = False,
) -> ClippedSum:
    """Return the sum by the library's loop over records."""
    n = n_rows(batch) // augmentations
    mask = torch.ones(n, dtype=torch.bool) if weights is None else weights > 0
    return record_loop.run(Examples(model, loss_fn, batch, mask, augmentations, bounded), clip)


class _OnUse(Programs):
    """Programs that are traced for a shape when it is first used."""

    def program_of(self, batch: Any) -> Any:
        self.prepare(batch)
        return super().program_of(batch)


def compiled_sum(
    model: nn.Module, loss_fn: Callable[..., Tensor], clip: Clip, **options: Any
) -> CompiledSum:
    """Return the compiled sum of a program that was not set up by a run."""
    programs = _OnUse(model, loss_fn, options.get("augmentations", 1))
    return CompiledSum(model, loss_fn, clip, programs, **options)


@contextmanager
def set_up(way: Literal["traced", "alone"]) -> Iterator[None]:
    """Let the runs that are made in this context sum their lots in one of the two ways."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if way == "alone":
            patch.setattr(start, "_why_untraceable", lambda *_, **__: "it shall not")
            warnings.filterwarnings("ignore", message=".*it shall not.*")
        yield


def looped(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: tuple[Tensor, ...],
    clip: Clip,
    *,
    weights: Tensor | None = None,
    augmentations: int = 1,
) -> dict[str, Tensor]:
    """Return the sum by its definition in float64; a non-finite gradient counts as zero."""
    double = copy.deepcopy(model).double()
    parameters = trainable(double)
    groups = clip.groups(list(parameters))
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(len(batch[0]) // augmentations):
        if weights is not None and not weights[i]:
            continue
        rows = slice(i * augmentations, (i + 1) * augmentations)
        one = tuple(t[rows].double() if t.is_floating_point() else t[rows] for t in batch)
        gradient = _gradient(loss_fn(double, one).mean(), parameters)
        if not all(bool(torch.isfinite(g).all()) for g in gradient.values()):
            continue
        for group, bound in zip(groups, clip.clip_norms, strict=True):
            norm = math.sqrt(sum(float(gradient[name].square().sum()) for name in group))
            for name in group:
                total[name] += _factor(clip, norm, bound) * gradient[name]
    return {name: value.detach() for name, value in total.items()}


def _gradient(loss: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def _factor(clip: Clip, norm: float, bound: float) -> float:
    if isinstance(clip, Automatic):
        return bound / (norm + clip.stability)
    return min(1.0, bound / norm) if norm else 1.0


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the whole vector, in the L2 norm."""
    difference = sum(float((found[k].double() - v).square().sum()) for k, v in expected.items())
    return math.sqrt(difference) / norm_of(expected)


def norm_of(sums: dict[str, Tensor]) -> float:
    """L2 norm of the whole vector."""
    return math.sqrt(sum(float(v.double().square().sum()) for v in sums.values()))
