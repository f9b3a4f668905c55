"""Recurrent layers in a traced program: `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells.

vmap cannot map torch's recurrent functions. While a program is traced, `LayerByLayer` takes such a
call apart: each layer in each direction becomes one operator, `LAYER`, and what lies between the
layers (dropout, both directions side by side) ordinary operators. A cell is a layer of one time
step. The rule of `LAYER` is `gradients.recurrent_steps`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_NETWORKS = {getattr(torch, kind): kind for kind in _KINDS}
_CELLS = {getattr(torch, f"{kind}_cell"): kind for kind in _KINDS}


class LayerByLayer(TorchFunctionMode):
    """While it is active, recurrent networks and cells are computed by `LAYER`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in _CELLS and not kwargs:
            return _cell(_CELLS[func], *args)
        if func in _NETWORKS and not kwargs and isinstance(args[3], bool):  # not a packed sequence
            return _network(_NETWORKS[func], *args)
        return func(*args, **(kwargs or {}))


def _cell(kind: str, x: Tensor, hx: Any, *weights: Tensor | None) -> Any:
    h, c = (hx, None) if isinstance(hx, Tensor) else hx
    weights = (*weights, *(None,) * (5 - len(weights)))
    found = LAYER(kind, x.unsqueeze(0), h, c, *weights, False)
    return found[0][0] if c is None else (found[0][0], found[1])


def _network(
    kind: str,
    x: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """Return what `torch.lstm` or another recurrent function returns: outputs and final states."""
    initial = (hx,) if isinstance(hx, Tensor) else hx
    directions = 2 if bidirectional else 1
    size = len(params) // (num_layers * directions)
    steps = x.transpose(0, 1) if batch_first else x
    finals: list[list[Tensor]] = []
    for level in range(num_layers):
        if level and train and dropout:
            steps = F.dropout(steps, dropout)
        outputs = []
        for index in range(level * directions, (level + 1) * directions):
            own: list[Tensor | None] = list(params[index * size : (index + 1) * size])
            if not has_biases:
                own[2:2] = [None, None]
            h, c, *_ = *(s[index] for s in initial), None
            options = *own, *[None] * (5 - len(own)), index % directions == 1
            out, *rest = LAYER(kind, steps, h, c, *options)
            outputs.append(out)
            finals.append([out[0 if index % directions else -1], *rest])
        steps = torch.cat(outputs, 2) if bidirectional else outputs[0]
    output = steps.transpose(0, 1) if batch_first else steps
    return output, *(torch.stack(s) for s in zip(*finals, strict=True))


def layer_by_torch(
    kind: str,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    is_reversed: bool,
) -> list[Tensor]:
    """Return the outputs of one layer in one direction and, of an LSTM, the final cell state."""
    initial = h.unsqueeze(0) if c is None else [h.unsqueeze(0), c.unsqueeze(0)]
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh, w_hr) if w is not None]
    options = b_ih is not None, 1, 0.0, False, False, False
    run = getattr(torch, kind)
    out, _, *rest = run(x.flip(0) if is_reversed else x, initial, weights, *options)
    return [out.flip(0) if is_reversed else out, *(s[0] for s in rest)]


# As an operator it stays whole in a graph: torch's own function is traced step by step.
_operator = torch.library.custom_op("tacit::recurrent_layer", layer_by_torch, mutates_args=())
LAYER = torch.ops.tacit.recurrent_layer.default


@_operator.register_fake
def _(
    kind: str,  # noqa: ARG001  # the schema's
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    states = [x.new_empty(*x.shape[:-1], h.shape[-1])]
    return states if c is None else [*states, c.new_empty(c.shape)]
