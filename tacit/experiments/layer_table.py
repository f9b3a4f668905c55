"""The classes that a recipe or a model file may name: layers of torch.nn, from a written table.

A recipe with `model.kind = "module"` names a class. Importing and calling whatever a file names
would let the file run any code, so a file may name only the classes of this table, with JSON
scalars and lists as arguments. Other modules have to be named by the person who opens the file:
`trust_code` in Python, `--trust-code MODULE` on the command line.

The table holds layers whose constructor allocates its own parameters and does nothing else. Layers
that repeat a part a given number of times (recurrent layers, transformers) are left out: a file
could ask for a billion repetitions. `Sequential` takes a list of layers, each a list of the layer's
name and its positional arguments.
"""

from collections.abc import Collection, Mapping
from typing import Any

TORCH = "torch.nn"
SEQUENTIAL = "Sequential"
MOST_LAYERS = 1000

_NAMES = (
    "Linear Identity Flatten Unflatten Embedding EmbeddingBag Conv1d Conv2d Conv3d "
    "ConvTranspose1d ConvTranspose2d ConvTranspose3d MaxPool1d MaxPool2d MaxPool3d AvgPool1d "
    "AvgPool2d AvgPool3d LPPool1d LPPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d "
    "AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d GroupNorm "
    "LayerNorm RMSNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm ReLU "
    "ReLU6 LeakyReLU PReLU RReLU ELU CELU SELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh "
    "Hardshrink Softshrink Tanhshrink Threshold Sigmoid LogSigmoid Tanh Softplus Softsign GLU "
    "Softmax LogSoftmax Softmin Dropout Dropout1d Dropout2d Dropout3d AlphaDropout "
    "PixelShuffle PixelUnshuffle Upsample ChannelShuffle ZeroPad1d ZeroPad2d ZeroPad3d "
    "ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d "
    "ReplicationPad1d ReplicationPad2d "
)
LAYERS = frozenset(_NAMES.split())


def is_listed(module: str) -> bool:
    """Return whether `module`, written "package:Name", is a class of the table."""
    package, _, name = module.partition(":")
    return package == TORCH and (name in LAYERS or name == SEQUENTIAL)


def require_trusted(
    module: str, arguments: Mapping[str, Any], trust_code: Collection[str]
) -> None:  # Any: what TOML and JSON hold
    """Raise `ValueError` unless `module` is in the table or its package is in `trust_code`."""
    package = module.partition(":")[0]
    if package in trust_code:
        return
    if not is_listed(module):
        raise ValueError(
            f"model.module {module!r} is not in the table of layers, and a file may not choose "
            f"what code runs. If you trust that code, add: --trust-code {package} "
            f"(in Python: trust_code=[{package!r}])."
        )
    for name, value in arguments.items():
        if not _is_plain(value, depth=3):
            raise ValueError(f"model.arguments.{name} must be a number, text or list of these.")


def _is_plain(value: object, *, depth: int) -> bool:
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth=depth - 1) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
