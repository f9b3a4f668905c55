"""Clipped sum by `torch.func.vmap` over `grad`: takes any model that vmap can run.

Each example is run alone, as a batch of one, so nothing can mix examples. Costs the memory of one
gradient per example; the batch is cut into chunks that fit a budget.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tacit.training.clip import Clip
from tacit.training.engines import batch as b
from tacit.training.gradients.factored import squared_norm
from tacit.training.gradients.generic import without_fallback_warnings
from tacit.training.gradients.recurrent import CELLS, decomposed
from tacit.training.gradients.site import Declined, Unsupported
from tacit.training.memory import is_out_of_memory
from tacit.training.sums import ClippedSum, accumulator, trainable

# Bytes that the per-example gradients of one chunk may take on a CPU; a quarter of what is free
# on a GPU. Three copies live at once: in the transform, flattened, and masked.
CPU_BUDGET = 2**29
COPIES = 3


class _Decompose(TorchFunctionMode):
    """Runs recurrent layers in operations that vmap knows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CELLS:
            with suppress(Declined):
                return decomposed(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Losses(nn.Module):
    """`loss_fn` as a module, so that `functional_call` can put other parameters into the model."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], rows: int) -> None:
        super().__init__()
        self.model, self.loss_fn, self.rows = model, loss_fn, rows

    def forward(self, batch: Any) -> Tensor:
        return b.checked_losses(self.loss_fn, self.model, batch, self.rows)


def run(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    clip: Clip,
    mask: Tensor,
    augmentations: int = 1,
) -> ClippedSum:
    """Clipped sum of the rows where `mask` is True.

    Raises `Unsupported` where vmap cannot run the model, such as on control flow by values.
    """
    parameters = trainable(model)
    tensors, rebuild = b.split_rows(batch)
    tensors = [t.unflatten(0, (-1, augmentations)) for t in tensors]
    gradients = _per_example(model, loss_fn, rebuild, augmentations)
    values = {name: p.detach() for name, p in parameters.items()}
    total = ClippedSum.zeros(model, clip)
    step = _chunk(values)
    for start in range(0, len(mask), step):
        part = slice(start, start + step)
        with _Decompose(), sdpa_kernel(SDPBackend.MATH), without_fallback_warnings():
            try:
                rows = gradients(values, [t[part] for t in tensors])
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise  # fewer rows at once will do
                raise Unsupported("vmap cannot run it") from error
        total += weigh(rows, clip, mask[part])
    return total


def _per_example(
    model: nn.Module, loss_fn: Callable[..., Tensor], rebuild: Callable[..., Any], views: int
) -> Callable[[dict[str, Tensor], list[Tensor]], dict[str, Tensor]]:
    losses = _Losses(model, loss_fn, views)

    def loss(values: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        replaced = {f"model.{name}": value for name, value in values.items()}
        return functional_call(losses, replaced, (rebuild(rows),)).mean()

    return vmap(grad(loss), in_dims=(None, 0), randomness="different")


def weigh(gradients: dict[str, Tensor], clip: Clip, mask: Tensor) -> ClippedSum:
    """Clipped sum of gradients that were formed, (examples, *shape) by name."""
    index = b.group_index(clip, list(gradients))
    norms: list[Tensor | float] = [0.0] * len(clip.clip_norms)
    for name, rows in gradients.items():
        norms[index[name]] = norms[index[name]] + squared_norm(rows)
    empty = torch.zeros(len(mask), device=mask.device)
    squared = torch.stack([n if isinstance(n, Tensor) else empty for n in norms])
    rounding = max(b.rounding_of(rows.dtype) for rows in gradients.values())
    finite = torch.isfinite(squared).all(0)
    factors, within = b.factors_of(clip, squared, mask, rounding, finite)
    sums = {name: _sum(rows, factors[index[name]]) for name, rows in gradients.items()}
    return ClippedSum(sums, within)


def _sum(rows: Tensor, factors: Tensor) -> Tensor:
    flat = rows.reshape(len(rows), -1).to(accumulator(rows.dtype))
    flat = torch.where((factors > 0).unsqueeze(1), flat, 0.0)  # 0 * inf would be nan
    return (factors.to(flat.dtype) @ flat).view(rows.shape[1:])


def _chunk(values: dict[str, Tensor]) -> int:
    device = next(iter(values.values())).device
    budget = CPU_BUDGET
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 4
    row = sum(v.numel() * v.element_size() for v in values.values())
    return max(1, budget // (COPIES * row))
