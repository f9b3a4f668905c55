"""The clipped sum by `torch.func.vmap` over `grad`: takes any model that vmap can run.

Each example is run alone, as a batch of one, so nothing can mix examples. This costs the memory of
one gradient per example; the batch is cut into chunks that fit a budget.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, enable_grad, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tacit.training.clip import Clip, ClippedSum
from tacit.training.engines.examples import Examples, clip_and_sum, losses_of
from tacit.training.gradients.generic import without_fallback_warnings
from tacit.training.gradients.recurrent import CELLS, decomposed
from tacit.training.gradients.site import Declined, Unsupported, refuse
from tacit.training.noisy_loss import with_loss
from tacit.training.tree import Batch, LossFn, with_rows

# Bytes that the per-example gradients of one chunk may take on a CPU; a quarter of what is free
# on a GPU. Three copies live at once: in the transform, flattened, and masked.
CPU_BUDGET = 2**29
COPIES = 3


def run(examples: Examples, clip: Clip) -> ClippedSum:
    """Return the clipped sum of the examples whose mask is True.

    Raises `Unsupported` where vmap cannot run the model, for example because of control flow that
    depends on values, and where the program holds a parameter outside the model.
    """
    tensors, rebuild = with_rows(examples.batch)
    tensors = [t.unflatten(0, (-1, examples.views)) for t in tensors]
    gradients = _per_example(examples.model, examples.loss_fn, rebuild, examples.views)
    values = {name: p.detach() for name, p in examples.parameters.items()}
    total = ClippedSum.zeros(examples.model, clip, dtype=torch.float64)
    step = examples_at_once(values)
    for start in range(0, len(examples), step):
        chunk = slice(start, start + step)
        # Parameters are given as detached values: a loss that requires a gradient here, outside of
        # the transform, has got it from tensors that the program holds.
        with Decompose(), sdpa_kernel(SDPBackend.MATH), without_fallback_warnings(), enable_grad():
            try:
                rows, losses = gradients(values, [t[chunk] for t in tensors])
            except RuntimeError as error:
                refuse(error, "torch.func.vmap cannot run it")
        if depends_on(losses, examples.parameters.values()):
            raise Unsupported("the program uses a parameter that it holds outside the model")
        rows = {name: found.detach() for name, found in rows.items()}
        mask = examples.mask[chunk]
        total += with_loss(clip_and_sum(rows, clip, mask), examples.noisy_loss, losses, mask)
    return total


def with_values(losses: "LossModule", values: dict[str, Tensor], batch: Batch) -> Tensor:
    """Return the losses with other values for the parameters, which are given by name.

    `functional_call` puts a module's own parameters back wrongly if the module has several names,
    so each module is named once, and each place of a tied parameter by itself.
    """
    names = {id(p): name for name, p in losses.model.named_parameters()}
    replaced = {
        f"{prefix}.{own}": values[names[id(p)]]
        for prefix, module in losses.named_modules()
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if names.get(id(p)) in values
    }
    return functional_call(losses, replaced, (batch,), tie_weights=False)


def depends_on(result: Tensor, parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether autograd would pass a gradient of `result` on to one of `parameters`.

    The parameters of a model are replaced before its program is differentiated. A program that
    holds a parameter or a view of one elsewhere (a closure, a list, a hook) still uses the original
    one, whose gradient would be lost.
    """
    wanted = {id(p) for p in parameters}
    pending, seen = [result.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        pending.extend(following for following, _ in node.next_functions)
    return False


class Decompose(TorchFunctionMode):
    """Replaces recurrent layers by elementary operations, which vmap can batch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CELLS:
            with suppress(Declined):
                return decomposed(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class LossModule(nn.Module):
    """`loss_fn` and model as one module, on which `functional_call` can replace the parameters."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, rows: int) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.rows = rows

    def forward(self, batch: Batch) -> Tensor:
        return losses_of(self.loss_fn, self.model, batch, self.rows)


def _per_example(
    model: nn.Module, loss_fn: LossFn, rebuild: Callable[..., Batch], views: int
) -> Callable[[dict[str, Tensor], list[Tensor]], tuple[dict[str, Tensor], Tensor]]:
    losses = LossModule(model, loss_fn, views)

    def loss(values: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        return with_values(losses, values, rebuild(rows)).mean()

    return vmap(grad_and_value(loss), in_dims=(None, 0), randomness="different")


def examples_at_once(values: dict[str, Tensor]) -> int:
    """Return how many examples' gradients fit in the memory budget at once."""
    device = next(iter(values.values())).device
    budget = CPU_BUDGET
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 4
    row = sum(v.numel() * v.element_size() for v in values.values())
    return max(1, budget // (COPIES * row))
