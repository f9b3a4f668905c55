"""Layers that need a batch, such as BatchNorm: refused by their type, and replaced by `fix`.

They give other values for one example than for a batch, or keep statistics of examples in buffers.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from tacit.errors import IncompatibleModel

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
