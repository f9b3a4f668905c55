"""How far one example may move the sum: flat, per layer, per group, or normalized.

A rule sorts the trainable parameters into groups and turns each example's squared gradient norms,
one per group, into factors. One example then adds at most `clip_norms[g]` to group g, so at most
`l2_sensitivity` to the whole sum: adding or removing it moves the sum by no more than that.

Noise of standard deviation `noise_multiplier * noise_scales[g]` on group g makes the release a
Gaussian mechanism with that multiplier. Proof: divide group g by s_g = noise_scales[g]; one example
then moves the vector by sqrt(sum_g (C_g / s_g)^2) = 1, and the noise has one standard deviation
everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tacit import _check

Groups = tuple[tuple[str, ...], ...]
Noise = Literal["equal", "proportional"] | tuple[float, ...]

# Relative error allowed for in a float32 norm and contraction (a few hundred roundings).
FLOAT32_ROUNDING = 2.0**-18


class Clip(Protocol):
    """What the engines, the noise and the accountant need to know of a clip rule."""

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """Largest norm of one example's contribution to each group."""
        ...

    @property
    def l2_sensitivity(self) -> float:
        """Largest L2 norm of one example's contribution to the whole sum."""
        ...

    @property
    def noise_scales(self) -> tuple[float, ...]:
        """Standard deviation of each group's noise at noise multiplier 1."""
        ...

    def groups(self, names: Sequence[str]) -> Groups:
        """The trainable parameters `names`, sorted into groups; each in exactly one."""
        ...

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        """Factors for squared norms of shape (groups, examples), same shape, in [0, C/norm].

        The norm is first raised by `rounding`, the relative error of its computation, so that
        rounding can only shorten a contribution. A non-finite norm has factor zero.
        """
        ...


@dataclass(frozen=True)
class Flat:
    """One bound on the norm of the whole gradient: factor min(1, C / norm).

    Abadi et al. 2016, Algorithm 1. A zero gradient keeps factor 1.

    Examples
    --------
    >>> Flat(2.0).factors(torch.tensor([[1.0, 64.0, float("inf")]])).round(decimals=3)
    tensor([[1.0000, 0.2500, 0.0000]])
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _check.positive(clip_norm=self.clip_norm)

    @property
    def clip_norms(self) -> tuple[float, ...]:
        return (self.clip_norm,)

    @property
    def l2_sensitivity(self) -> float:
        return self.clip_norm

    @property
    def noise_scales(self) -> tuple[float, ...]:
        return (self.clip_norm,)

    def groups(self, names: Sequence[str]) -> Groups:
        return (tuple(names),)

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        return _shorten(squared_norms, self.clip_norms, rounding)


@dataclass(frozen=True)
class PerGroup:
    """Own bound for each group of parameters: factor min(1, C_g / norm_g) in group g.

    One example adds at most C_g to group g, hence at most sqrt(sum C_g^2) to the whole.

    Parameters
    ----------
    groups_by_prefix
        For each group, the parameter or module names it holds ("encoder" holds "encoder.0.weight";
        "" holds everything). The longest matching name decides.
    clip_norms
        One bound for each group.
    noise
        "equal": the same standard deviation everywhere; "proportional": in proportion to the clip
        norm; or relative weights, one for each group.
    """

    groups_by_prefix: Groups
    clip_norms: tuple[float, ...]
    noise: Noise = "equal"

    def __post_init__(self) -> None:
        prefixes = tuple(tuple(group) for group in self.groups_by_prefix)
        object.__setattr__(self, "groups_by_prefix", prefixes)
        object.__setattr__(self, "clip_norms", _norms(self.clip_norms))
        _same_length("clip_norms", self.clip_norms, "groups_by_prefix", prefixes)
        _check_noise(self.noise, self.clip_norms)

    @property
    def l2_sensitivity(self) -> float:
        return math.hypot(*self.clip_norms)

    @property
    def noise_scales(self) -> tuple[float, ...]:
        return _noise_scales(self.noise, self.clip_norms)

    def groups(self, names: Sequence[str]) -> Groups:
        found: list[list[str]] = [[] for _ in self.groups_by_prefix]
        for name in names:
            found[self._group_of(name)].append(name)
        return tuple(tuple(group) for group in found)

    def _group_of(self, name: str) -> int:
        matches = [
            (len(prefix), index)
            for index, group in enumerate(self.groups_by_prefix)
            for prefix in group
            if prefix in ("", name) or name.startswith(prefix + ".")
        ]
        if not matches:
            raise ValueError(
                f"groups_by_prefix must hold every trainable parameter, but not {name!r}. "
                'Add it, or a group ("",) for the rest.'
            )
        return max(matches)[1]

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        return _shorten(squared_norms, self.clip_norms, rounding)


@dataclass(frozen=True)
class PerLayer:
    """Own bound for each layer (module with trainable parameters), in the model's order.

    McMahan et al. 2018 (arXiv:1710.06963), section 2.2. `PerLayer.split` gives every layer the same
    bound. Noise as in `PerGroup`.
    """

    clip_norms: tuple[float, ...]
    noise: Noise = "equal"

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norms", _norms(self.clip_norms))
        _check_noise(self.noise, self.clip_norms)

    @classmethod
    def split(
        cls, model: torch.nn.Module, clip_norm: float, *, noise: Noise = "equal"
    ) -> "PerLayer":
        """Equal bounds whose L2 sensitivity is `clip_norm`: C / sqrt(layers) for each layer."""
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        layers = len(_layers(names))
        share = _check.positive(clip_norm=clip_norm) / math.sqrt(max(1, layers))
        return cls((share,) * layers, noise)

    @property
    def l2_sensitivity(self) -> float:
        return math.hypot(*self.clip_norms)

    @property
    def noise_scales(self) -> tuple[float, ...]:
        return _noise_scales(self.noise, self.clip_norms)

    def groups(self, names: Sequence[str]) -> Groups:
        layers = _layers(names)
        if len(layers) != len(self.clip_norms):
            raise ValueError(
                f"clip_norms must have one entry for each of the {len(layers)} layers with "
                f"trainable parameters, got {len(self.clip_norms)}: {', '.join(layers)}."
            )
        return tuple(tuple(layer) for layer in layers.values())

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        return _shorten(squared_norms, self.clip_norms, rounding)


@dataclass(frozen=True)
class Automatic:
    """Normalizes instead of clipping: factor C / (norm + stability).

    AUTO-S of Bu et al. 2023 (arXiv:2206.07136, section 4.2). Every contribution is shorter than C,
    so the sensitivity is that of `Flat`; only C times the learning rate matters.
    """

    clip_norm: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        _check.positive(clip_norm=self.clip_norm)
        _check.positive(stability=self.stability, advice="Zero would divide by a zero norm.")

    @property
    def clip_norms(self) -> tuple[float, ...]:
        return (self.clip_norm,)

    @property
    def l2_sensitivity(self) -> float:
        return self.clip_norm

    @property
    def noise_scales(self) -> tuple[float, ...]:
        return (self.clip_norm,)

    def groups(self, names: Sequence[str]) -> Groups:
        return (tuple(names),)

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        norms = squared_norms.clamp_min(0).sqrt() * (1 + rounding)
        return (self.clip_norm / (norms + self.stability)).nan_to_num(nan=0.0)


def _shorten(squared_norms: Tensor, clip_norms: tuple[float, ...], rounding: float) -> Tensor:
    # factor * norm <= C: either norm * (1 + rounding) <= C and the factor is 1, or the factor is
    # C / (norm * (1 + rounding)). An infinite norm gives 0 by itself.
    norms = squared_norms.clamp_min(0).sqrt() * (1 + rounding)
    if len(clip_norms) == 1:
        factors = clip_norms[0] / norms.clamp_min(clip_norms[0])
    else:
        bounds = squared_norms.new_tensor(clip_norms).unsqueeze(1)  # (groups, 1)
        factors = bounds / torch.maximum(norms, bounds)
    return factors.nan_to_num(nan=0.0)


def _norms(values: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or not values:
        raise TypeError(f"clip_norms must be a non-empty sequence, got {type(values).__name__}.")
    return tuple(_check.positive(clip_norms=value) for value in values)


def _same_length(name: str, values: Sequence[object], other: str, others: Sequence[object]) -> None:
    if len(values) != len(others):
        raise ValueError(
            f"{name} must have as many entries as {other}, got {len(values)} and {len(others)}."
        )


def _check_noise(noise: Noise, clip_norms: tuple[float, ...]) -> None:
    if isinstance(noise, str):
        if noise not in ("equal", "proportional"):
            raise ValueError(f"noise must be 'equal', 'proportional' or weights, got {noise!r}.")
        return
    _same_length("noise", noise, "clip_norms", clip_norms)
    for weight in noise:
        _check.positive(noise=weight)


def _noise_scales(noise: Noise, clip_norms: tuple[float, ...]) -> tuple[float, ...]:
    """Scales s_g in the given proportions with sum_g (C_g / s_g)^2 = 1."""
    if isinstance(noise, str):
        weights = clip_norms if noise == "proportional" else (1.0,) * len(clip_norms)
    else:
        weights = noise
    ratio = math.hypot(*(c / w for c, w in zip(clip_norms, weights, strict=True)))
    return tuple(w * ratio for w in weights)


def _layers(names: Sequence[str]) -> dict[str, list[str]]:
    """Parameter names by the module that owns them, in order."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers
