"""Weight standardization: a convolution whose output channels have weights of mean 0 and norm 1.

Qiao et al. 2019 (arXiv:1903.10520), in the scaled form of Brock, De & Smith 2021 (arXiv:2101.08692)
that De et al. 2022 (arXiv:2204.13650) use to train wide residual networks with DP-SGD. The weight
depends on parameters only, so examples stay independent of each other.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function


def standardize_weight(weight: Tensor, gain: Tensor | None = None, *, eps: float = 1e-4) -> Tensor:
    """Return `weight` with mean 0 and norm 1 (times `gain`) in each entry of its first axis.

    A squared norm below `eps` counts as `eps`. The book-keeping engine has a rule for this function
    (`gradients.standardized`); the same arithmetic written out gives the same gradients, more
    slowly.

    >>> found = standardize_weight(torch.arange(8.0).view(2, 4))
    >>> found.sum(1).abs().max().item() < 1e-6, (found.norm(dim=1) - 1).abs().max().item() < 1e-6
    (True, True)
    """
    if has_torch_function((weight,)):  # true while an engine follows the operations of a model
        return handle_torch_function(standardize_weight, (weight, gain), weight, gain, eps=eps)
    unit, _ = unit_rows(weight, eps)
    return (unit if gain is None else unit * gain.unsqueeze(1)).view_as(weight)


def unit_rows(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the centered rows (channels, N) divided by their lengths, and the lengths squared."""
    rows = weight.flatten(1)
    variance, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
    squared = variance * rows.shape[1]
    return (rows - mean) * squared.clamp_min(eps).rsqrt(), squared


class StandardizedConv2d(nn.Conv2d):
    """A `Conv2d` with standardized weights and a trainable gain for each output channel.

    >>> StandardizedConv2d(3, 8, 3)(torch.zeros(1, 3, 5, 5)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, *args: Any, eps: float = 1e-4, **options: Any) -> None:  # as Conv2d
        super().__init__(*args, **options)
        self.eps = eps
        self.gain = nn.Parameter(torch.ones_like(self.weight[:, 0, 0, 0]))

    def forward(self, input: Tensor) -> Tensor:
        """Convolve `input` with the standardized weight."""
        weight = standardize_weight(self.weight, self.gain, eps=self.eps)
        return self._conv_forward(input, weight, self.bias)
