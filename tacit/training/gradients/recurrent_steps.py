"""Per-example gradients of recurrent layers: LSTM (with projection), GRU and RNN.

One layer in one direction runs all examples step by step, in buffers of all steps. With z_t the
gates before their nonlinearity and g_t their gradient, the weights have the gradients
sum_t g_t x_t' and sum_t g_t h_{t-1}', and the biases sum_t g_t. In an LSTM and an RNN g_t is the
same for all four, so they stand side by side as one matrix with the inputs (x_t, h_{t-1}, 1, 1):
its norm takes one Gram matrix of g, and its sum one product. In a GRU there are two such matrices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.training.gradients.factored import Together
from tacit.training.gradients.site import Operation, Site, cast, without_autocast
from tacit.training.program.torch_internals import linear

# (gradient of the result, result, grad_input=) -> gradient of the argument
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


def recurrent_layer(
    site: Site,
    kind: str,
    x: Tensor,  # (examples, T, rows, features); states are (examples, rows, width)
    h: Tensor,
    c: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Compute `program.recurrence.layer_by_torch` for all examples.

    Its backward collects per-example gradients."""
    *weights, is_reversed = options
    rows = x.shape[2]
    seen = x.transpose(0, 1).flatten(1, 2)
    first = (None if s is None else s.flatten(0, 1) for s in (h, c))
    operation = _AllSteps(site, kind, is_reversed, tuple(weights))
    out, *rest = operation.apply(seen, *first, *weights)
    out = out.unflatten(1, (site.examples, rows)).transpose(0, 1)
    return [out, *(s.unflatten(0, (site.examples, rows)) for s in rest)]


@dataclass
class _AllSteps(Operation):
    """One layer in one direction, over all time steps: (T, N, features) to (T, N, width)."""

    kind: str
    is_reversed: bool
    weights: tuple[Tensor | None, ...]

    def forward(self, x: Tensor, h: Tensor, c: Tensor | None, *weights: Any) -> Any:
        w_ih, w_hh, b_ih, b_hh, w_hr = weights
        with without_autocast(x):
            seen, first, first_c = cast(w_ih.dtype, x, h, c)
            is_one = self.kind == "gru" or b_ih is None
            z = linear(seen, w_ih, b_ih if is_one else b_ih + b_hh)
            walk = _forward if type(z) is Tensor else _forward_whole
            z, *kept = walk(self.kind, self.is_reversed, z, first, first_c, w_hh, b_hh, w_hr)
        # Whoever takes the results may write into them, so they are copies.
        found = [_parts(kept[0], self.is_reversed)[1].to(x.dtype, copy=True)]
        if c is not None:
            found.append(kept[1][0 if self.is_reversed else -1].to(c.dtype, copy=True))
        return tuple(found), (seen, w_ih, w_hh, w_hr, z, *kept)

    def backward(self, saved: Any, needs: Any, *grads: Tensor) -> Sequence[Tensor | None]:
        x, w_ih, w_hh, w_hr, z, *kept = saved
        with without_autocast(x):
            dout, dc, *_ = *cast(x.dtype, *grads), None
            walk = _backward if type(z) is Tensor else _backward_whole
            found = walk(self.kind, self.is_reversed, z, dout, dc, kept, w_hh, w_hr)
            dz, dh, *more = found
            w, u, b, d, p = self.weights
            of_x, of_h = [(w, x), (b, None)], [(u, _parts(kept[0], self.is_reversed)[0]), (d, None)]
            if self.kind == "gru":
                self._collect(dz, *of_x)
                self._collect(more.pop(), *of_h)
            else:
                self._collect(dz, *of_x, *of_h)
            if w_hr is not None:
                self._collect(more[1], (p, kept[3]))
            return linear(dz, w_ih.t()) if needs[0] else None, dh, *more[:1]

    def _collect(self, left: Tensor, *pairs: tuple[Tensor | None, Tensor | None]) -> None:
        """Collect the gradients of weights and biases (whose input is None) from those of gates."""
        wanted = [(w, inputs) for w, inputs in pairs if w is not None and self.site.is_shared(w)]
        if wanted:
            assert self.site.collect_together is not None
            tensors, inputs = zip(*wanted, strict=True)
            rights = tuple(None if t is None else self._by_example(t) for t in inputs)
            self.site.collect_together(tensors, Together(self._by_example(left), rights))

    def _by_example(self, tensor: Tensor) -> Tensor:
        """Return (T, N, features) as (examples, positions, features)."""
        split = tensor.unflatten(1, (self.site.examples, -1))
        return split.transpose(0, 1).flatten(1, 2)


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
