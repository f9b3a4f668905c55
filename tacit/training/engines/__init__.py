"""Ways to the clipped sum. All give the same value; they differ in cost and in what they take.

An engine is a function `(model, loss_fn, batch, clip, mask, augmentations) -> ClippedSum`, where
`mask` is True for the rows that count. It raises `Unsupported` for a model that it cannot take.
"""

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tacit.training.clip import Clip
from tacit.training.engines import bookkeeping, loop, vmap
from tacit.training.gradients.site import Unsupported
from tacit.training.sums import ClippedSum

Engine = Callable[[nn.Module, Callable[..., Tensor], Any, Clip, Tensor, int], ClippedSum]

# Cheapest first; each takes every model the one before it takes.
ENGINES: dict[str, Engine] = {
    "bookkeeping": bookkeeping.run,
    "vmap": vmap.run,
    "loop": loop.run,
}
# By model, then by loss and shapes: where vmap was found to fail.
_looped: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def engine_named(name: str) -> Engine:
    """The engine of that name; "auto" takes the cheapest that supports the model."""
    if name == "auto":
        return _cheapest
    if name not in ENGINES:
        known = ", ".join(["auto", *ENGINES])
        raise ValueError(f"engine must be one of {known}, got {name!r}.")
    return ENGINES[name]


def _cheapest(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    clip: Clip,
    mask: Tensor,
    augmentations: int,
) -> ClippedSum:
    try:
        return bookkeeping.run(model, loss_fn, batch, clip, mask, augmentations)
    except Unsupported:
        key = bookkeeping.signature(model, loss_fn, batch, augmentations)
    looped = _looped.setdefault(model, set())
    if key not in looped:
        try:
            return vmap.run(model, loss_fn, batch, clip, mask, augmentations)
        except Unsupported:
            looped.add(key)
            warnings.warn(
                "This model runs one example at a time: neither a layer rule nor vmap can take it.",
                RuntimeWarning,
                stacklevel=4,
            )
    return loop.run(model, loss_fn, batch, clip, mask, augmentations)
