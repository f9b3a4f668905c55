"""Clip rules, which bound how far one example may move the sum, and the clipped sum itself.

A rule sorts the trainable parameters into groups and turns each example's squared gradient norms,
one per group, into factors. One example then adds at most `clip_norms[g]` to group g, so at most
`l2_sensitivity` to the whole sum: adding or removing it moves the sum by no more than that.

Noise of standard deviation `noise_multiplier * noise_scales[g]` on group g makes the release a
Gaussian mechanism with that multiplier. Proof: divide group g by s_g = noise_scales[g]; one example
then moves the vector by sqrt(sum_g (C_g / s_g)^2) = 1, and the noise has one standard deviation
everywhere.

The rules are `Flat`, `PerLayer` and `PerGroup` here, and `Automatic` in `automatic_clipping`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tacit import _check

Groups = tuple[tuple[str, ...], ...]
Noise = Literal["equal", "proportional"] | tuple[float, ...]

# Relative error allowed for in a norm, by the dtype that it is computed in. In float32, a squared
# norm has at most BLOCK + 10 roundings of 2^-24 (`arithmetic.block_squares`, products, the sum over
# parameters), half of which is the error of the norm; the factor and the scaled gradient have six
# more: 75 roundings, and there is room for 128. In 16 bits, factors are rounded too.
FLOAT32_ROUNDING = 2.0**-17
ROUNDING = {
    torch.float64: 2.0**-40,
    torch.float32: FLOAT32_ROUNDING,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-8,
}

# Added to squared norms: squares below the range of float32 are lost, up to 2^36 of 2^-126.
TINY = 2.0**-90


class Clip(Protocol):
    """A clip rule: bounds on one example's contribution, and the noise scales that fit them."""

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """Largest norm of one example's contribution to each group of parameters."""
        ...

    @property
    def l2_sensitivity(self) -> float:
        """Largest L2 norm of one example's contribution to the sum over all groups."""
        ...

    @property
    def noise_scales(self) -> tuple[float, ...]:
        """Standard deviation of each group's noise at noise multiplier 1."""
        ...

    def groups(self, names: Sequence[str]) -> Groups:
        """Sort the parameters called `names` into groups; each is in exactly one group."""
        ...

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        """Return the factors that scale each example's gradient in each group to its bound.

        `squared_norms` and the result have shape (groups, examples). A factor is between 0 and
        C / norm, with C the group's bound and norm the gradient's norm in the group; a non-finite
        norm has factor zero. The norm is first raised by `rounding`, the relative error of its
        computation, so that rounding can only shorten a contribution.
        """
        ...


@dataclass(frozen=True)
class OneBound:
    """Base of the rules with a single bound C on the norm of the whole gradient."""

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


@dataclass(frozen=True)
class Flat(OneBound):
    """A clip rule with one bound C on the norm of the whole gradient: factor min(1, C / norm).

    Abadi et al. 2016, Algorithm 1. A zero gradient keeps factor 1.

    Examples
    --------
    >>> Flat(2.0).factors(torch.tensor([[1.0, 64.0, float("inf")]])).round(decimals=3)
    tensor([[1.0000, 0.2500, 0.0000]])
    """

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        return _shorten(squared_norms, self.clip_norms, rounding)


class _ManyBounds:
    """Base of the rules that have a separate bound C_g for each group g of parameters.

    One example adds at most C_g to group g, hence at most sqrt(sum_g C_g^2) to the whole sum.
    """

    clip_norms: tuple[float, ...]
    noise: Noise

    def __post_init__(self) -> None:
        if not isinstance(self.clip_norms, Sequence) or not self.clip_norms:
            kind = type(self.clip_norms).__name__
            raise TypeError(f"clip_norms must be a non-empty sequence, got {kind}.")
        norms = tuple(_check.positive(clip_norms=norm) for norm in self.clip_norms)
        object.__setattr__(self, "clip_norms", norms)
        if isinstance(self.noise, str):
            _check.one_of(("equal", "proportional"), noise=self.noise)
            return
        _same_length("noise", self.noise, "clip_norms", self.clip_norms)
        for weight in self.noise:
            _check.positive(noise=weight)

    @property
    def l2_sensitivity(self) -> float:
        return math.hypot(*self.clip_norms)

    @property
    def noise_scales(self) -> tuple[float, ...]:
        """Noise scales s_g in the proportions set by `noise`: sum_g (C_g / s_g)^2 = 1."""
        weights = self.noise
        if isinstance(weights, str):
            is_equal = weights == "equal"
            weights = (1.0,) * len(self.clip_norms) if is_equal else self.clip_norms
        ratio = math.hypot(*(c / w for c, w in zip(self.clip_norms, weights, strict=True)))
        return tuple(w * ratio for w in weights)

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        return _shorten(squared_norms, self.clip_norms, rounding)


@dataclass(frozen=True)
class PerGroup(_ManyBounds):
    """A clip rule with a bound C_g for each group g of parameters: factor min(1, C_g / norm_g).

    Parameters
    ----------
    groups_by_prefix
        For each group, the parameter or module names it holds ("encoder" holds "encoder.0.weight";
        "" holds everything). The longest matching name decides.
    clip_norms
        The bounds C_g, one for each group.
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
        super().__post_init__()
        _same_length("clip_norms", self.clip_norms, "groups_by_prefix", prefixes)

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


@dataclass(frozen=True)
class PerLayer(_ManyBounds):
    """A clip rule with one bound for each layer (module with parameters), in the model's order.

    McMahan et al. 2018 (arXiv:1710.06963), section 2.2. `PerLayer.split` gives every layer the same
    bound. The option `noise` is that of `PerGroup`.
    """

    clip_norms: tuple[float, ...]
    noise: Noise = "equal"

    @classmethod
    def split(cls, model: nn.Module, clip_norm: float, *, noise: Noise = "equal") -> "PerLayer":
        """Return a rule with L2 sensitivity `clip_norm`: bound C / sqrt(layers) for each layer."""
        layers = len(_layers([name for name, p in model.named_parameters() if p.requires_grad]))
        share = _check.positive(clip_norm=clip_norm) / math.sqrt(max(1, layers))
        return cls((share,) * layers, noise)

    def groups(self, names: Sequence[str]) -> Groups:
        layers = _layers(names)
        if len(layers) != len(self.clip_norms):
            raise ValueError(
                f"clip_norms must have one entry for each of the {len(layers)} layers with "
                f"trainable parameters, got {len(self.clip_norms)}: {', '.join(layers)}."
            )
        return tuple(tuple(layer) for layer in layers.values())


@dataclass(frozen=True, repr=False)
class ClippedSum:
    """Sum of clipped per-example gradients. Private: must not be released without noise.

    Attributes
    ----------
    sums
        The sum for each trainable parameter, by name: float64 for engines whose rounding is bounded
        (`arithmetic`) and for float64 parameters, else float32. In a run on the CPU, the sum of a
        large table may be a sparse tensor, of the rows that were used.
    within
        Number of examples whose norm is at most the clip norm, for each group, shape (groups,).
        One example changes each count by at most 1. Adaptive clipping releases them with noise.
    loss
        Sum of the examples' losses in whole units, if the run releases it (`noisy_loss`); else 0.
    """

    sums: dict[str, Tensor]
    within: Tensor
    loss: int = 0

    @classmethod
    def zeros(
        cls, model: nn.Module, clip: Clip | None = None, *, dtype: torch.dtype | None = None
    ) -> "ClippedSum":
        """Return the sum over no examples, that of an empty lot; for `dtype` see `zeros_for`."""
        parameters = trainable(model)
        device = next(iter(parameters.values())).device
        groups = 1 if clip is None else len(clip.clip_norms)
        sums = {name: zeros_for(p, dtype) for name, p in parameters.items()}
        return cls(sums, torch.zeros(groups, device=device))

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return ClippedSum(sums, self.within + other.within, self.loss + other.loss)

    def __iadd__(self, other: "ClippedSum") -> "ClippedSum":
        """Add another sum in place, so that adding two sums allocates no third one."""
        for name, value in self.sums.items():
            if value.is_sparse and not other.sums[name].is_sparse:
                self.sums[name] = value.to_dense()
        call_each("add_", list(self.sums.values()), [other.sums[name] for name in self.sums])
        self.within.add_(other.within)
        return replace(self, loss=self.loss + other.loss) if other.loss else self

    def counts(self) -> tuple[Tensor, ...]:
        """Return what a step may release beside the gradient: `within`, and `loss` unless 0."""
        return (self.within, torch.tensor([self.loss])) if self.loss else (self.within,)

    def __repr__(self) -> str:
        return f"ClippedSum({len(self.sums)} parameters, private)"


def rule_of(clip_norm: Any) -> Clip:  # Any: what `make_private` takes
    """Return the clip rule of the first step: `Flat` for a number, the `start` of what changes."""
    start = getattr(clip_norm, "start", clip_norm)
    if isinstance(start, int | float):
        return Flat(start)
    if not hasattr(start, "noise_scales"):
        raise TypeError(
            "clip_norm must be a number, a clip rule of tacit.training such as PerLayer, or "
            f"AdaptiveClip or ScheduledClip of one of these, got {type(start).__name__}."
        )
    return start


def scaled(clip: Clip, factors: Sequence[float]) -> Clip:
    """Return a clip rule like `clip`, with the clip norm of each group times its factor.

    >>> scaled(Flat(2.0), [0.5])
    Flat(clip_norm=1.0)
    """
    if all(factor == 1 for factor in factors):
        return clip
    if isinstance(clip, OneBound):
        return replace(clip, clip_norm=clip.clip_norm * factors[0])  # type: ignore[return-value]  # every subclass is a rule
    if isinstance(clip, PerGroup | PerLayer):
        pairs = zip(clip.clip_norms, factors, strict=True)
        return replace(clip, clip_norms=tuple(norm * factor for norm, factor in pairs))
    raise TypeError(f"a {type(clip).__name__} clip rule cannot follow a schedule.")


def group_of(clip: Clip, names: Sequence[str]) -> dict[str, int]:
    """Return, for each parameter name, the number of its group under the rule `clip`."""
    return {name: g for g, group in enumerate(clip.groups(names)) for name in group}


def factors_of(
    clip: Clip, squared_norms: Tensor, mask: Tensor, *, rounding: float, finite: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return clip factors, shape (groups, examples), and the `within` counts of a `ClippedSum`.

    `finite` marks the examples whose gradient is finite; None means that all are. Factors are zero
    where `mask` is False (padding) or `finite` is False. An example with a non-finite gradient in
    one group adds nothing to any group.
    """
    usable = mask if finite is None else mask & finite  # (examples,)
    factors = clip.factors(squared_norms, rounding=rounding) * usable
    if len(clip.clip_norms) == 1:
        short = squared_norms <= clip.clip_norms[0] ** 2
    else:
        short = squared_norms <= squared_norms.new_tensor(clip.clip_norms).square().unsqueeze(1)
    return factors, (short & usable).sum(1, dtype=torch.float32)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name; one with several names only under the first."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("model must have a trainable parameter (requires_grad=True), got none.")
    return found


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and norms of `dtype` are computed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def zeros_for(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros in the shape of a parameter, in `dtype` or in its `accumulator` dtype."""
    dtype = accumulator(parameter.dtype) if dtype is None else dtype
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def call_each(
    method: str, targets: Sequence[Tensor], *arguments: Sequence[Any], alpha: float | None = None
) -> None:
    """Call the in-place method named `method`, such as "add_", on each of `targets`.

    Target i is called with item i of each of `arguments`. On a GPU this is one kernel launch for
    all targets, if torch has a function for it.
    """
    options = {} if alpha is None else {"alpha": alpha}
    if targets and targets[0].is_cuda:
        from tacit.training.gpu.available import foreach

        together = foreach(method)
        if together is not None:
            together(targets, *arguments, **options)
            return
    for target, *own in zip(targets, *arguments, strict=True):
        getattr(target, method)(*own, **options)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills one block of memory without gaps, in any order of axes.

    >>> table = torch.zeros(4, 6)
    >>> is_dense(table.t()), is_dense(table[:, :5])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _shorten(squared_norms: Tensor, clip_norms: tuple[float, ...], rounding: float) -> Tensor:
    # factor * norm <= C: either norm * (1 + rounding) <= C and the factor is 1, or the factor is
    # C / (norm * (1 + rounding)). An infinite norm gives 0 by itself.
    norms = (squared_norms.clamp_min(0) + TINY).sqrt() * (1 + rounding)
    if len(clip_norms) == 1:
        factors = clip_norms[0] / norms.clamp_min(clip_norms[0])
    else:
        bounds = squared_norms.new_tensor(clip_norms).unsqueeze(1)  # (groups, 1)
        factors = bounds / torch.maximum(norms, bounds)
    return factors.nan_to_num(nan=0.0)


def _same_length(name: str, values: Sequence[object], other: str, others: Sequence[object]) -> None:
    if len(values) != len(others):
        raise ValueError(
            f"{name} must have as many entries as {other}, got {len(values)} and {len(others)}."
        )


def _layers(names: Sequence[str]) -> dict[str, list[str]]:
    """Return parameter names grouped by the module that owns them, in the model's order."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers
