"""Tensors as text, for checkpoints that hold JSON values."""

import base64

import numpy as np
import torch
from torch import Tensor

_TYPES = {"int32": np.int32, "float32": np.float32, "float64": np.float64}


def to_text(tensor: Tensor) -> str:
    """Return a tensor of int32, float32 or float64 as text: its dtype, its shape and its numbers.

    >>> from_text(to_text(torch.tensor([[1.0, 2.5]]))).tolist()
    [[1.0, 2.5]]
    """
    numbers = np.ascontiguousarray(tensor.detach().cpu().numpy())
    shape = ",".join(map(str, numbers.shape))
    return f"{numbers.dtype.name}:{shape}:{base64.b64encode(numbers.tobytes()).decode()}"


def from_text(text: str) -> Tensor:
    """Return the tensor that `to_text` turned into `text`; raise `ValueError` for anything else."""
    name, shape, encoded = text.split(":", 2)
    if name not in _TYPES:
        raise ValueError("the checkpoint holds a tensor of an unknown type.")
    numbers = np.frombuffer(base64.b64decode(encoded, validate=True), _TYPES[name])
    return torch.from_numpy(numbers.reshape([int(n) for n in shape.split(",") if n]).copy())
