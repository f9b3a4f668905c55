"""Wide residual networks without batch statistics, as De et al. 2022 train them with DP-SGD.

Zagoruyko & Komodakis 2016 (arXiv:1605.07146), with group normalization in place of batch
normalization, which mixes examples, and with standardized weights (De et al. 2022,
arXiv:2204.13650, section 3 and appendix A).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.training import StandardizedConv2d

_GROUPS = 16  # of channels in a normalization, as De et al. 2022
_STAGES = (16, 32, 64)  # channels of the three stages, before `width` multiplies them


class WideResNet(nn.Module):
    """WRN-`depth`-`width`: three stages of (depth - 4) / 6 residual blocks each.

    >>> sum(p.numel() for p in WideResNet(3, 10, depth=16, width=4).parameters())
    2753402
    """

    def __init__(self, planes: int, n_classes: int, *, depth: int, width: int) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"model.depth must be 6 n + 4 with n >= 1, such as 16, got {depth}.")
        self.first = _convolution(planes, _STAGES[0], 3)
        blocks, inputs = [], _STAGES[0]
        for stage, channels in enumerate(_STAGES):
            for place in range((depth - 4) // 6):
                stride = 2 if stage and not place else 1
                blocks.append(_ResidualBlock(inputs, channels * width, stride))
                inputs = channels * width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(_GROUPS, inputs)
        self.head = nn.Linear(inputs, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (records, planes, height, width), or without the planes."""
        x = images.unsqueeze(1) if images.dim() == 3 else images
        if x.is_cuda:  # the order that GPU convolutions read fastest
            x = x.to(memory_format=torch.channels_last)
        x = F.relu(self.norm(self.blocks(self.first(x))))
        return self.head(x.mean((2, 3)))


class _ResidualBlock(nn.Module):
    """Two convolutions, each after a normalization and a ReLU, added to what came in."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, size) for size in (inputs, outputs))
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        is_same = inputs == outputs and stride == 1
        self.shortcut = None if is_same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norms[0](x))
        kept = x if self.shortcut is None else self.shortcut(ready)
        return kept + self.second(F.relu(self.norms[1](self.first(ready))))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> StandardizedConv2d:
    layer = StandardizedConv2d(inputs, outputs, size, stride, padding=size // 2)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
