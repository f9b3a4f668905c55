"""Models by recipe: linear, MLP, CNN, layers of torch.nn, or a module of the user.

None of the built-in models mixes examples, so the gradient of each example can be clipped by
itself. Bounded (tempered) activations suit DP-SGD: they keep the activations, and with them the
gradients, small (Papernot et al. 2021, arXiv:2007.14191).
"""

import math
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tacit.experiments.layer_table import LAYERS, MOST_LAYERS, SEQUENTIAL, is_listed
from tacit.experiments.recipe import ModelSettings


def build(
    settings: ModelSettings, shape: tuple[int, ...], n_classes: int | None, *, seed: int
) -> nn.Module:
    """Return the model for records of `shape`, with weights that depend on `seed` only.

    >>> build(ModelSettings(kind="mlp", hidden=(5,)), (3,), 2, seed=0)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=3, out_features=5, bias=True)
      (2): ReLU()
      (3): Linear(in_features=5, out_features=2, bias=True)
    )
    """
    assert n_classes is not None  # data.load refuses targets without classes
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if settings.kind == "linear":
            return _linear(math.prod(shape), n_classes)
        if settings.kind == "mlp":
            return _mlp(settings, math.prod(shape), n_classes)
        if settings.kind == "cnn":
            return _cnn(settings, shape, n_classes)
        return _imported(settings.module, settings.arguments)


def describe(settings: ModelSettings, model: nn.Module, shape: tuple[int, ...]) -> str:
    """Return a sentence that names the architecture and the number of its parameters."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    inputs = " x ".join(str(size) for size in shape)
    detail = {
        "linear": "softmax regression",
        "mlp": f"MLP, hidden layers {list(settings.hidden)}, {settings.activation}",
        "cnn": f"CNN, channels {list(settings.channels)}, {settings.activation}",
        "module": settings.module,
    }[settings.kind]
    return f"{detail}, {inputs} inputs, {count:,} parameters"


def _linear(inputs: int, n_classes: int) -> nn.Module:
    layer = nn.Linear(inputs, n_classes)
    nn.init.zeros_(layer.weight)  # the problem is convex, so the start needs no randomness
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def _mlp(settings: ModelSettings, inputs: int, n_classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in settings.hidden:
        layers += [nn.Linear(inputs, width), _activation(settings)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, n_classes))


def _cnn(settings: ModelSettings, shape: tuple[int, ...], n_classes: int) -> nn.Module:
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


def _activation(settings: ModelSettings) -> nn.Module:
    return nn.Tanh() if settings.activation == "tanh" else nn.ReLU()


def _imported(name: str, arguments: dict[str, Any]) -> nn.Module:  # Any: the module's arguments
    """Return the module that the recipe names; `Recipe` has checked that its code is trusted."""
    package, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f'model.module must be "package.module:Name", got {name!r}.')
    try:
        made = _make(package, attribute, arguments)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as wrong:
        raise ValueError(f"model.module {name!r} cannot be made: {wrong}.") from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"model.module {name!r} must be an nn.Module, got {type(made).__name__}.")
    if not any(p.requires_grad for p in made.parameters()):
        raise ValueError(f"model.module {name!r} has no parameters to train.")
    return made


def _make(package: str, attribute: str, arguments: dict[str, Any]) -> object:  # Any: as above
    if is_listed(f"{package}:{attribute}"):
        if attribute == SEQUENTIAL:
            return _sequential(**arguments)
        return getattr(nn, attribute)(**arguments)
    found = getattr(import_module(package), attribute)
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    # A function that the trusted module only imported, such as os.system, is not its own code.
    if not is_class and getattr(found, "__module__", None) != package:
        raise TypeError(f"{attribute} is neither an nn.Module nor a function of {package}")
    return found(**arguments)


def _sequential(layers: list[list[Any]]) -> nn.Module:  # Any: JSON scalars and lists
    if len(layers) > MOST_LAYERS:
        raise ValueError(f"at most {MOST_LAYERS:,} layers are accepted")
    made: list[nn.Module] = []
    for given in layers:
        name, *arguments = given if isinstance(given, list | tuple) else [given]
        if name not in LAYERS:
            raise ValueError(f"{name!r} is not in the table of layers")
        made.append(getattr(nn, name)(*arguments))
    return nn.Sequential(*made)
