"""Ways to the clipped sum. All give the same value; they differ in cost and in what they take.

An engine is a function `(model, loss_fn, batch, clip, mask, augmentations) -> ClippedSum`, where
`mask` is True for the rows that count. It raises `Unsupported` for a model that it cannot take.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tacit.training.clip_rules import Clip
from tacit.training.engines import vmap
from tacit.training.sums import ClippedSum

Engine = Callable[[nn.Module, Callable[..., Tensor], Any, Clip, Tensor, int], ClippedSum]

ENGINES: dict[str, Engine] = {"vmap": vmap.run}


def engine_named(name: str) -> Engine:
    """The engine of that name; "auto" takes the cheapest that supports the model."""
    if name == "auto":
        return vmap.run
    if name not in ENGINES:
        known = ", ".join(["auto", *ENGINES])
        raise ValueError(f"engine must be one of {known}, got {name!r}.")
    return ENGINES[name]
