"""LSTM and GRU steps by torch's own CUDA kernels: one launch for all gates of a time step.

torch uses these kernels for `nn.LSTMCell` and `nn.GRUCell`. Their names are private; cells whose
kernels are missing are left out of `FUSED_CELLS`.
"""

from typing import Any

import torch
from torch import Tensor

from tacit.training.gradients.recurrent import RecurrentCell, State, StepGradients


class FusedLSTM:
    """The LSTM of `gradients.recurrent`."""

    gates = 4
    widths = (4,)

    def __init__(self, kernels: Any) -> None:
        self._forward = kernels._thnn_fused_lstm_cell
        self._backward = kernels._thnn_fused_lstm_cell_backward_impl

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        h, c, gates = self._forward(zx, zh, state[1])
        return (h, c), (gates,)

    def slopes(self, before: State, after: State, kept: State) -> State:
        return before[1], after[1], kept[0]

    def backward(self, slopes: State, grads: State) -> StepGradients:
        dz, dc, _ = self._backward(*grads, *slopes, False)
        return dz, dz, None, (dc,)


class FusedGRU:
    """The GRU of `gradients.recurrent`."""

    gates = 3
    widths = (5,)

    def __init__(self, kernels: Any) -> None:
        self._forward = kernels._thnn_fused_gru_cell
        self._backward = kernels._thnn_fused_gru_cell_backward

    def forward(self, zx: Tensor, zh: Tensor, state: State) -> tuple[State, State]:
        h, gates = self._forward(zx, zh, state[0])
        return (h,), (gates,)

    def slopes(self, before: State, after: State, kept: State) -> State:
        del before, after
        return kept

    def backward(self, slopes: State, grads: State) -> StepGradients:
        dzx, dzh, dh, *_ = self._backward(grads[0], slopes[0], False)
        return dzx, dzh, dh, ()


def _found() -> dict[str, RecurrentCell]:
    cells: dict[str, RecurrentCell] = {}
    for name, cell in (("lstm", FusedLSTM), ("gru", FusedGRU)):
        try:
            cells[name] = cell(torch.ops.aten)
        except AttributeError:
            continue
    return cells


FUSED_CELLS = _found()
