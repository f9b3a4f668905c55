"""From a tensor computed out of shared tensors back to the parameters it came from.

A weight may be transposed, cast, standardized, masked or looked up before it meets the examples.
Its per-example gradients follow from those of the result: directly where the operation only moves
numbers, otherwise by the operation's own backward mapped over the examples.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.training.gradients.factored import Dense, Outer, Rows
from tacit.training.gradients.site import Piece, Unsupported

CASTS = (
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.type_as,
    Tensor.contiguous,
    Tensor.clone,
)
TURNS = (Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]


def origin(
    made: Any, result: Tensor, piece: Piece, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[Tensor, Piece]]:
    """Pieces of the tensors that `result` of the call `made` came from, given its own piece."""
    source = made.args[0] if made.args and isinstance(made.args[0], Tensor) else None
    if source is not None and made.function in CASTS and source.shape == result.shape:
        yield source, piece
    elif source is not None and source.dim() == 2 and _is_turn(made):
        yield source, _turned(piece)
    elif made.function is F.embedding and len(made.args) > 1 and not _is_special(made):
        yield made.args[1], _looked_up(made, piece)
    else:
        yield from _pulled(result, piece, parameters)


def _is_turn(made: Any) -> bool:
    if made.function in (Tensor.transpose, torch.transpose):
        return {axis % 2 for axis in made.args[1:3]} == {0, 1}
    return made.function in TURNS


def _is_special(lookup: Any) -> bool:
    """Whether a lookup has max_norm or scale_grad_by_freq."""
    given = dict(
        zip(("max_norm", "norm_type", "scale_grad_by_freq"), lookup.args[3:], strict=False)
    )
    given.update(lookup.kwargs)
    return given.get("max_norm") is not None or bool(given.get("scale_grad_by_freq"))


def _turned(piece: Piece) -> Piece:
    if isinstance(piece, Outer):
        return Outer(piece.right, piece.left, piece.right_squared, piece.left_squared)
    return Dense(piece.dense().transpose(1, 2))


def _looked_up(made: Any, piece: Piece) -> Rows:
    """A lookup of the same rows for every example, such as positions."""
    ids, table = made.args[:2]
    padding = made.args[2] if len(made.args) > 2 else made.kwargs.get("padding_idx")
    values = piece.dense()
    values = values.reshape(len(values), -1, table.shape[1])  # (examples, T, width)
    ids = ids.reshape(1, -1).expand(len(values), -1)
    if padding is not None:
        values = torch.where((ids == padding % table.shape[0]).unsqueeze(-1), 0.0, values)
    return Rows(ids, values, table.shape[0])


def _pulled(
    tensor: Tensor, piece: Piece, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[Tensor, Piece]]:
    leaves = list(parameters.values())
    try:
        with torch.enable_grad():
            found = torch.autograd.grad(
                tensor,
                leaves,
                piece.dense().to(tensor.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
    except RuntimeError as error:
        raise Unsupported("a computed weight whose backward vmap cannot map") from error
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            yield leaf, Dense(gradient)
