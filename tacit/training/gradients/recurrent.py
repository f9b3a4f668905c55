"""Recurrent layers and cells: LSTM (with projection), GRU, RNN; several layers, both directions.

The recurrence is computed step by step, forward and backward, without cuDNN and without vmap.
With z_t the gates before their nonlinearity and dz_t their gradient, the weights have gradients
sum_t dz_t x_t' and sum_t dz_t h_{t-1}': two matrix products over the time steps of an example.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Outer
from tacit.training.gradients.linear import bias_gradient, linear
from tacit.training.gradients.site import (
    Declined,
    Layout,
    Operation,
    Site,
    cast,
    without_autocast,
)

State = tuple[Tensor, ...]
# (gradient of the result, result) -> gradient of the argument
sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


class RecurrentCell(Protocol):
    """One time step. `zx` and `zh` are the parts of the gates that come from input and state."""

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        """Return the next state, and the tensors that the backward needs."""
        ...

    def backward(self, saved: State, before: State, grads: State) -> tuple[Tensor, Tensor, State]:
        """Return the gradients of `zx`, of `zh` and of the state before the step.

        The last one leaves out what reaches the state through `zh`.
        """
        ...


class LSTM:
    """Long short-term memory (Hochreiter & Schmidhuber 1997), gates in torch's order i, f, g, o."""

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        i, f, g, o = (zx + zh).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * state[1] + i * g
        tanh_c = c.tanh()
        return (o * tanh_c, c), (i, f, g, o, tanh_c)

    def backward(self, saved: State, before: State, grads: State) -> tuple[Tensor, Tensor, State]:
        i, f, g, o, tanh_c = saved
        dh, dc = grads
        dc = dc + tanh_backward(dh * o, tanh_c)
        di = sigmoid_backward(dc * g, i)
        df = sigmoid_backward(dc * before[1], f)
        dg = tanh_backward(dc * i, g)
        do = sigmoid_backward(dh * tanh_c, o)
        dz = torch.cat([di, df, dg, do], 1)
        return dz, dz, (torch.zeros_like(dh), dc * f)


class GRU:
    """Gated recurrent unit (Cho et al. 2014) in torch's form, gates in the order r, u, n."""

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        (xr, xu, xn), (hr, hu, hn) = zx.chunk(3, 1), zh.chunk(3, 1)
        r, u = (xr + hr).sigmoid(), (xu + hu).sigmoid()
        n = (xn + r * hn).tanh()
        return (n + u * (state[0] - n),), (r, u, n, hn)

    def backward(self, saved: State, before: State, grads: State) -> tuple[Tensor, Tensor, State]:
        r, u, n, hn = saved
        (dh,) = grads
        through = dh * u
        dn = tanh_backward(dh - through, n)
        du = sigmoid_backward(dh * (before[0] - n), u)
        dr = sigmoid_backward(dn * hn, r)
        return torch.cat([dr, du, dn], 1), torch.cat([dr, du, dn * r], 1), (through,)


class RNN:
    """Elman network with tanh or relu."""

    def __init__(self, nonlinearity: str) -> None:
        self.is_tanh = nonlinearity == "tanh"

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        del state
        z = zx + zh
        h = z.tanh() if self.is_tanh else z.relu()
        return (h,), (h,)

    def backward(self, saved: State, before: State, grads: State) -> tuple[Tensor, Tensor, State]:
        del before
        (h,), (dh,) = saved, grads
        dz = tanh_backward(dh, h) if self.is_tanh else dh * (h > 0)
        return dz, dz, (torch.zeros_like(dh),)


class LayerWeights(NamedTuple):
    """Parameters of one layer in one direction; None for those that the layer does not have."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


class LayerOptions(NamedTuple):
    """Arguments after the parameters in a call of torch's recurrent functions."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


# The cell of each of torch's functions, for whole layers and for single steps.
CELLS: dict[Any, RecurrentCell] = {
    torch.lstm: LSTM(),
    torch.gru: GRU(),
    torch.rnn_tanh: RNN("tanh"),
    torch.rnn_relu: RNN("relu"),
    torch.lstm_cell: LSTM(),
    torch.gru_cell: GRU(),
    torch.rnn_tanh_cell: RNN("tanh"),
    torch.rnn_relu_cell: RNN("relu"),
}


def layers_rule(
    cell: RecurrentCell, site: Site, input: Tensor, hx: Any, params: Any, *options: Any
) -> tuple[Tensor, ...]:
    """Compute `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu`, whose cell is given first.

    The backward collects per-example gradients.
    """
    found = _options(input, options)
    layout = site.layout(input)
    if layout is None or layout.dim != (0 if found.batch_first else 1):
        raise Declined
    layout = layout._replace(dim=1)

    def layer(x: Tensor, state: State, weights: LayerWeights) -> tuple[Tensor, ...]:
        operation = _Recurrence(site, cell, layout, weights, len(state))
        return operation.apply(x, *state, *weights)

    return _layers(layer, input, hx, params, found)


def cell_rule(cell: RecurrentCell, site: Site, input: Tensor, hx: Any, *weights: Any) -> Any:
    """Compute `torch.lstm_cell` or another cell; the backward collects per-example gradients.

    The two matrix products of a step go through the rule of `linear`; autograd does the rest.
    """
    return _cell_step(cell, partial(linear, site), input, hx, *weights)


def decomposed(function: Any, input: Tensor, hx: Any, params: Any, *options: Any) -> Any:
    """Compute a recurrent layer or cell by plain operations, which vmap can map.

    vmap cannot map torch's own recurrent functions.
    """
    cell = CELLS[function]
    if isinstance(params, Tensor):
        return _cell_step(cell, F.linear, input, hx, params, *options)

    def layer(x: Tensor, state: State, weights: LayerWeights) -> tuple[Tensor, ...]:
        states, _, _ = _recur(cell, x, state, weights)
        return torch.stack([s[0] for s in states[1:]]), *states[-1]

    return _layers(layer, input, hx, params, _options(input, options))


def _cell_step(
    cell: RecurrentCell,
    product: Callable[..., Tensor],
    x: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Compute one step of a cell, with `product(x, weight, bias)` as the matrix product."""
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    zx, zh = product(x, w_ih, b_ih), product(state[0], w_hh, b_hh)
    after = cell.forward(zx, zh, state)[0]
    return after[0] if isinstance(hx, Tensor) else after


def _options(x: Tensor, options: Sequence[Any]) -> LayerOptions:
    if not isinstance(options[0], bool) or x.dim() != 3:
        raise Declined  # packed sequences, or no batch
    return LayerOptions(*options)


def _layers(
    layer: Callable[[Tensor, State, LayerWeights], tuple[Tensor, ...]],
    x: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    options: LayerOptions,
) -> tuple[Tensor, ...]:
    """Run all layers and directions, each by a call of `layer` on (time, rows, features)."""
    initial = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    steps = x.transpose(0, 1) if options.batch_first else x
    directions = 2 if options.bidirectional else 1
    weights = list(_weights(params, options.has_biases, options.num_layers * directions))
    finals: list[State] = []
    for level in range(options.num_layers):
        outputs = []
        for direction in range(directions):
            index = level * directions + direction
            seen = steps.flip(0) if direction else steps
            output, *final = layer(seen, tuple(s[index] for s in initial), weights[index])
            outputs.append(output.flip(0) if direction else output)
            finals.append(tuple(final))
        steps = torch.cat(outputs, 2) if directions == 2 else outputs[0]
        if options.dropout and options.train and level + 1 < options.num_layers:
            steps = F.dropout(steps, options.dropout)
    output = steps.transpose(0, 1) if options.batch_first else steps
    return output, *(torch.stack(s) for s in zip(*finals, strict=True))


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> Iterator[LayerWeights]:
    size = len(params) // count
    for start in range(0, len(params), size):
        own = list(params[start : start + size])
        biases = (own[2], own[3]) if has_biases else (None, None)
        projection = own[-1] if size == (5 if has_biases else 3) else None
        yield LayerWeights(own[0], own[1], *biases, projection)


@dataclass
class _Recurrence(Operation):
    """One layer in one direction, over all time steps."""

    cell: RecurrentCell
    layout: Layout
    weights: LayerWeights
    count: int  # tensors of the state

    def forward(self, x: Tensor, *tensors: Any) -> tuple[State, list[Any]]:
        weights = LayerWeights(*tensors[self.count :])
        with without_autocast(x):
            x, *state = cast(weights.w_ih.dtype, x, *tensors[: self.count])
            states, kept, raw = _recur(self.cell, x, tuple(state), weights)
        *before, last = states
        outputs = torch.stack([s[0] for s in states[1:]])
        saved = [x, weights.w_ih, weights.w_hh, weights.w_hr, *chain(*before), *chain(*kept), *raw]
        return (outputs, *last), saved

    def backward(self, saved: Any, needs: Any, *grads: Tensor) -> Sequence[Tensor | None]:
        x, w_ih, w_hh, w_hr, *rest = saved
        length = len(x)
        states = _by_step(rest[: length * self.count], length)
        rest = rest[length * self.count :]
        raw = rest[-length:] if w_hr is not None else []
        kept = _by_step(rest[: len(rest) - len(raw)], length)
        output, *state = grads
        dzx, dzh, projected = [], [], []
        for t in reversed(range(length)):
            dh = state[0] + output[t]
            if w_hr is not None:
                projected.append(dh)
                dh = dh @ w_hr
            dx, dz, state = self.cell.backward(kept[t], states[t], (dh, *state[1:]))
            # With a projection, state[0] has the width before it and is not added.
            through = dz @ w_hh
            first = through if w_hr is not None else state[0] + through
            state = [first, *state[1:]]
            dzx.append(dx)
            dzh.append(dz)
        is_one = dzx[0] is dzh[0]  # the gates depend on zx + zh only
        dx = torch.stack(dzx[::-1])  # (T, rows, gates)
        of_x = self._sequences(dx)
        of_h = of_x if is_one else self._sequences(torch.stack(dzh[::-1]))
        self._collect(self.weights.w_ih, of_x, x)
        self._collect(self.weights.w_hh, of_h, torch.stack([s[0] for s in states]))
        for bias, dz in ((self.weights.b_ih, of_x), (self.weights.b_hh, of_h)):
            if bias is not None and self.site.is_shared(bias):
                self.site.collect(bias, bias_gradient(dz))
        if w_hr is not None:
            left = self._sequences(torch.stack(projected[::-1]))
            self._collect(self.weights.w_hr, left, torch.stack(raw))
        return dx @ w_ih if needs[0] else None, *state

    def _sequences(self, tensor: Tensor) -> Tensor:
        return self.layout.sequences(tensor, self.site.examples)  # (examples, T, features)

    def _collect(self, weight: Tensor | None, left: Tensor, inputs: Tensor) -> None:
        if weight is not None and self.site.is_shared(weight):
            self.site.collect(weight, Outer(left, self._sequences(inputs)))


def _recur(
    cell: RecurrentCell, x: Tensor, state: State, weights: LayerWeights
) -> tuple[list[State], list[State], list[Tensor]]:
    """Run a cell over the time steps of x, of shape (time, rows, features).

    Return the state before each step and after the last one, the tensors that each step keeps for
    the backward, and the outputs before a projection, if the layer has one.
    """
    states, kept, raw = [state], [], []
    for zx in F.linear(x, weights.w_ih, weights.b_ih):
        zh = F.linear(state[0], weights.w_hh, weights.b_hh)
        state, own = cell.forward(zx, zh, state)
        if weights.w_hr is not None:
            raw.append(state[0])
            state = (F.linear(state[0], weights.w_hr), *state[1:])
        kept.append(own)
        states.append(state)
    return states, kept, raw


def _by_step(tensors: Sequence[Tensor], steps: int) -> list[State]:
    """Return the tensors of each time step, of which all have the same number."""
    count = len(tensors) // steps
    return [tuple(tensors[t * count : (t + 1) * count]) for t in range(steps)]


_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
RULES = {f: partial(layers_rule if f in _LAYERS else cell_rule, CELLS[f]) for f in CELLS}
