"""Is each example's gradient its own? Checked before anything is spent.

Clipping bounds what one example contributes only if no other example's gradient depends on it, and
only if nothing but the gradient leaves the step. Known offenders are named by their type; anything
else is found by a probe: change one example, and the loss and gradient of another must not move.

The probe runs the model on a few records. Whether it passes is a property of the model's structure;
no value that it computes leaves this file.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from tacit.errors import IncompatibleModel
from tacit.training.mixing import where_it_mixes
from tacit.training.records import Batch, map_tensors, n_rows, seeded

Loss = Callable[[nn.Module, Batch], Tensor]
# Runs that are not over: the ids of their parameters, and their optimizer.
_RUNS: WeakKeyDictionary[object, tuple[set[int], torch.optim.Optimizer]] = WeakKeyDictionary()
_PROBE_ROWS = 3


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that may mix examples or keep data, depending on their mode, by name."""
    kinds = (_BatchNorm, _InstanceNorm)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}


def check_layers(layers: dict[str, nn.Module]) -> None:
    """Raise `IncompatibleModel` if one of `norm_layers` mixes examples or keeps data as it is."""
    for name, layer in layers.items():
        if reason := _offense(layer):
            raise IncompatibleModel(f"{name or 'the model'} ({type(layer).__name__}) {reason}")


def trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that will be trained, by name; the optimizer must hold them and no others."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer must take one gradient a step, got LBFGS, which takes several.")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("model has no trainable parameters: every requires_grad is False.")
    for name, p in named.items():
        if isinstance(p, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the model once before make_private.")
    of_model = {id(p) for p in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if foreign := len(held - of_model):
        raise ValueError(
            f"optimizer holds {foreign} parameter(s) that the model does not have, so nothing "
            "would make their gradient private. Build the optimizer from model.parameters()."
        )
    if missing := [name for name, p in named.items() if id(p) not in held]:
        raise ValueError(
            f"optimizer does not hold the trainable parameter {missing[0]} ({len(missing)} in all)."
            " Add it, or freeze it with requires_grad_(False)."
        )
    return named


def claim(run: object, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Note that `run` trains these with `optimizer`; one optimizer at a time until it is over."""
    for ids, other in list(_RUNS.values()):
        if other is optimizer:
            continue
        for name, p in named.items():
            if id(p) in ids:
                raise ValueError(
                    f"{name} is shared with another optimizer, whose private run is not over. "
                    "Finish that run or delete it first."
                )
    _RUNS[run] = ({id(p) for p in named.values()}, optimizer)


def release_claim(run: object) -> None:
    """`run` is over: other optimizers may train its parameters."""
    _RUNS.pop(run, None)


def probe(model: nn.Module, loss_fn: Loss, batch: Batch, device: torch.device) -> int:
    """Bytes of activations that one example keeps for its backward, if examples do not mix.

    Raises `ValueError` if `loss_fn` does not give one loss per example, and `IncompatibleModel` if
    one example's loss or gradient moves when another example changes, or a buffer depends on data.
    """
    rows = n_rows(batch)
    params = [p for p in model.parameters() if p.requires_grad]
    with _restored_buffers(model) as restore, seeded(0, device):
        other = _with_changed_row(batch)
        torch.manual_seed(1)
        counter = _SavedBytes(params)
        with counter:
            losses = _losses(model, loss_fn, batch, rows)
        before, buffers = _first_gradient(losses, params), _copies(model)
        restore()
        torch.manual_seed(1)
        moved = _losses(model, loss_fn, other, rows)
        after = _first_gradient(moved, params)
        _compare_buffers(model, buffers)
        if not _same(losses[:1], moved[:1]) or not all(map(_same, before, after)):
            restore()
            place = where_it_mixes(model, lambda b: loss_fn(model, b), batch, other, _same)
            raise IncompatibleModel(
                "the loss or gradient of one example changes when another example changes, so none "
                f"can be clipped alone. {place} Look for statistics over the batch (means, norms, "
                "sorting, contrastive losses), and take them per example."
            )
        restore()
        if _depends_on_size(model, loss_fn, batch, rows):
            raise IncompatibleModel(
                "the loss of one example depends on how many examples are in the batch. loss_fn "
                "must not divide by the batch size: tacit divides the sum by the declared one."
            )
    return max(1, counter.total // rows)


def check_losses(losses: Tensor, rows: int, *, is_private: bool) -> None:
    """Raise unless `losses` is one loss for each of `rows` examples (not told if private)."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses must be a tensor, got {type(losses).__name__}.")
    if losses.dim() == 0:
        raise ValueError(
            "there must be one loss per example, got a single number: a mean or sum over the batch "
            'cannot be clipped per example. Use reduction="none" in loss_fn.'
        )
    if losses.shape != (rows,):
        wanted = "(examples,)" if is_private else f"({rows},) for {rows} examples"
        got = f"{losses.dim()} dimensions" if is_private else f"shape {tuple(losses.shape)}"
        raise ValueError(
            f"there must be one loss per example, shape {wanted}, got {got}. Sum or average over "
            "every other dimension, such as positions; the first dimension of the batch must count "
            "the examples."
        )
    if not losses.requires_grad:
        raise ValueError("the losses must depend on the model's trainable parameters.")


def fix(model: nn.Module) -> nn.Module:
    """A copy of `model` that keeps examples apart: BatchNorm becomes GroupNorm.

    Scale and shift carry over; running statistics do not, since GroupNorm takes its own from each
    example. InstanceNorm stops tracking running statistics. Build the optimizer from the copy.

    >>> fix(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))
    Sequential(
      (0): Conv2d(3, 16, kernel_size=(3, 3), stride=(1, 1))
      (1): GroupNorm(4, 16, eps=1e-05, affine=True...)
    )
    """
    if isinstance(model, _BatchNorm | _InstanceNorm):
        return _replacement(model)
    for layer in norm_layers(model).values():
        _channels(layer)  # before the copy: a layer without shapes cannot be copied
    fixed = copy.deepcopy(model)
    for parent in list(fixed.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm | _InstanceNorm):
                setattr(parent, name, _replacement(layer))
    return fixed


def _offense(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm):
        if layer.training or layer.running_mean is None:
            return (
                "mixes examples, so none can be clipped alone. Use nn.GroupNorm, or "
                "tacit.training.fix(model); a frozen, pretrained one may stay if it is in .eval()."
            )
    elif isinstance(layer, _InstanceNorm) and layer.track_running_stats and layer.training:
        return (
            "keeps running statistics of private examples in its buffers. Use "
            "track_running_stats=False, or tacit.training.fix(model)."
        )
    return None


def _channels(layer: nn.Module) -> int:
    channels = int(layer.num_features)  # type: ignore[arg-type]  # all norms here have it
    if channels == 0:
        raise ValueError(
            f"{type(layer).__name__} does not know its channels yet: run the model once, then fix."
        )
    return channels


def _replacement(layer: nn.Module) -> nn.Module:
    channels = _channels(layer)
    if isinstance(layer, _InstanceNorm):
        fixed = copy.deepcopy(layer)
        fixed.track_running_stats = False
        fixed.running_mean = fixed.running_var = fixed.num_batches_tracked = None
        return fixed
    # At least four channels in a group: a group of one value would be normalized to zero.
    most = max(1, min(32, channels // 4))
    groups = next(g for g in range(most, 0, -1) if channels % g == 0)
    norm = nn.GroupNorm(groups, channels, eps=float(layer.eps), affine=bool(layer.affine))  # type: ignore[arg-type]
    if layer.affine:
        weight = layer.weight
        norm.to(device=weight.device, dtype=weight.dtype)  # type: ignore[arg-type]
        norm.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        norm.requires_grad_(bool(weight.requires_grad))
    return norm.train(layer.training)


def _losses(model: nn.Module, loss_fn: Loss, batch: Batch, rows: int) -> Tensor:
    losses = loss_fn(model, batch)
    check_losses(losses, rows, is_private=False)
    return losses


def _with_changed_row(batch: Batch) -> Batch:
    """`batch` with its second row changed: noise on real numbers, another row's whole numbers."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] < 2:
            return tensor
        changed = tensor.clone()
        if tensor.is_floating_point():
            row = tensor[1].double()
            spread = 1.0 + row.nan_to_num(0.0, 0.0, 0.0).abs().amax() if row.numel() else 1.0
            noise = torch.randn(row.shape, dtype=torch.float64).to(row.device)
            changed[1] = (row + spread * noise).to(tensor.dtype)
        else:
            changed[1] = tensor[-1]
        return changed

    return map_tensors(change, batch)


def _first_gradient(losses: Tensor, params: list[nn.Parameter]) -> list[Tensor | None]:
    return list(torch.autograd.grad(losses[0], params, allow_unused=True))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = a.detach().double(), b.detach().double()
    size = float(a.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if a.numel() else 0.0
    # Far above rounding, far below what batch statistics do when a row moves by its own size.
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * size + 1e-12, equal_nan=True)


def _depends_on_size(model: nn.Module, loss_fn: Loss, batch: Batch, rows: int) -> bool:
    if rows < 2:
        return False
    fewer = map_tensors(lambda t: t[: rows - 1] if t.dim() else t, batch)
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        model.eval()  # dropout masks would differ between batches of two sizes
        with torch.no_grad():
            torch.manual_seed(2)
            first = loss_fn(model, batch)[:1]
            torch.manual_seed(3)
            if not _same(first, loss_fn(model, batch)[:1]):
                return False  # loss_fn draws at random: sizes cannot be compared
            return not _same(first, loss_fn(model, fewer)[:1])
    finally:
        for layer, training in modes:
            layer.training = training


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _compare_buffers(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name not in expected or not _same(expected[name], buffer):
            raise IncompatibleModel(
                f"buffer {name} takes values from the examples, which would leave the step without "
                "noise. Make it constant, compute it from public data, or use .eval()."
            )


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[Callable[[], None]]:
    kept = _copies(model)

    def restore() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

    try:
        yield restore
    finally:
        restore()


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward, parameters left out."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        seen = {p.untyped_storage().data_ptr() for p in params}
        self.total = 0

        def pack(tensor: Tensor) -> Any:  # Any: autograd stores whatever pack returns
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.total += math.prod(tensor.shape) * tensor.element_size()
            return tensor

        super().__init__(pack, lambda tensor: tensor)
