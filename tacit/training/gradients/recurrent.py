"""Recurrent layers and cells: LSTM (with projection), GRU, RNN; several layers, both directions.

The recurrence is computed step by step, forward and backward, without cuDNN and without vmap.
With z_t the gates before their nonlinearity and dz_t their gradient, the weights have gradients
sum_t dz_t x_t' and sum_t dz_t h_{t-1}': two matrix products over the time steps of an example.

All time steps together are one operation to the compiler, which would otherwise take each by
itself. In a recorded CUDA graph they cost no Python.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Outer, bias_gradient
from tacit.training.gradients.ghost_norm import cudnn_rounds
from tacit.training.gradients.linear import linear
from tacit.training.gradients.site import (
    Declined,
    Layout,
    Operation,
    Site,
    cast,
    without_autocast,
)

State = tuple[Tensor, ...]
StepGradients = tuple[Tensor, Tensor, Tensor | None, State]
"""Of zx, of zh, of the state's first tensor, and of its other ones, before a step."""
# (gradient of the result, result) -> gradient of the argument
sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


class RecurrentCell(Protocol):
    """One time step of a recurrent layer.

    `zx` and `zh` are the terms of the gates (before their nonlinearity) that come from the input
    and from the state. A state is a tuple of tensors.
    """

    @property
    def gates(self) -> int:
        """Width of the gates, in units of the hidden width."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of what `forward` keeps, in the same unit."""
        ...

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        """Return the next state, and the tensors that the backward needs."""
        ...

    def slopes(self, before: State, after: State, kept: State) -> State:
        """Return what `backward` multiplies gradients with, for all time steps at once.

        `before` and `after` are the states before and after each step, and `kept` comes from
        `forward`. Time is the first axis of each tensor.
        """
        ...

    def backward(self, slopes: State, grads: State) -> StepGradients:
        """Return the gradients of `zx`, of `zh` and of the state before a step.

        `grads` are the gradients of the state after the step. The gradient of the state's first
        tensor leaves out the path through `zh`: it is None if that path is the only one.
        """
        ...


class LSTM:
    """Long short-term memory (Hochreiter & Schmidhuber 1997), gates in torch's order i, f, g, o."""

    gates = 4
    widths = (2, 1, 1)

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        z = zx + zh
        width = z.shape[1] // 4
        both = z[:, : 2 * width].sigmoid()
        g, o = z[:, 2 * width : 3 * width].tanh(), z[:, 3 * width :].sigmoid()
        i, f = both.chunk(2, 1)
        c = torch.addcmul(i * g, f, state[1])
        return (o * c.tanh(), c), (both, g, o)

    def slopes(self, before: State, after: State, kept: State) -> State:
        both, g, o = kept
        i, f = both.chunk(2, 2)
        of_c = [sigmoid_backward(g, i), sigmoid_backward(before[1], f), tanh_backward(i, g)]
        tanh_c = after[1].tanh()
        return torch.stack(of_c, 2), sigmoid_backward(tanh_c, o), tanh_backward(o, tanh_c), f

    def backward(self, slopes: State, grads: State) -> StepGradients:
        of_c, of_h, of_tanh, f = slopes
        dh, dc = grads
        dc = torch.addcmul(dc, dh, of_tanh)
        gates = torch.cat([of_c * dc.unsqueeze(1), (dh * of_h).unsqueeze(1)], 1)
        dz = gates.flatten(1)
        return dz, dz, None, (dc * f,)


class GRU:
    """Gated recurrent unit (Cho et al. 2014) in torch's form, gates in the order r, u, n."""

    gates = 3
    widths = (2, 1, 1)

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        (xr, xu, xn), (hr, hu, hn) = zx.chunk(3, 1), zh.chunk(3, 1)
        r, u = (xr + hr).sigmoid(), (xu + hu).sigmoid()
        n = (xn + r * hn).tanh()
        return (n + u * (state[0] - n),), (torch.cat([r, u], 1), n, hn)

    def slopes(self, before: State, after: State, kept: State) -> State:
        del after
        both, n, hn = kept
        r, u = both.chunk(2, 2)
        of_n = tanh_backward(1 - u, n)
        shared = [sigmoid_backward(of_n * hn, r), sigmoid_backward(before[0] - n, u)]
        return torch.stack([*shared, of_n], 2), torch.stack([*shared, of_n * r], 2), u

    def backward(self, slopes: State, grads: State) -> StepGradients:
        of_x, of_h, u = slopes
        dh = grads[0].unsqueeze(1)
        return (of_x * dh).flatten(1), (of_h * dh).flatten(1), grads[0] * u, ()


class RNN:
    """Elman network: the state is tanh or relu of the sum of input and state terms."""

    gates = 1
    widths = ()

    def __init__(self, nonlinearity: str) -> None:
        self.is_tanh = nonlinearity == "tanh"

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        del state
        z = zx + zh
        return (z.tanh() if self.is_tanh else z.relu(),), ()

    def slopes(self, before: State, after: State, kept: State) -> State:
        del before, kept
        (h,) = after
        return (tanh_backward(torch.ones_like(h), h) if self.is_tanh else (h > 0).to(h.dtype),)

    def backward(self, slopes: State, grads: State) -> StepGradients:
        dz = grads[0] * slopes[0]
        return dz, dz, None, ()


class LayerWeights(NamedTuple):
    """Parameters of one recurrent layer in one direction; None for those that it does not have."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


class LayerOptions(NamedTuple):
    """Arguments after the parameters in a call of `torch.lstm` or another recurrent function."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


_CELLS: dict[str, RecurrentCell] = {
    "lstm": LSTM(),
    "gru": GRU(),
    "rnn_tanh": RNN("tanh"),
    "rnn_relu": RNN("relu"),
}
# The name of the cell of each of torch's functions, for whole layers and for single steps.
_LAYERS = {getattr(torch, name): name for name in _CELLS}
CELLS = _LAYERS | {getattr(torch, f"{name}_cell"): name for name in _CELLS}


def layers_rule(
    cell: str, site: Site, input: Tensor, hx: Any, params: Any, *options: Any
) -> tuple[Tensor, ...]:
    """Compute `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu`, according to `cell`.

    The backward collects per-example gradients.
    """
    if options and not isinstance(options[0], bool):
        return packed_rule(cell, site, input, hx, params, *options)
    found = _options(input, options)
    layout = site.layout(input)
    if layout is None or layout.dim != (0 if found.batch_first else 1):
        raise Declined
    layout = layout._replace(dim=1)

    def layer(x: Tensor, state: State, weights: LayerWeights, **_: Any) -> tuple[Tensor, ...]:
        operation = _Recurrence(site, cell, layout, weights, len(state))
        return operation.apply(x, *state, *weights)

    return _layers(layer, input, hx, params, found)


def packed_rule(
    cell: str, site: Site, data: Tensor, sizes: Tensor, hx: Any, params: Any, *options: Any
) -> tuple[Tensor, ...]:
    """Compute a recurrent function on a packed sequence, whose examples `site.order` has sorted.

    The sequence is padded, and its examples are put back in the order of the batch.
    """
    sequence = _Packed.of(sizes, site.order, data.device)
    initial = [s.index_select(1, sequence.back) for s in _as_state(hx)]
    is_taken = sequence.active.index_select(1, sequence.back).unsqueeze(2)

    def layer(
        x: Tensor, state: State, weights: LayerWeights, *, is_reversed: bool
    ) -> tuple[Tensor, ...]:
        taken = is_taken.flip(0) if is_reversed else is_taken
        operation = _Recurrence(site, cell, Layout(1), weights, len(state), taken)
        return operation.apply(x, *state, *weights)

    padded = sequence.padded(data)
    output, *final = _layers(layer, padded, initial, params, LayerOptions(*options))
    in_order = [s.index_select(1, sequence.order) for s in (output, *final)]
    return in_order[0][sequence.steps, sequence.places], *in_order[1:]


class _Packed(NamedTuple):
    """How the rows of a packed sequence are arranged."""

    active: Tensor  # (T, rows): whether a row takes the step; rows sorted by length
    steps: Tensor  # for each row of the packed data, its time step
    places: Tensor  # and its place among the sorted rows
    order: Tensor  # the example at each place
    back: Tensor  # the place of each example

    @staticmethod
    def of(sizes: Tensor, order: Tensor | None, device: torch.device) -> "_Packed":
        active = (torch.arange(int(sizes[0])) < sizes.unsqueeze(1)).to(device)
        order = torch.arange(active.shape[1], device=device) if order is None else order
        steps, places = active.nonzero(as_tuple=True)
        return _Packed(active, steps, places, order, order.argsort())

    def padded(self, data: Tensor) -> Tensor:
        """Return packed data as (T, examples, features), with zeros for the steps not taken."""
        empty = data.new_zeros(*self.active.shape, *data.shape[1:])
        return empty.index_put((self.steps, self.places), data).index_select(1, self.back)


def arrangements(
    results: Sequence[Tensor], sizes: Tensor, order: Tensor | None
) -> dict[int, Callable[[Tensor | None], Any]]:
    """Return for each result of a packed call, by id, how to put its examples on the second axis.

    The functions take gradients of the results, or None, in the order of the batch.
    """
    sequence = _Packed.of(sizes, order, results[0].device)

    def of_states(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else gradient.index_select(1, sequence.back)

    def of_outputs(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else sequence.padded(gradient)

    return {id(r): of_states if number else of_outputs for number, r in enumerate(results)}


def _as_state(hx: Any) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def is_packed(function: Any, args: Sequence[Any]) -> bool:
    """Return whether a call is that of a recurrent layer on a packed sequence."""
    return function in _LAYERS and len(args) > 3 and not isinstance(args[3], bool)


# Functions that reorder examples, pack them, or keep the order of packed ones.
_ON_PACKED = frozenset({"index_select", "_pack_padded_sequence", "dropout", *_CELLS})


class PackedOrders:
    """Follows in which order the examples of packed sequences are.

    `pack_padded_sequence` sorts examples by length, with `index_select`, before it packs them.
    """

    def __init__(self) -> None:
        # By the id of a tensor: the tensor, the axis that was reordered, and the order.
        self._orders: dict[int, tuple[ReferenceType[Tensor], int, Tensor]] = {}

    def follow(self, function: Any, args: Any, result: Any) -> None:
        """Look at a call and its result."""
        name = getattr(function, "__name__", "")
        if name not in _ON_PACKED or len(args) < 2:
            return
        axis, order = 0, self.order_of(args[0])
        if name == "index_select":
            axis, order = args[1], args[2] if len(args) > 2 else None
        elif name == "_pack_padded_sequence":
            order = self.order_of(args[0], axis=0 if args[-1] is True else 1)
        found = result[0] if isinstance(result, tuple) else result
        if isinstance(order, Tensor):
            self._orders[id(found)] = ref(found), axis, order

    def order_of(self, data: Tensor, *, axis: int = 0) -> Tensor | None:
        """Return the order of examples on an axis, packed ones on the first; None if unchanged."""
        tensor, at, order = self._orders.get(id(data), (None, 0, None))
        is_known = tensor is not None and tensor() is data and at % data.dim() == axis
        return order if is_known else None


def cell_rule(cell: str, site: Site, input: Tensor, hx: Any, *weights: Any) -> Any:
    """Compute one step of a recurrent cell, as `torch.lstm_cell` does.

    The rule of `linear` computes the two matrix products and collects per-example gradients.
    Autograd differentiates the other operations of the step.
    """
    return _cell_step(_CELLS[cell], partial(linear, site), input, hx, *weights)


def decomposed(function: Any, input: Tensor, hx: Any, params: Any, *options: Any) -> Any:
    """Compute a recurrent layer or cell by plain operations, which vmap can map.

    vmap cannot map torch's own recurrent functions.
    """
    cell = _CELLS[CELLS[function]]
    if function not in _LAYERS:
        return _cell_step(cell, F.linear, input, hx, params, *options)

    def layer(x: Tensor, state: State, weights: LayerWeights, **_: Any) -> tuple[Tensor, ...]:
        zx = F.linear(x, weights.w_ih, weights.b_ih)
        states = _recur(cell, zx, state, weights.w_hh, weights.b_hh, weights.w_hr)[0]
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
    """Compute one step of a cell; `product(x, weight, bias)` computes its two matrix products.

    `hx` is the state before the step, and the result is the state after it.
    """
    state = _as_state(hx)
    zx, zh = product(x, w_ih, b_ih), product(state[0], w_hh, b_hh)
    after = cell.forward(zx, zh, state)[0]
    return after[0] if isinstance(hx, Tensor) else after


def _options(x: Tensor, options: Sequence[Any]) -> LayerOptions:
    if not isinstance(options[0], bool) or x.dim() != 3:
        raise Declined  # packed sequences, or no batch
    return LayerOptions(*options)


def _layers(
    layer: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    options: LayerOptions,
) -> tuple[Tensor, ...]:
    """Run all layers and directions of a recurrent network; return its output and final states.

    `layer(x, state, weights, is_reversed=)` runs one layer in one direction on an input of shape
    (time, rows, features). `hx` holds the initial states.
    """
    initial = _as_state(hx)
    steps = x.transpose(0, 1) if options.batch_first else x
    directions = 2 if options.bidirectional else 1
    weights = list(_weights(params, options.has_biases, options.num_layers * directions))
    finals: list[State] = []
    for level in range(options.num_layers):
        outputs = []
        for direction in range(directions):
            index = level * directions + direction
            seen = steps.flip(0) if direction else steps
            first = tuple(s[index] for s in initial)
            output, *final = layer(seen, first, weights[index], is_reversed=bool(direction))
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
    """One recurrent layer in one direction, over all time steps of a sequence."""

    cell: str
    layout: Layout
    weights: LayerWeights
    count: int  # tensors of the state
    taken: Tensor | None = None  # (T, rows, 1): the steps that each row takes; None for all

    def forward(self, x: Tensor, *tensors: Any) -> tuple[State, list[Any]]:
        weights = LayerWeights(*tensors[self.count :])
        with without_autocast(x):
            x, *state = cast(weights.w_ih.dtype, x, *tensors[: self.count])
            zx = F.linear(x, weights.w_ih, weights.b_ih)
            of_state = weights.w_hh, weights.b_hh, weights.w_hr
            found = _all_steps(self.cell, zx, state, *of_state, self.taken)
        states = found[: self.count]  # each of shape (T + 1, rows, width)
        saved = [x, weights.w_ih, weights.w_hh, weights.w_hr, *found]
        return (states[0][1:], *(s[-1] for s in states)), saved

    def backward(self, saved: Any, needs: Any, *grads: Tensor) -> Sequence[Tensor | None]:
        x, w_ih, w_hh, w_hr, *found = saved
        states = found[: self.count]
        raw = [] if w_hr is None else [found.pop()]
        kept = found[self.count :]
        dx, dz, projected, *state = _all_steps_backward(
            self.cell, grads[0], list(grads[1:]), states, kept, w_hh, w_hr, self.taken
        )
        dz = dz if dz.numel() else dx  # the gates of most cells depend on zx + zh only
        of_x = self._sequences(dx)
        of_h = of_x if dz is dx else self._sequences(dz)
        self._collect(self.weights.w_ih, of_x, x)
        self._collect(self.weights.w_hh, of_h, states[0][:-1])
        for bias, of_gates in ((self.weights.b_ih, of_x), (self.weights.b_hh, of_h)):
            if bias is not None and self.site.is_shared(bias):
                self.site.collect(bias, bias_gradient(of_gates))
        if raw:
            self._collect(self.weights.w_hr, self._sequences(projected), raw[0])
        return dx @ w_ih if needs[0] else None, *state

    def _sequences(self, tensor: Tensor) -> Tensor:
        return self.layout.sequences(tensor, self.site.examples)  # (examples, T, features)

    def _collect(self, weight: Tensor | None, left: Tensor, inputs: Tensor) -> None:
        if weight is not None and self.site.is_shared(weight):
            self.site.collect(weight, Outer(left, self._sequences(inputs)))


def _recur(
    cell: RecurrentCell,
    zx: Tensor,
    state: State,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    taken: Tensor | None = None,
) -> tuple[list[State], list[State], list[Tensor]]:
    """Run a cell over the time steps of zx, of shape (time, rows, gates).

    A row keeps its state in the steps that are not `taken`. Return three lists: the state before
    each step and after the last one; the tensors that each step keeps for the backward; and, if the
    layer has a projection, the outputs before it.
    """
    states, kept, raw = [state], [], []
    for t, z in enumerate(zx):
        after, own = cell.forward(z, F.linear(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            raw.append(after[0])
            after = (F.linear(after[0], w_hr), *after[1:])
        if taken is not None:
            after = tuple(
                torch.where(taken[t], new, old) for new, old in zip(after, state, strict=True)
            )
        state = after
        kept.append(own)
        states.append(state)
    return states, kept, raw


@torch.library.custom_op("tacit::recurrence", mutates_args=())
def _all_steps(
    name: str,
    zx: Tensor,
    state: list[Tensor],
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    taken: Tensor | None,
) -> list[Tensor]:
    """Return what `_recur` returns, each stacked over time: states, kept tensors, raw outputs."""
    with without_autocast(zx), _rounded_as_by_cudnn(zx):
        found = _recur(_CELLS[name], zx, tuple(state), w_hh, b_hh, w_hr, taken)
    states, kept, raw = found
    stacked = [*zip(*states, strict=True), *zip(*kept, strict=True), *([raw] if raw else [])]
    return [torch.stack(list(tensors)) for tensors in stacked]


@_all_steps.register_fake
def _(
    name: str,
    zx: Tensor,
    state: list[Tensor],
    w_hh: Tensor,
    b_hh: Tensor | None,  # noqa: ARG001  # the schema's
    w_hr: Tensor | None,
    taken: Tensor | None,  # noqa: ARG001
) -> list[Tensor]:
    cell, (steps, rows, gates) = _CELLS[name], zx.shape
    hidden = gates // cell.gates
    widths = [*(factor * hidden for factor in cell.widths), *([] if w_hr is None else [hidden])]
    states = [s.new_empty(steps + 1, *s.shape) for s in state]
    return [*states, *(w_hh.new_empty(steps, rows, width) for width in widths)]


@torch.library.custom_op("tacit::recurrence_backward", mutates_args=())
def _all_steps_backward(
    name: str,
    grad: Tensor,
    state: list[Tensor],
    states: list[Tensor],
    kept: list[Tensor],
    w_hh: Tensor,
    w_hr: Tensor | None,
    taken: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of zx, of zh, of the projected outputs, and of the first state.

    `grad` is the gradient of the outputs and `state` that of the last state; the others come from
    `_all_steps`. The gradient of zh is empty if it is that of zx, and the third one if the layer
    has no projection.
    """
    cell = _CELLS[name]
    with without_autocast(grad), _rounded_as_by_cudnn(grad):
        before_and_after = (tuple(s[:-1] for s in states), tuple(s[1:] for s in states))
        slopes = cell.slopes(*before_and_after, tuple(kept))
        dzx, dzh, projected = [], [], []
        earlier = [None, *grad[:-1]]  # gradients of the outputs one step before
        dh, rest = grad[-1] + state[0], tuple(state[1:])
        for t, (before, *own) in reversed(list(enumerate(zip(earlier, *slopes, strict=True)))):
            past: list[Tensor] = []  # gradients of rows that do not take this step
            if taken is not None:
                past = [g.masked_fill(taken[t], 0.0) for g in (dh, *rest)]
                dh, *others = (g.masked_fill(~taken[t], 0.0) for g in (dh, *rest))
                rest = tuple(others)
            if w_hr is not None:
                projected.append(dh)
                dh = dh @ w_hr
            dx, dz, direct, rest = cell.backward(tuple(own), (dh, *rest))
            rest = tuple(map(torch.add, rest, past[1:])) if past else rest
            more = [d for d in (before, direct, *past[:1]) if d is not None]
            dh = torch.addmm(sum(more[1:], more[0]), dz, w_hh) if more else dz @ w_hh
            dzx.append(dx)
            dzh.append(dz)
    if dzx[0] is dzh[0]:
        dzh = []
    of_steps = (torch.stack(d[::-1]) if d else grad.new_empty(0) for d in (dzx, dzh, projected))
    return [*of_steps, *(d.contiguous() for d in (dh, *rest))]


@_all_steps_backward.register_fake
def _(
    name: str,
    grad: Tensor,
    state: list[Tensor],
    states: list[Tensor],  # noqa: ARG001  # the schema's
    kept: list[Tensor],  # noqa: ARG001
    w_hh: Tensor,
    w_hr: Tensor | None,
    taken: Tensor | None,  # noqa: ARG001
) -> list[Tensor]:
    steps, rows, _ = grad.shape
    dzx = grad.new_empty(steps, rows, w_hh.shape[0])
    dzh = torch.empty_like(dzx) if name == "gru" else grad.new_empty(0)
    projected = grad.new_empty(0) if w_hr is None else grad.new_empty(grad.shape)
    return [dzx, dzh, projected, *(s.new_empty(s.shape) for s in state)]


@contextmanager
def _rounded_as_by_cudnn(like: Tensor) -> Iterator[None]:
    """Let matrix products on a GPU round float32 as cuDNN does in torch's own recurrent layers.

    That concerns states and their gradients only. Norms and sums are computed from them elsewhere.
    """
    matmul = torch.backends.cuda.matmul
    try:
        before = matmul.allow_tf32
    except RuntimeError:  # set by newer names, for which torch refuses to answer
        before = True
    if before or not (like.is_cuda and cudnn_rounds()):
        yield
        return
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


RULES = {f: partial(layers_rule if f in _LAYERS else cell_rule, CELLS[f]) for f in CELLS}
