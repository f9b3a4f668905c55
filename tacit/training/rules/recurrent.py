"""Recurrent layers: `nn.LSTM` (with projection), `nn.GRU`, `nn.RNN` and their cells.

vmap cannot map torch's recurrent functions. While a program is traced, `LayerByLayer` takes such a
call apart: each layer in each direction becomes one operator, `LAYER`, and what lies between the
layers (dropout, both directions side by side) ordinary operators. A cell is a layer of one time
step.

The rule of `LAYER` runs all examples step by step, in buffers of all steps. With z_t the gates
before their nonlinearity and g_t their gradient, the weights have the gradients sum_t g_t x_t' and
sum_t g_t h_{t-1}', and the biases sum_t g_t. In an LSTM and an RNN g_t is the same for all four, so
they stand side by side as one matrix with the inputs (x_t, h_{t-1}, 1, 1): its norm takes one Gram
matrix of g, and its sum one product. In a GRU there are two such matrices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tacit.training.rules.factored import Together
from tacit.training.rules.operands import cast, without_autocast
from tacit.training.torch_internals import linear

# (gradient of the result, result, grad_input=) -> gradient of the argument
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input

# While a program is traced -----------------------------------------------------------------------

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


# The rule of `LAYER` ------------------------------------------------------------------------------


def recurrent_layer(
    tape: Any,
    kind: str,
    x: Tensor,  # (examples, T, rows, features); states are (examples, rows, width)
    h: Tensor,
    c: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Compute `layer_by_torch` for all examples."""
    *weights, is_reversed = options
    examples, rows = x.shape[0], x.shape[2]
    layer = _Layer(tape, kind, is_reversed, examples, tuple(weights))
    seen = x.transpose(0, 1).flatten(1, 2)
    first = (None if s is None else s.flatten(0, 1) for s in (h, c))
    out, *rest = _AllSteps.apply(tape.anchor, layer, seen, *first, *tape.plain(*weights))
    out = out.unflatten(1, (examples, rows)).transpose(0, 1)
    return [out, *(s.unflatten(0, (examples, rows)) for s in rest)]


@dataclass(slots=True)
class _Layer:
    """One call of a layer in one direction, and the tape that takes the gradients of its weights.

    `weights` are shared: those of input and state, their biases, and that of the projection.
    """

    tape: Any
    kind: str
    is_reversed: bool
    examples: int
    weights: tuple[Tensor | None, ...]

    def collect(
        self, x: Tensor, kept: Sequence[Tensor], dz: Tensor, more: Sequence[Tensor]
    ) -> None:
        """Put the per-example gradients on the tape, from the gradients `dz` of the gates."""
        w, u, b, d, p = self.weights
        of_x, of_h = [(w, x), (b, None)], [(u, _parts(kept[0], self.is_reversed)[0]), (d, None)]
        if self.kind == "gru":
            self._add(dz, *of_x)
            self._add(more[0], *of_h)
        else:
            self._add(dz, *of_x, *of_h)
        if p is not None:
            self._add(more[1], (p, kept[3]))

    def _add(self, left: Tensor, *pairs: tuple[Tensor | None, Tensor | None]) -> None:
        """Add the gradients of weights and biases (whose input is None) from those of gates."""
        wanted = [(w, inputs) for w, inputs in pairs if self.tape.is_shared(w)]
        if wanted:
            tensors, inputs = zip(*wanted, strict=True)
            rights = tuple(None if t is None else self._by_example(t) for t in inputs)
            self.tape.add_together(tensors, Together(self._by_example(left), rights))

    def _by_example(self, tensor: Tensor) -> Tensor:
        """Return (T, N, features) as (examples, positions, features)."""
        split = tensor.unflatten(1, (self.examples, -1))
        return split.transpose(0, 1).flatten(1, 2)


class _AllSteps(torch.autograd.Function):
    """A layer over all time steps: (T, N, features) to (T, N, width).

    The anchor stands for the weights, which have no history here: see `MappedTape.site`.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, layer: _Layer, *tensors: Any) -> Any:
        x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr = tensors
        with without_autocast(x):
            seen, first, first_c = cast(w_ih.dtype, x, h, c)
            is_one = layer.kind == "gru" or b_ih is None
            z = linear(seen, w_ih, b_ih if is_one else b_ih + b_hh)
            walk = _forward if type(z) is Tensor else _forward_whole
            z, *kept = walk(layer.kind, layer.is_reversed, z, first, first_c, w_hh, b_hh, w_hr)
        ctx.layer, ctx.dtypes = layer, [None if t is None else t.dtype for t in (x, h, c)]
        ctx.save_for_backward(seen, w_ih, w_hh, w_hr, z, *kept)
        # Whoever takes the results may write into them, so they are copies.
        found = [_parts(kept[0], layer.is_reversed)[1].to(x.dtype, copy=True)]
        if c is not None:
            found.append(kept[1][0 if layer.is_reversed else -1].to(c.dtype, copy=True))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer = ctx.layer
        x, w_ih, w_hh, w_hr, z, *kept = ctx.saved_tensors
        with without_autocast(x):
            dout, dc, *_ = *cast(x.dtype, *grads), None
            walk = _backward if type(z) is Tensor else _backward_whole
            dz, dh, *more = walk(layer.kind, layer.is_reversed, z, dout, dc, kept, w_hh, w_hr)
            layer.collect(x, kept, dz, more)
            dx = linear(dz, w_ih.t()) if ctx.needs_input_grad[2] else None
        found = dx, dh, more[0] if dc is not None else None
        pairs = zip(found, ctx.dtypes, strict=True)
        return None, None, *(None if g is None else g.to(t) for g, t in pairs), *(None,) * 5


def _forward(
    kind: str,
    is_reversed: bool,
    z: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
) -> list[Tensor]:
    """Run all steps on z (T, N, gates), the term of the input in the gates.

    Return z, into which the gates are written; the states before the first step and after each;
    and what the backward needs besides.
    """
    held: list[Tensor] = []
    states: list[Tensor] = []
    for first in (h,) if c is None else (h, c):
        whole = first.new_empty(len(z) + 1, *first.shape)
        whole[-1 if is_reversed else 0] = first
        held.append(whole)
        states += _parts(whole, is_reversed)
    if kind == "lstm":
        kept = _lstm(is_reversed, z, states, w_hh, w_hr)
    elif kind == "gru":
        kept = [_gru(is_reversed, z, states, w_hh, b_hh)]
    else:
        kept = []
        for z_, before, after in _in_time(is_reversed, z, *states):
            z_.add_(linear(before, w_hh))
            torch.tanh(z_, out=after) if kind == "rnn_tanh" else torch.clamp(z_, min=0, out=after)
    return [z, *held, *kept]


def _backward(
    kind: str,
    is_reversed: bool,
    z: Tensor,
    dout: Tensor,
    dc: Tensor | None,
    kept: list[Tensor],
    w_hh: Tensor,
    w_hr: Tensor | None,
) -> list[Tensor]:
    """Run all steps backward; z, which is needed no more, becomes the gradient of the gates.

    Return z and the gradient of the first state. More for an LSTM: the gradient of the first cell
    state, and that of the projected outputs if there are any; for a GRU, whose gates take the two
    terms in different ways: the gradient of the state's term.
    """
    if kind == "lstm":
        return _lstm_backward(is_reversed, z, dout, dc, kept, w_hh, w_hr)
    if kind == "gru":
        return _gru_backward(is_reversed, z, dout, kept, w_hh)
    dh = torch.zeros_like(dout[0])
    after = _parts(kept[0], is_reversed)[1]
    for z_, h, do in _in_time(not is_reversed, z, after, dout):
        if kind == "rnn_tanh":
            _tanh_backward(do + dh, h, grad_input=z_)
        else:
            torch.mul(do + dh, h > 0, out=z_)
        dh = linear(z_, w_hh.t())
    return [z, dh]


def _in_time(is_reversed: bool, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the parts of the tensors step by step."""
    return zip(*(t.unbind(0)[:: -1 if is_reversed else 1] for t in tensors), strict=True)


def _parts(held: Tensor, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """Return the states before each step and those after it, which overlap in memory."""
    return (held[1:], held[:-1]) if is_reversed else (held[:-1], held[1:])


def _lstm(
    is_reversed: bool,
    z: Tensor,
    states: Sequence[Tensor],
    w_hh: Tensor,
    w_hr: Tensor | None,
) -> list[Tensor]:
    h, new_h, c, new_c = states
    tanh_c, raw = torch.empty_like(c), new_h if w_hr is None else torch.empty_like(c)
    i, f, g, o = z.chunk(4, 2)
    buffers = z, z[:, :, : 2 * c.shape[2]], i, f, g, o, h, new_h, c, new_c, tanh_c, raw
    for z_, i_f, i_, f_, g_, o_, h_, new_h_, c_, new_c_, tanh_, raw_ in _in_time(
        is_reversed, *buffers
    ):
        z_.add_(linear(h_, w_hh))
        i_f.sigmoid_()
        g_.tanh_()
        o_.sigmoid_()
        torch.mul(i_, g_, out=new_c_).addcmul_(f_, c_)
        torch.mul(o_, torch.tanh(new_c_, out=tanh_), out=raw_)
        if w_hr is not None:
            new_h_.copy_(linear(raw_, w_hr))
    return [tanh_c] if w_hr is None else [tanh_c, raw]


def _lstm_backward(
    is_reversed: bool,
    z: Tensor,
    dout: Tensor,
    dc: Any,
    kept: list[Tensor],
    w_hh: Tensor,
    w_hr: Tensor | None,
) -> list[Tensor]:
    i, f, g, o = z.chunk(4, 2)
    c, tanh_c = _parts(kept[1], is_reversed)[0], kept[2]
    projected = dout if w_hr is None else dout.new_empty(dout.shape)
    dh = torch.zeros_like(dout[0])
    buffers = z, i, f, g, o, c, tanh_c, dout, projected
    for z_, i_, f_, g_, o_, c_, tanh_, do, dp in _in_time(not is_reversed, *buffers):
        dh = dh + do
        if w_hr is not None:
            dp.copy_(dh)
            dh = linear(dh, w_hr.t())
        dc = torch.addcmul(dc, dh, torch.ops.aten.tanh_backward(o_, tanh_))
        of_i, of_f, of_g, past = dc * g_, dc * c_, dc * i_, dc * f_
        _sigmoid_backward(of_i, i_, grad_input=i_)
        _sigmoid_backward(of_f, f_, grad_input=f_)
        _tanh_backward(of_g, g_, grad_input=g_)
        _sigmoid_backward(dh * tanh_, o_, grad_input=o_)
        dh, dc = linear(z_, w_hh.t()), past
    return [z, dh, dc] if w_hr is None else [z, dh, dc, projected]


def _gru(
    is_reversed: bool,
    z: Tensor,
    states: Sequence[Tensor],
    w_hh: Tensor,
    b_hh: Tensor | None,
) -> Tensor:
    h, new_h = states
    r, u, n = z.chunk(3, 2)
    width = h.shape[2]
    of_h = torch.empty_like(h)  # the state's term, which r multiplies
    buffers = z[:, :, : 2 * width], r, u, n, h, new_h, of_h
    for r_u, r_, u_, n_, h_, new_h_, of_h_ in _in_time(is_reversed, *buffers):
        y = linear(h_, w_hh, b_hh)
        of_h_.copy_(y[:, 2 * width :])
        r_u.add_(y[:, : 2 * width]).sigmoid_()
        n_.addcmul_(r_, of_h_).tanh_()
        torch.lerp(n_, h_, u_, out=new_h_)
    return of_h


def _gru_backward(
    is_reversed: bool, z: Tensor, dout: Tensor, kept: list[Tensor], w_hh: Tensor
) -> list[Tensor]:
    r, u, n = z.chunk(3, 2)
    dz, dzh = torch.empty_like(z), torch.empty_like(z)
    of_r, of_u, of_n = dz.chunk(3, 2)
    _tanh_backward(1 - u, n, grad_input=of_n)
    _sigmoid_backward(of_n * kept[1], r, grad_input=of_r)
    _sigmoid_backward(_parts(kept[0], is_reversed)[0] - n, u, grad_input=of_u)
    dh = torch.zeros_like(dout[0])
    buffers = dz, dz.unflatten(2, (3, -1)), dzh, dzh[:, :, 2 * r.shape[2] :], r, u, dout
    for dz_, slopes, dzh_, of_hn, r_, u_, do in _in_time(not is_reversed, *buffers):
        dh = dh + do
        slopes.mul_(dh.unsqueeze(1))
        dzh_.copy_(dz_)
        of_hn.mul_(r_)
        dh = linear(dzh_, w_hh.t()).addcmul_(dh, u_)
    return [dz, dh, dzh]


# To the compiler all steps are one operation, which it would otherwise take one by one.


@torch.library.custom_op("tacit::recurrent_forward", mutates_args=())
def _forward_whole(
    kind: str,
    is_reversed: bool,
    z: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
) -> list[Tensor]:
    return _forward(kind, is_reversed, z.clone(), h, c, w_hh, b_hh, w_hr)


@_forward_whole.register_fake
def _(
    kind: str,
    is_reversed: bool,  # noqa: ARG001  # the schema's
    z: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_hh: Tensor,  # noqa: ARG001
    b_hh: Tensor | None,  # noqa: ARG001
    w_hr: Tensor | None,
) -> list[Tensor]:
    steps = len(z)
    held = [s.new_empty(steps + 1, *s.shape) for s in (h, c) if s is not None]
    more = {"gru": [h], "lstm": [c] if w_hr is None else [c, c]}.get(kind, [])
    return [torch.empty_like(z), *held, *(s.new_empty(steps, *s.shape) for s in more)]


@torch.library.custom_op("tacit::recurrent_backward", mutates_args=())
def _backward_whole(
    kind: str,
    is_reversed: bool,
    z: Tensor,
    dout: Tensor,
    dc: Tensor | None,
    kept: list[Tensor],
    w_hh: Tensor,
    w_hr: Tensor | None,
) -> list[Tensor]:
    return _backward(kind, is_reversed, z.clone(), dout, dc, kept, w_hh, w_hr)


@_backward_whole.register_fake
def _(
    kind: str,
    is_reversed: bool,  # noqa: ARG001  # the schema's
    z: Tensor,
    dout: Tensor,
    dc: Tensor | None,
    kept: list[Tensor],
    w_hh: Tensor,  # noqa: ARG001
    w_hr: Tensor | None,
) -> list[Tensor]:
    more = [z] if kind == "gru" else [] if dc is None else [kept[1][0]]
    more += [] if w_hr is None else [dout]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (z, dout[0], *more)]
