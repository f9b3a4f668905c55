"""Which layer lets one example see another? Names it, once the probe has found that one does.

Run the model on a batch and on the same batch with its second example changed. A layer mixes if the
first example goes into it unchanged and comes out changed; the deepest such layer is the culprit.
If there is none, the loss itself mixes (contrastive losses, means over the batch).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Same = Callable[[Tensor, Tensor], bool]
_First = list[Tensor]  # the first example's share of the tensors that went in or came out


def where_it_mixes(
    model: nn.Module, forward: Callable[[Any], Any], batch: Any, changed: Any, same: Same
) -> str:
    """The place that mixes, in words. `forward(batch)` runs the model (and the loss).

    Private values are compared, never shown: the answer depends on the model's structure.
    """
    before, after = _trace(model, forward, batch), _trace(model, forward, changed)
    names = {layer: name for name, layer in model.named_modules()}
    # Layers end in the same order both times, inner ones before those that hold them.
    for (layer, into, out), (_, into_too, out_too) in zip(before, after, strict=False):
        if _equal(into, into_too, same) and not _equal(out, out_too, same):
            if layer is model:
                return f"It happens in the forward of {type(model).__name__} itself."
            return f"It happens in {names[layer]} ({type(layer).__name__})."
    return "It happens after the model: in loss_fn."


def _trace(
    model: nn.Module, forward: Callable[[Any], Any], batch: Any
) -> list[tuple[nn.Module, _First, _First]]:
    seen: list[tuple[nn.Module, _First, _First]] = []

    def look(layer: nn.Module, args: Any, options: Any, out: Any) -> None:
        seen.append((layer, _first_rows((args, options)), _first_rows(out)))

    hooks = [
        layer.register_forward_hook(look, with_kwargs=True)
        for layer in model.modules()
        if not isinstance(layer, nn.ModuleList | nn.ModuleDict)  # never called
    ]
    try:
        with torch.no_grad():
            torch.manual_seed(1)  # the same dropout both times; the caller keeps the outer stream
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _first_rows(values: Any) -> _First:  # Any: what layers take and give
    if isinstance(values, Tensor):
        return [values[:1].detach()] if values.dim() else []
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, tuple | list):
        return [row for value in values for row in _first_rows(value)]
    return []


def _equal(a: _First, b: _First, same: Same) -> bool:
    return len(a) == len(b) and all(map(same, a, b))
