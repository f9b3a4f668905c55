"""What of this package can be used here: Triton and private names of torch may be missing."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tacit.training.gpu import noise
    from tacit.training.grid_noise import NoiseGrid


def usable(tensor: Tensor) -> bool:
    """Return True if the fused kernels support this tensor: CUDA, float, Triton installed."""
    is_float = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return tensor.is_cuda and is_float and has_triton()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def is_traced(tensor: Tensor) -> bool:
    """Return True for a tensor without data, which the compiler uses to trace a computation."""
    try:
        from torch._subclasses import FakeTensor
    except ImportError:  # then this package does not trace anything
        return False
    return isinstance(tensor, FakeTensor)


def foreach(method: str) -> Callable[..., None] | None:
    """Return torch's function that applies an in-place method to a list of tensors in one launch.

    `method` is the method's name, such as "add_". torch.optim uses these functions too, but their
    names are private. Return None if this version of torch has none for the method.
    """
    return getattr(torch, f"_foreach_{method}", None)


def chacha_rounds(*, is_full: bool) -> int:
    """Return the number of rounds of the noise kernel's generator: 12, or all 20 of ChaCha20.

    No attack on more than 7 rounds is better than a search for the key (Aumasson et al. 2008).
    """
    return 20 if is_full else 12


def noise_blocks(
    tensors: Sequence[Tensor],
    grids: Sequence["NoiseGrid"],
    factor: float,
    rounds: int,
    **banded: Any,  # Any: the options of `BandedBlocks`
) -> "noise.Blocks | None":
    """Return `Blocks`, which release all tensors with Gaussian noise on their grids in one launch.

    With the options `banded`, they are `BandedBlocks`. Return None if the noise kernel does not
    support these tensors.
    """
    if not all(usable(tensor) for tensor in tensors) or len({t.device for t in tensors}) != 1:
        return None
    from tacit.training.gpu import noise

    if not all(noise.takes(t) for t in tensors):
        return None
    if banded:
        from tacit.training.gpu.banded_blocks import BandedBlocks

        return BandedBlocks(tensors, grids, factor, rounds, **banded)
    return noise.Blocks(tensors, grids, factor, rounds)
