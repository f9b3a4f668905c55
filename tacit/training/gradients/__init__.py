"""Per-example gradients of torch's operations: one file per family, one rule per operation.

A rule has the signature of its operation with a `Site` in front. It computes the result by an
`Operation`, whose backward returns the input gradient only and, for each shared tensor, collects a
`FactoredGradient` that stands for the per-example gradients. Rules cover operations, not module
classes, so a layer of any class is covered if its operations are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.training.gradients import (
    attention,
    convolution,
    embedding,
    generic,
    linear,
    normalization,
    recurrent,
)

Rule = Callable[..., Any]

RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear.linear,
    torch.matmul: linear.matmul,
    Tensor.matmul: linear.matmul,
    Tensor.__matmul__: linear.matmul,
    torch.mm: linear.matmul,
    Tensor.mm: linear.matmul,
    torch.addmm: linear.addmm,
    F.embedding: embedding.embedding,
    F.embedding_bag: embedding.embedding_bag,
    Tensor.__getitem__: embedding.getitem,
    F.layer_norm: normalization.layer_norm,
    F.rms_norm: normalization.rms_norm,
    torch.rms_norm: normalization.rms_norm,
    F.group_norm: normalization.group_norm,
    F.instance_norm: normalization.instance_norm,
    F.multi_head_attention_forward: attention.multi_head_attention,
    torch.add: generic.add,
    Tensor.add: generic.add,
    Tensor.__add__: generic.add,
    Tensor.__radd__: generic.add,
    **recurrent.RULES,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolution.convolution),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        convolution.transposed_convolution,
    ),
}

# Arguments of these need not hold the examples on one axis: row i of the result says which example
# it belongs to.
RAGGED = (F.embedding_bag,)

# These expand a shared tensor over the batch: the result holds examples although no argument does.
SPREADS = (
    Tensor.expand,
    Tensor.expand_as,
    torch.broadcast_to,
    Tensor.broadcast_to,
    Tensor.repeat,
    torch.tile,
    Tensor.tile,
)
