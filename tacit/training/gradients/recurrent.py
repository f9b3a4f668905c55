"""Recurrent layers and cells: LSTM (with projection), GRU, RNN; several layers, both directions.

The recurrence is run here step by step, forward and backward, so no cuDNN and no vmap is needed.
With z_t the gates before their nonlinearity and dz_t their gradient, the weights have gradients
sum_t dz_t x_t' and sum_t dz_t h_{t-1}': two matrix products over the time steps of an example.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients.factored import Outer
from tacit.training.gradients.linear import bias_piece, linear
from tacit.training.gradients.site import Declined, Layout, Site, first_order, outside_autocast

State = tuple[Tensor, ...]
# (gradient of the result, result) -> gradient of the argument
sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


class Cell(Protocol):
    """One step: `zx`, `zh` are the input's and the state's share of the gates."""

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        """Next state, and what the backward needs."""
        ...

    def backward(self, saved: State, before: State, grads: State) -> tuple[Tensor, Tensor, State]:
        """Gradients of `zx`, of `zh`, and of the state before, without the share through `zh`."""
        ...


class LSTM:
    """Hochreiter & Schmidhuber 1997; gates in torch's order i, f, g, o."""

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
    """Cho et al. 2014, as torch has it; gates in the order r, u, n."""

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
    """Elman's network with tanh or relu."""

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


class Weights(NamedTuple):
    """Parameters of one layer in one direction; None where it has none."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


class Options(NamedTuple):
    """What follows the parameters in torch's call."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


# By torch's function, for layers and for single steps.
CELLS: dict[Any, Cell] = {
    torch.lstm: LSTM(),
    torch.gru: GRU(),
    torch.rnn_tanh: RNN("tanh"),
    torch.rnn_relu: RNN("relu"),
    torch.lstm_cell: LSTM(),
    torch.gru_cell: GRU(),
    torch.rnn_tanh_cell: RNN("tanh"),
    torch.rnn_relu_cell: RNN("relu"),
}


def layers_rule(function: Any) -> Any:
    """Rule for `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`."""
    cell = CELLS[function]

    def rule(site: Site, input: Tensor, hx: Any, params: Any, *options: Any) -> tuple[Tensor, ...]:
        found = _options(input, options)
        layout = site.layout(input)
        if layout is None or layout.dim != (0 if found.batch_first else 1):
            raise Declined
        layout = layout._replace(dim=1)

        def layer(x: Tensor, state: State, weights: Weights) -> tuple[Tensor, ...]:
            hidden = [None if w is None else w.detach() for w in weights]
            call = (site, cell, layout, weights, len(state))
            return _Recurrence.apply(site.anchor, call, x, *state, *hidden)

        return _layers(layer, input, hx, params, found)

    return rule


def cell_rule(function: Any) -> Any:
    """Rule for `torch.lstm_cell` and its like: autograd does all but the two products."""
    cell = CELLS[function]

    def rule(site: Site, input: Tensor, hx: Any, *weights: Any) -> Any:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        w_ih, w_hh, *biases = weights
        b_ih, b_hh = (*biases, None, None)[:2]
        zx, zh = linear(site, input, w_ih, b_ih), linear(site, state[0], w_hh, b_hh)
        after = cell.forward(zx, zh, state)[0]
        return after[0] if isinstance(hx, Tensor) else after

    return rule


def decomposed(function: Any, input: Tensor, hx: Any, params: Any, *options: Any) -> Any:
    """The same layers or cells in plain operations, which vmap can map; torch's own it cannot."""
    cell = CELLS[function]
    if isinstance(params, Tensor):
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        w_hh, *biases = options
        b_ih, b_hh = (*biases, None, None)[:2]
        zx, zh = F.linear(input, params, b_ih), F.linear(state[0], w_hh, b_hh)
        after = cell.forward(zx, zh, state)[0]
        return after[0] if isinstance(hx, Tensor) else after

    def layer(x: Tensor, state: State, weights: Weights) -> tuple[Tensor, ...]:
        outputs = []
        for zx in F.linear(x, weights.w_ih, weights.b_ih):
            zh = F.linear(state[0], weights.w_hh, weights.b_hh)
            state = cell.forward(zx, zh, state)[0]
            if weights.w_hr is not None:
                state = (F.linear(state[0], weights.w_hr), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs), *state

    return _layers(layer, input, hx, params, _options(input, options))


def _options(x: Tensor, options: Sequence[Any]) -> Options:
    if not isinstance(options[0], bool) or x.dim() != 3:
        raise Declined  # packed sequences, or no batch
    return Options(*options)


def _layers(
    layer: Callable[[Tensor, State, Weights], tuple[Tensor, ...]],
    x: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    options: Options,
) -> tuple[Tensor, ...]:
    """All layers and directions, each run by `layer` on (time, rows, features)."""
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


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> Iterator[Weights]:
    size = len(params) // count
    for start in range(0, len(params), size):
        own = list(params[start : start + size])
        biases = (own[2], own[3]) if has_biases else (None, None)
        projection = own[-1] if size == (5 if has_biases else 3) else None
        yield Weights(own[0], own[1], *biases, projection)


class _Recurrence(torch.autograd.Function):
    """One layer in one direction, over all time steps."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, call: Any, x: Tensor, *tensors: Tensor) -> Any:
        _, cell, _, _, count = call
        w_ih, w_hh, b_ih, b_hh, w_hr = tensors[count:]
        ctx.dtypes = [t.dtype for t in (x, *tensors[:count])]
        ctx.call, ctx.count = call, count
        with outside_autocast(x):
            x = x.to(w_ih.dtype)
            state = tuple(s.to(w_ih.dtype) for s in tensors[:count])
            before, saved, raw = [], [], []
            for zx in F.linear(x, w_ih, b_ih):
                before.append(state)
                state, kept = cell.forward(zx, F.linear(state[0], w_hh, b_hh), state)
                saved.append(kept)
                if w_hr is not None:
                    raw.append(state[0])
                    state = (F.linear(state[0], w_hr), *state[1:])
        ctx.per_step = len(saved[0])
        states = [s for step in before for s in step]
        kept = [s for step in saved for s in step]
        ctx.save_for_backward(x, w_ih, w_hh, w_hr, *states, *kept, *raw)
        outputs = torch.stack([step[0] for step in (*before[1:], state)])
        return outputs, *state

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w_ih, w_hh, w_hr, *rest = ctx.saved_tensors
        site, cell, layout, weights, count = ctx.call
        length = len(x)
        states = [tuple(rest[t * count : (t + 1) * count]) for t in range(length)]
        rest, width = rest[length * count :], ctx.per_step
        saved = [tuple(rest[t * width : (t + 1) * width]) for t in range(length)]
        raw = rest[length * width :]
        output, *state = grads
        dzx, dzh, projected = [], [], []
        for t in reversed(range(length)):
            dh = state[0] + output[t]
            if w_hr is not None:
                projected.append(dh)
                dh = dh @ w_hr
            dx, dz, state = cell.backward(saved[t], states[t], (dh, *state[1:]))
            # With a projection the state before it has another width than dh's share here.
            through = dz @ w_hh
            first = through if w_hr is not None else state[0] + through
            state = [first, *state[1:]]
            dzx.append(dx)
            dzh.append(dz)
        is_one = dzx[0] is dzh[0]  # the gates take their two shares as a sum
        dx = torch.stack(dzx[::-1])  # (T, rows, gates)
        dh = dx if is_one else torch.stack(dzh[::-1])
        before = torch.stack([s[0] for s in states])
        _record(site, layout, (x, before), (dx, dh), weights)
        if w_hr is not None and site.is_shared(weights.w_hr):
            left, right = torch.stack(projected[::-1]), torch.stack(raw)
            _record_matrix(site, weights.w_hr, *_sequences(site, layout, left, right))
        gx = dx @ w_ih if ctx.needs_input_grad[2] else None
        found = [gx, *state]
        found = [g if g is None else g.to(d) for g, d in zip(found, ctx.dtypes, strict=True)]
        return None, None, *found, None, None, None, None, None


def _record(
    site: Site, layout: Layout, inputs: State, grads: tuple[Tensor, Tensor], weights: Weights
) -> None:
    """Records the pieces of the two products, with inputs x_t and h_{t-1}."""
    x, h = _sequences(site, layout, *inputs)
    dx, dh = _sequences(site, layout, *grads)
    _record_matrix(site, weights.w_ih, dx, x)
    _record_matrix(site, weights.w_hh, dh, h)
    for bias, dz in ((weights.b_ih, dx), (weights.b_hh, dh)):
        if bias is not None and site.is_shared(bias):
            site.record(bias, bias_piece(dz))


def _sequences(site: Site, layout: Layout, *tensors: Tensor) -> list[Tensor]:
    """(examples, T, features) of each; the same tensor once."""
    found = {id(t): layout.sequences(t, site.examples) for t in tensors}
    return [found[id(t)] for t in tensors]


def _record_matrix(site: Site, weight: Tensor, left: Tensor, right: Tensor) -> None:
    if site.is_shared(weight):
        site.record(weight, Outer(left, right))


_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
RULES = {f: layers_rule(f) if f in _LAYERS else cell_rule(f) for f in CELLS}
