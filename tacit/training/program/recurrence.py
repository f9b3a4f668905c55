"""Recurrent layers: `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells.

vmap cannot map torch's recurrent functions. While a program is traced, `LayerByLayer` takes such a
call apart: each layer in each direction becomes one operator, `LAYER`, and what lies
between the layers (dropout, both directions side by side) ordinary operators. A cell is a layer of
one time step.

The rule of that operator runs all examples of a lot step by step, in buffers of all steps. With
z_t the gates before their nonlinearity and g_t their gradient, the weights have the gradients
sum_t g_t x_t' and sum_t g_t h_{t-1}', and the biases sum_t g_t. In an LSTM and an RNN g_t is the
same for all four, so they are one matrix of the columns (x_t, h_{t-1}, 1, 1): its norm takes one
Gram matrix of g, and its sum one product. In a GRU there is one such matrix for each term.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tacit.training.gradients.factored import Together
from tacit.training.gradients.site import Operation, Site, cast, without_autocast
from tacit.training.program.torch_internals import linear

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_NETWORKS = {getattr(torch, kind): kind for kind in _KINDS}
_CELLS = {getattr(torch, f"{kind}_cell"): kind for kind in _KINDS}
# (gradient of the result, result, grad_input=) -> gradient of the argument
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


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


def rule(
    site: Site,
    kind: str,
    x: Tensor,  # (examples, T, rows, features); states are (examples, rows, width)
    h: Tensor,
    c: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Compute `layer_by_torch` for all examples; its backward collects per-example gradients."""
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
            seen, h, c = cast(w_ih.dtype, x, h, c)
            is_one = self.kind == "gru" or b_ih is None
            z = linear(seen, w_ih, b_ih if is_one else b_ih + b_hh)
            before, after = self._states(h, len(x))
            if c is not None:
                states = before, after, *self._states(c, len(x))
                kept = self._lstm(z, *states, w_hh, w_hr)
            elif self.kind == "gru":
                kept = self._gru(z, before, after, w_hh, b_hh)
            else:
                kept = self._rnn(z, before, after, w_hh)
        found = [after.to(x.dtype, copy=True)]  # whoever takes it may write into it
        if c is not None:
            found.append(kept[1][0 if self.is_reversed else -1].to(x.dtype, copy=True))
        return tuple(found), (seen, before, after, z, w_ih, w_hh, w_hr, *kept)

    def backward(self, saved: Any, needs: Any, *grads: Tensor) -> Sequence[Tensor | None]:
        x, before, after, z, w_ih, w_hh, w_hr, *kept = saved
        with without_autocast(x):
            dout, *more = cast(x.dtype, *grads)
            dc = dzh = None
            if more:
                dz, dh, dc, projected = self._lstm_backward(dout, *more, z, *kept, w_hh, w_hr)
                if projected is not None:
                    self._collect(projected, (self.weights[4], kept[3]))
            elif self.kind == "gru":
                dz, dzh, dh = self._gru_backward(dout, z, before, *kept, w_hh)
            else:
                dz, dh = self._rnn_backward(dout, after, z, w_hh)
            w, u, b, d, _ = self.weights
            of_x, of_h = [(w, x), (b, None)], [(u, before), (d, None)]
            if dzh is None:
                self._collect(dz, *of_x, *of_h)
            else:
                self._collect(dz, *of_x)
                self._collect(dzh, *of_h)
            return linear(dz, w_ih.t()) if needs[0] else None, dh, dc

    def _collect(self, left: Tensor, *pairs: tuple[Tensor | None, Tensor | None]) -> None:
        """Collect the gradients of weights and biases (whose input is None) from those of gates."""
        wanted = [(w, inputs) for w, inputs in pairs if self.site.is_shared(w)]
        if wanted:
            tensors, inputs = zip(*wanted, strict=True)
            sides = [None if t is None else self._by_example(t) for t in (left, *inputs)]
            self.site.collect_together(tensors, Together(sides[0], tuple(sides[1:])))

    def _by_example(self, tensor: Tensor) -> Tensor:
        """Return (T, N, features) as (examples, positions, features)."""
        split = tensor.unflatten(1, (self.site.examples, -1))
        return split.transpose(0, 1).flatten(1, 2)

    def _states(self, first: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return buffers for the states before and after each step; they overlap in memory."""
        held = first.new_empty(steps + 1, *first.shape)
        held[-1 if self.is_reversed else 0] = first
        return (held[1:], held[:-1]) if self.is_reversed else (held[:-1], held[1:])

    def _in_time(self, *tensors: Tensor, back: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of the tensors step by step, in the order of the steps or `back`."""
        order = -1 if self.is_reversed != back else 1
        return zip(*(t.unbind(0)[::order] for t in tensors), strict=True)

    # The cells: forward fills buffers, backward turns z into the gradient of the gates -----------

    def _lstm(
        self,
        z: Tensor,
        before: Tensor,
        after: Tensor,
        c_before: Tensor,
        c_after: Tensor,
        w_hh: Tensor,
        w_hr: Tensor | None,
    ) -> Sequence[Tensor]:
        tanh_c = torch.empty_like(c_after)
        raw = after if w_hr is None else torch.empty_like(c_after)
        i, f, g, o = z.chunk(4, 2)
        both = z[:, :, : 2 * i.shape[2]]
        buffers = z, both, i, f, g, o, before, after, c_before, c_after, tanh_c, raw
        for z_, both_, i_, f_, g_, o_, h, new_h, c, new_c, tanh_, raw_ in self._in_time(*buffers):
            z_.add_(linear(h, w_hh))
            both_.sigmoid_()
            g_.tanh_()
            o_.sigmoid_()
            torch.mul(i_, g_, out=new_c).addcmul_(f_, c)
            torch.mul(o_, torch.tanh(new_c, out=tanh_), out=raw_)
            if w_hr is not None:
                new_h.copy_(linear(raw_, w_hr))
        return c_before, c_after, tanh_c, raw

    def _lstm_backward(
        self,
        dout: Tensor,
        dc: Tensor,
        z: Tensor,
        c_before: Tensor,
        _: Tensor,
        tanh_c: Tensor,
        __: Tensor,
        w_hh: Tensor,
        w_hr: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        i, f, g, o = z.chunk(4, 2)
        first_three = z.unflatten(2, (4, -1))[:, :, :3]
        projected = None if w_hr is None else torch.empty_like(dout)
        dh = torch.zeros_like(dout[0])
        buffers = (
            z,
            first_three,
            i,
            f,
            g,
            o,
            c_before,
            tanh_c,
            dout,
            dout if projected is None else projected,
        )
        for z_, three, i_, f_, g_, o_, c, tanh_, do, of_p in self._in_time(*buffers, back=True):
            dh = dh + do
            if w_hr is not None:
                of_p.copy_(dh)
                dh = linear(dh, w_hr.t())
            dc = torch.addcmul(dc, dh, torch.ops.aten.tanh_backward(o_, tanh_))
            past = dc * f_
            _sigmoid_backward(tanh_ * dh, o_, grad_input=o_)
            _sigmoid_backward(c, f_, grad_input=f_)
            of_g = torch.ops.aten.tanh_backward(i_, g_)
            _sigmoid_backward(g_, i_, grad_input=i_)
            g_.copy_(of_g)
            three.mul_(dc.unsqueeze(1))
            dh, dc = linear(z_, w_hh.t()), past
        return z, dh, dc, projected

    def _gru(
        self, z: Tensor, before: Tensor, after: Tensor, w_hh: Tensor, b_hh: Tensor | None
    ) -> Sequence[Tensor]:
        r, u, n = z.chunk(3, 2)
        width = r.shape[2]
        of_h = torch.empty_like(after)  # what r multiplies
        buffers = z[:, :, : 2 * width], r, u, n, before, after, of_h
        for both_, r_, u_, n_, h, new_h, of_h_ in self._in_time(*buffers):
            y = linear(h, w_hh, b_hh)
            of_h_.copy_(y[:, 2 * width :])
            both_.add_(y[:, : 2 * width]).sigmoid_()
            n_.addcmul_(r_, of_h_).tanh_()
            torch.lerp(n_, h, u_, out=new_h)
        return (of_h,)

    def _gru_backward(
        self, dout: Tensor, z: Tensor, before: Tensor, of_h: Tensor, w_hh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        r, u, n = z.chunk(3, 2)
        dz, dzh = torch.empty_like(z), torch.empty_like(z)
        of_r, of_u, of_n = dz.chunk(3, 2)
        _tanh_backward(1 - u, n, grad_input=of_n)
        _sigmoid_backward(of_n * of_h, r, grad_input=of_r)
        _sigmoid_backward(before - n, u, grad_input=of_u)
        dh = torch.zeros_like(dout[0])
        buffers = dz, dz.unflatten(2, (3, -1)), dzh, dzh[:, :, 2 * r.shape[2] :], r, u, dout
        for dz_, slopes, dzh_, of_hn, r_, u_, do in self._in_time(*buffers, back=True):
            dh = dh + do
            slopes.mul_(dh.unsqueeze(1))
            dzh_.copy_(dz_)
            of_hn.mul_(r_)
            dh = linear(dzh_, w_hh.t()).addcmul_(dh, u_)
        return dz, dzh, dh

    def _rnn(self, z: Tensor, before: Tensor, after: Tensor, w_hh: Tensor) -> Sequence[Tensor]:
        for z_, h, new_h in self._in_time(z, before, after):
            z_.add_(linear(h, w_hh))
            if self.kind == "rnn_tanh":
                torch.tanh(z_, out=new_h)
            else:
                torch.clamp(z_, min=0, out=new_h)
        return ()

    def _rnn_backward(
        self, dout: Tensor, after: Tensor, z: Tensor, w_hh: Tensor
    ) -> tuple[Tensor, Tensor]:
        dh = torch.zeros_like(dout[0])
        for z_, h, do in self._in_time(z, after, dout, back=True):
            if self.kind == "rnn_tanh":
                _tanh_backward(do + dh, h, grad_input=z_)
            else:
                torch.mul(do + dh, h > 0, out=z_)
            dh = linear(z_, w_hh.t())
        return z, dh
