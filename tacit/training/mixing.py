"""Does one example see another? All the checks, in one place, before anything is spent.

Clipping bounds what one example contributes only if no other example's gradient depends on it, and
only if nothing but the gradient leaves the step. A model that breaks this rule is found

- by the type of a layer: BatchNorm, InstanceNorm with running statistics (`check_layers`);
- by a probe: change one example, and the loss and gradient of another must stay (`probe`), and if
  they do not, a second pass finds the layer to blame;
- by a call: the functions behind these layers, and writes into a table (`refuse_call`);
- by a trace: the gradient of one example's loss must reach that example's entries only
  (`refuse_dependence`), and losses must not depend on the size of the batch;
- by the shape of the losses: one per example (`tree.check_losses`).

The probe and the trace run the model on a few records. Whether they pass is a property of the
model's structure; no value that they compute leaves this package.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.errors import IncompatibleModel
from tacit.training.key import randomness
from tacit.training.rounding import as_double, exceeds_rounding, in_double, pieces
from tacit.training.tree import (
    Batch,
    LossFn,
    check_losses,
    map_rows,
    n_rows,
    name_of_kind,
    require_gradient,
    take_rows,
)

_NOT_ALONE = "so no example can be clipped alone"
_SPARSE = (
    "has sparse gradients, but a private gradient has noise in every entry. Use sparse=False: the "
    "result is the same."
)


def _family(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the base class of a torch layer class, such as that of all BatchNorm layers."""
    base = kind.__base__
    return kind if base is None or base is nn.Module else base


_BATCH_NORMS = tuple(
    {_family(k) for k in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)}
)
_INSTANCE_NORMS = tuple(
    {_family(k) for k in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)}
)


# By the type of a layer ---------------------------------------------------------------------------


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return BatchNorm-like layers by name: they may mix examples or store statistics of them."""
    kinds = (*_BATCH_NORMS, *_INSTANCE_NORMS)
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    return found | {layer.name: layer for layer in _keras_layers(model) if _is_keras_norm(layer)}


def _keras_layers(model: Any) -> Iterator[Any]:  # Any: Keras is not imported here
    """Yield the layers of a Keras model, which are no submodules to torch, and those inside."""
    if _is_keras(type(model)):
        for layer in getattr(model, "layers", ()):
            yield layer
            yield from _keras_layers(layer)


def _is_keras(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "keras" for base in kind.__mro__)


def _is_keras_norm(layer: object) -> bool:
    return _is_keras(type(layer)) and any(
        base.__name__ == "BatchNormalization" for base in type(layer).__mro__
    )


def check_layers(layers: dict[str, nn.Module]) -> None:
    """Raise `IncompatibleModel` if a layer, in its current mode, mixes or stores examples."""
    for name, layer in layers.items():
        if reason := _offense(layer):
            raise IncompatibleModel(f"{name or 'the model'} ({type(layer).__name__}) {reason}")


def refuse_sparse(model: nn.Module) -> None:
    """Raise `IncompatibleModel` for embeddings that ask for sparse gradients."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise IncompatibleModel(f"{name or 'the model'} ({type(layer).__name__}) {_SPARSE}")


def fix(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that keeps examples apart: BatchNorm becomes GroupNorm.

    Scale and shift are copied. Running statistics are not, since GroupNorm normalizes each example
    by itself. InstanceNorm stops tracking running statistics. Build the optimizer from the copy.

    >>> fix(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))
    Sequential(
      (0): Conv2d(3, 16, kernel_size=(3, 3), stride=(1, 1))
      (1): GroupNorm(4, 16, eps=1e-05, affine=True...)
    )
    """
    kinds = (*_BATCH_NORMS, *_INSTANCE_NORMS)
    if isinstance(model, kinds):
        return _replacement(model)
    for layer in norm_layers(model).values():
        if _is_keras(type(layer)):
            raise ValueError("fix cannot change a Keras model: build it with GroupNormalization.")
        _channels(layer)  # before the copy: a layer without shapes cannot be copied
    fixed = copy.deepcopy(model)
    for parent in list(fixed.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, kinds):
                setattr(parent, name, _replacement(layer))
    return fixed


def _offense(layer: Any) -> str | None:  # Any: a layer of torch or of Keras
    if _is_keras_norm(layer):
        if layer.trainable:
            return (
                f"mixes examples, {_NOT_ALONE}. Use GroupNormalization or LayerNormalization; a "
                "pretrained one may stay with trainable = False, which keeps its statistics."
            )
        return None
    if isinstance(layer, _BATCH_NORMS):
        if layer.training or layer.running_mean is None:
            return (
                f"mixes examples, {_NOT_ALONE}. Use nn.GroupNorm, or tacit.training.fix(model); "
                "a frozen, pretrained one may stay if it is in .eval()."
            )
    elif isinstance(layer, _INSTANCE_NORMS) and layer.track_running_stats and layer.training:
        return (
            "keeps running statistics of private examples in its buffers. Use "
            "track_running_stats=False, or tacit.training.fix(model)."
        )
    return None


def _channels(layer: nn.Module) -> int:
    channels = int(layer.num_features)  # type: ignore[arg-type]  # all norms here have it
    if channels == 0:
        raise ValueError(
            f"{type(layer).__name__} has no number of channels yet: run the model once, then fix."
        )
    return channels


def _replacement(layer: nn.Module) -> nn.Module:
    channels = _channels(layer)
    if isinstance(layer, _INSTANCE_NORMS):
        fixed: Any = copy.deepcopy(layer)  # Any: these attributes are of no public class
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


# By a probe ---------------------------------------------------------------------------------------


def probe(model: nn.Module, loss_fn: LossFn, batch: Batch, device: torch.device) -> int:
    """Check that examples do not mix; return the bytes of activations kept for one example.

    Raises `ValueError` if `loss_fn` does not give one loss per example, and `IncompatibleModel` if
    one example's loss or gradient changes with another example, or a buffer depends on data.
    """
    rows = n_rows(batch)
    params = [p for p in model.parameters() if p.requires_grad]
    named = [*model.named_buffers(), *model.named_modules()]  # before the program runs

    def first(batch: Batch) -> list[Tensor | None]:
        """Return the loss and the gradient of the first example."""
        restore()
        with randomness(1, device):
            losses = _losses(model, loss_fn, batch, rows)
            # Zeros where there is none: which parameters a row uses at all may be its own choice.
            gradients = torch.autograd.grad(losses[0], params, materialize_grads=True)
            if any(g.layout != torch.strided for g in gradients):
                raise IncompatibleModel(f"the model {_SPARSE}")
            return [losses[:1].detach(), *gradients]

    with restored_buffers(model) as restore, randomness(0, device):
        other = _with_changed_row(batch)
        counter = _SavedBytes(params)
        try:
            with counter:
                before = first(batch)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            before = first(batch)  # derivatives by torch.func allow no such hooks
        buffers = _copies(model)
        after = first(other)
        _compare_buffers(model, buffers, {name for name, _ in named})
        if (
            not all(map(_same, before, after))
            and exceeds_rounding(model, lambda: first(batch), before, after)
            and not _passes_in_double(model, loss_fn, batch, device)
        ):
            restore()
            names = {part: name for name, part in named if isinstance(part, nn.Module)}
            place = _where_it_mixes(model, lambda b: loss_fn(model, b), batch, other, names)
            raise IncompatibleModel(
                "the loss or gradient of one example changes when another example changes, "
                f"{_NOT_ALONE}. {place} Look for statistics over the batch (means, norms, "
                "sorting, contrastive losses), and take them per example."
            )
        restore()
        if _depends_on_size(model, loss_fn, batch, rows) and not _passes_in_double(
            model, loss_fn, batch, device
        ):
            raise IncompatibleModel(
                "the loss of one example depends on how many examples are in the batch. loss_fn "
                "must not divide by the batch size: tacit divides the sum by the declared one."
            )
    return max(1, counter.total // rows)


def _passes_in_double(
    model: nn.Module, loss_fn: LossFn, batch: Batch, device: torch.device
) -> bool:
    """Return whether the same program passes in float64, where rounding is 2^29 times smaller."""
    if all(p.dtype == torch.float64 for p in model.parameters()):
        return False
    try:
        with in_double(model) as double:
            probe(double, loss_fn, as_double(batch), device)
    except Exception:  # it mixes, or has types of its own
        return False
    return True


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore the model's buffers after the block, and when the yielded function is called."""
    kept = _copies(model)

    def restore() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:
                    buffer.copy_(kept[name])

    try:
        yield restore
    finally:
        restore()


def _losses(model: nn.Module, loss_fn: LossFn, batch: Batch, rows: int) -> Tensor:
    losses = loss_fn(model, batch)
    check_losses(losses, rows)
    require_gradient(losses)
    return losses


def _with_changed_row(batch: Batch) -> Batch:
    """Return `batch` with its second row changed: noise added, or integers of another row."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.shape[0] < 2:
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

    return map_rows(change, batch)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return a is b
    a, b = a.detach(), b.detach()
    largest = (float(x.nan_to_num(0.0, 0.0, 0.0).abs().amax()) for x in pieces(a) if x.numel())
    # Far above rounding, far below what batch statistics do when a row moves by its own size.
    limits = {"rtol": 1e-3, "atol": 1e-4 * max(largest, default=0.0) + 1e-12, "equal_nan": True}
    return all(torch.allclose(x, y, **limits) for x, y in zip(pieces(a), pieces(b), strict=True))


def _depends_on_size(model: nn.Module, loss_fn: LossFn, batch: Batch, rows: int) -> bool:
    if rows < 2:
        return False
    fewer = take_rows(batch, 0, rows - 1)
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        model.eval()  # dropout masks would differ between batches of two sizes
        device = next(model.parameters()).device

        def first(batch: Batch, seed: int = 2) -> list[Tensor | None]:
            with randomness(seed, device):
                return [loss_fn(model, batch)[:1].detach()]

        before, after = first(batch), first(fewer)
        if all(map(_same, before, after)) or not all(map(_same, before, first(batch, seed=3))):
            return False  # if loss_fn draws at random, sizes cannot be compared
        return exceeds_rounding(model, lambda: first(batch), before, after)
    finally:
        for layer, training in modes:
            layer.training = training


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _compare_buffers(model: nn.Module, expected: dict[str, Tensor], names: set[str]) -> None:
    for name, buffer in model.named_buffers():
        if name not in expected or not _same(expected[name], buffer):
            # A name that was made while the program ran may hold a value.
            which = f"buffer {name}" if name in names else "a buffer"
            raise IncompatibleModel(
                f"{which} takes values from the examples, which would leave the step without "
                "noise. Make it constant, compute it from public data, or use .eval()."
            )


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves for the backward pass, without the parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        seen = {p.untyped_storage().data_ptr() for p in params}
        self.total = 0

        def pack(tensor: Tensor) -> Any:  # Any: autograd stores whatever pack returns
            try:
                place = tensor.untyped_storage().data_ptr()
            except RuntimeError:  # inside a transform of torch.func, which hides the memory
                place = id(tensor)
            if place not in seen:
                seen.add(place)
                self.total += math.prod(tensor.shape) * tensor.element_size()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


class _Passed(NamedTuple):
    """The first example's entries in the inputs and outputs of one layer."""

    layer: nn.Module
    into: list[Tensor]
    out: list[Tensor]


def _where_it_mixes(
    model: nn.Module,
    forward: Callable[[Batch], Any],
    batch: Batch,
    changed: Batch,
    names: dict[nn.Module, str],
) -> str:
    """Return a description of the layer that mixes examples, for an error message.

    `changed` is `batch` with its second example changed. A layer mixes if the first example's input
    is the same for both batches and its output is not; the deepest such layer is named. If there is
    none, the loss itself mixes. Private values are compared and never shown.
    """
    before, after = _passes(model, forward, batch), _passes(model, forward, changed)
    # Layers end in the same order both times, inner ones before those that hold them.
    for one, other in zip(before, after, strict=False):
        if _equal(one.into, other.into) and not _equal(one.out, other.out):
            if one.layer is model:
                return f"It happens in the forward of {name_of_kind(type(model))} itself."
            if one.layer in names:
                return f"It happens in {names[one.layer]} ({name_of_kind(type(one.layer))})."
            return "It happens in a layer that was added while the model ran."
    return "It happens after the model: in loss_fn."


def _passes(model: nn.Module, forward: Callable[[Batch], Any], batch: Batch) -> list[_Passed]:
    seen: list[_Passed] = []

    def look(layer: nn.Module, args: Any, options: Any, out: Any) -> None:
        seen.append(_Passed(layer, _first_rows((args, options)), _first_rows(out)))

    hooks = [
        layer.register_forward_hook(look, with_kwargs=True)
        for layer in model.modules()
        if not isinstance(layer, nn.ModuleList | nn.ModuleDict)  # never called
    ]
    try:
        with torch.enable_grad():  # a loss may take gradients of its own
            torch.manual_seed(1)  # the same dropout both times; the caller restores the stream
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _first_rows(values: Any) -> list[Tensor]:  # Any: what layers take and give
    if isinstance(values, Tensor):
        return [values[:1].detach()] if values.dim() else []
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, tuple | list):
        return [row for value in values for row in _first_rows(value)]
    return []


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


# By a call ----------------------------------------------------------------------------------------


def refuse_call(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `IncompatibleModel` for a call that mixes examples or writes them into the model."""
    place = {F.embedding: 3, F.embedding_bag: 3}.get(func)
    if place is not None and _argument("max_norm", place, args, kwargs) is not None:
        raise IncompatibleModel(
            "Embedding with max_norm rewrites its table by what the batch holds. Drop max_norm."
        )
    if func is F.instance_norm and _argument("running_mean", 1, args, kwargs) is not None:
        raise IncompatibleModel(
            "InstanceNorm with track_running_stats keeps statistics of the examples. "
            "Use track_running_stats=False."
        )


def refuse_batch_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `IncompatibleModel` for batch statistics of examples; of weights, they mix nothing."""
    if func is F.batch_norm and _argument("training", 5, args, kwargs):
        raise IncompatibleModel(
            f"BatchNorm in training mode mixes the examples of a batch, {_NOT_ALONE}. "
            "Use nn.GroupNorm, or put the layer in eval mode."
        )


def _argument(name: str, place: int, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


# By a trace ---------------------------------------------------------------------------------------


def refuse_dependence(names: Iterable[str]) -> None:
    """Raise `IncompatibleModel`, stating that examples mix where parameters `names` are used."""
    raise IncompatibleModel(
        f"The loss of one example depends on others where {', '.join(names) or 'a shared tensor'} "
        f"is used, {_NOT_ALONE}. Look for a layer or a loss that mixes or reorders the examples "
        "of a batch (BatchNorm, a mean over the batch)."
    )


def refuse_size_dependence() -> None:
    """Raise `IncompatibleModel`, stating that an example's loss depends on the batch size."""
    raise IncompatibleModel(
        "The loss of an example depends on which others are in the batch, "
        f"{_NOT_ALONE}. Look for a statistic over the batch in the model or in the loss."
    )
