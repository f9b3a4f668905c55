"""Models by recipe: linear, MLP, a small CNN, or any importable module.

None of them mixes examples, so each can be clipped alone. Bounded (tempered) activations suit
DP-SGD: they keep the activations, and with them the gradients, small (Papernot et al. 2021,
arXiv:2007.14191).
"""

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tacit.experiments.settings import Model

if TYPE_CHECKING:
    from torch import nn


def build(settings: Model, shape: tuple[int, ...], n_classes: int, *, seed: int) -> "nn.Module":
    """The model for records of `shape`, with weights that depend on `seed` alone.

    >>> from tacit.experiments.settings import Model
    >>> build(Model(kind="mlp", hidden=(5,)), (3,), 2, seed=0)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=3, out_features=5, bias=True)
      (2): ReLU()
      (3): Linear(in_features=5, out_features=2, bias=True)
    )
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if settings.kind == "linear":
            return _linear(math.prod(shape), n_classes)
        if settings.kind == "mlp":
            return _mlp(settings, math.prod(shape), n_classes)
        if settings.kind == "cnn":
            return _cnn(settings, shape, n_classes)
        return _imported(settings.module, settings.arguments)


def describe(settings: Model, model: "nn.Module", shape: tuple[int, ...]) -> str:
    """The architecture in words, with its number of parameters."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    inputs = " x ".join(str(size) for size in shape)
    detail = {
        "linear": "softmax regression",
        "mlp": f"MLP, hidden layers {list(settings.hidden)}, {settings.activation}",
        "cnn": f"CNN, channels {list(settings.channels)}, {settings.activation}",
        "module": settings.module,
    }[settings.kind]
    return f"{detail}, {inputs} inputs, {count:,} parameters"


def _linear(inputs: int, n_classes: int) -> "nn.Module":
    from torch import nn

    layer = nn.Linear(inputs, n_classes)
    nn.init.zeros_(layer.weight)  # convex: the start does not matter, so no noise from it either
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _mlp(settings: Model, inputs: int, n_classes: int) -> "nn.Module":
    from torch import nn

    layers: list[nn.Module] = [nn.Flatten()]
    for width in settings.hidden:
        layers += [nn.Linear(inputs, width), _activation(settings)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, n_classes))


def _cnn(settings: Model, shape: tuple[int, ...], n_classes: int) -> "nn.Module":
    from torch import nn

    if len(shape) not in (2, 3):
        raise ValueError(f"model.kind cnn needs images, but a record has shape {shape}. Use mlp.")
    inputs, height, width = shape if len(shape) == 3 else (1, *shape)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, height))] if len(shape) == 2 else []
    for channels in settings.channels:
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), _activation(settings)]
        layers.append(nn.MaxPool2d(2))
        inputs, height, width = channels, height // 2, width // 2
    if not height * width:
        raise ValueError("model.channels has too many layers: each halves the image.")
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * height * width, n_classes))


def _activation(settings: Model) -> "nn.Module":
    from torch import nn

    return nn.Tanh() if settings.activation == "tanh" else nn.ReLU()


def _imported(name: str, arguments: dict[str, Any]) -> "nn.Module":  # Any: the module's own
    from torch import nn

    package, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f'model.module must be "package.module:Name", got {name!r}.')
    try:
        made = getattr(import_module(package), attribute)(**arguments)
    except (ImportError, AttributeError, TypeError) as wrong:
        raise ValueError(f"model.module {name!r} cannot be made: {wrong}.") from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"model.module {name!r} must be an nn.Module, got {type(made).__name__}.")
    if not any(p.requires_grad for p in made.parameters()):
        raise ValueError(f"model.module {name!r} has no parameters to train.")
    return made
