"""Advice for a table from public facts alone: settings of DP-SGD, and the noise to expect.

Nothing is read but the declared sizes and the budget, so advice costs nothing.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tacit import accounting, summaries
from tacit._check import in_open_unit, positive, whole
from tacit.events import Gaussian, Relation, Repeated
from tacit.experiments.recipe import DataSettings
from tacit.sampling import Poisson

_STEPS = 160
_CLIP_NORM = 1.0
_DROWNED, _CLEAR = 1.0, 0.1  # noise of a step, in units of the longest possible mean gradient
_SMALL = 0.01  # share of the residual variance that noise may add unnoticed
_WIDEST_R2 = 0.3  # half width of an interval of R2 that still says something
R2_NOT_WORTH = (
    "R2 is not measured: its interval would be too wide to say anything, so the fit gets that part "
    "of epsilon. The residual standard deviation says how far predictions are off; --public-test "
    "FILE measures R2 for free, and --evaluation pays for it all the same."
)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings for a linear model of a table, trained by DP-SGD, and what noise they mean."""

    method: str
    batch_size: int
    epochs: float
    clip_norm: float
    learning_rate: float
    delta: float
    noise_multiplier: float
    noise_of_a_step: float
    """Expected length of the noise in a step, as a share of the longest possible mean gradient."""
    in_words: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def settings(self) -> dict[str, Any]:
        """Return the settings as those of a recipe, named "section.key"."""
        names = ("batch_size", "epochs", "clip_norm", "learning_rate")
        return {f"training.{name}": getattr(self, name) for name in names}


def advise(
    *,
    n_records: int,
    n_features: int,
    epsilon: float,
    delta: float | None = None,
    n_classes: int | None = 2,
    relation: Relation = Relation.ADD_REMOVE,
) -> Advice:
    """Return settings for `n_records` records with `n_features` encoded features.

    A large batch and few steps suit DP-SGD: the noise of a step shrinks with the batch, and few
    steps need little of it. All gradients are clipped, so the learning rate alone sets the length
    of a step; it shrinks where noise dominates. `n_classes` is None for a number as target, which
    `tacit regress` fits in one release.

    >>> advise(n_records=20_000, n_features=10, epsilon=1.0).batch_size
    2500
    """
    n = whole(n_records=n_records, least=1)
    d = whole(n_features=n_features, least=1)
    budget = positive(epsilon=epsilon)
    small = min(1e-5, 0.1 / n) if delta is None else in_open_unit(delta=delta)
    batch = max(1, n // 8)
    sampler, epochs = Poisson(batch / n), _STEPS * batch / n
    noise = accounting.calibrate(
        lambda noise: Repeated(sampler.amplify(Gaussian(noise)), _STEPS),
        epsilon=budget,
        delta=small,
        relation=relation,
    )
    outputs = n_classes or 1
    length = noise * math.sqrt((d + 1) * outputs) / batch
    method = "DP-SGD (tacit train) or logistic regression (tacit regress)"
    if n_classes is None:
        method = "linear regression (tacit regress)"
    return Advice(
        method=method,
        batch_size=batch,
        epochs=round(epochs, 3),
        clip_norm=_CLIP_NORM,
        learning_rate=float(f"{min(2.0, 0.5 / length):.2g}"),
        delta=small,
        noise_multiplier=noise,
        noise_of_a_step=length,
        in_words=_words(length, n, budget),
    )


@dataclass(frozen=True, kw_only=True)
class LinearAdvice:
    """What to expect of a linear regression of a table, which has no settings to choose."""

    method: str
    delta: float
    noise_share: float
    """About what the noise adds to the residual variance, as a share of it."""
    is_r2_measured: bool
    """Whether `tacit regress` spends a part of epsilon on R2 unless told otherwise."""
    in_words: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def advise_linear(
    *, n_records: int, n_features: int, epsilon: float, delta: float | None = None
) -> LinearAdvice:
    """Return what to expect of `tacit regress` for a number, from public facts.

    With m coefficients, and rows and residuals limited to twice their root mean square, the noise
    of mu-GDP adds the share (4 m / (n mu))^2 to the residual variance (`tacit.regression.newton`).

    >>> advise_linear(n_records=20_000, n_features=5, epsilon=1.0).is_r2_measured
    False
    """
    n = whole(n_records=n_records, least=1)
    size = 1 + whole(n_features=n_features, least=1)
    budget = positive(epsilon=epsilon)
    small = min(1e-6, 0.1 / n) if delta is None else in_open_unit(delta=delta)
    noise = accounting.calibrate(Gaussian, epsilon=budget, delta=small)
    share = (4 * size * noise / n) ** 2
    words = f"the noise adds about {share:.1%} to the variance of the residuals: "
    if share > _DROWNED:
        need = math.ceil(n * math.sqrt(share / _SMALL))
        words += f"it hides the coefficients. Use about {need:,} records or fewer columns."
    elif share > _SMALL:
        words += "expect visibly wider intervals; fewer columns help."
    else:
        words += "expect little loss."
    is_measured = is_r2_worth_paying(n, budget, DataSettings())
    if not is_measured:
        words += f" {R2_NOT_WORTH}"
    return LinearAdvice(
        method="linear regression (tacit regress)",
        delta=small,
        noise_share=share,
        is_r2_measured=is_measured,
        in_words=words,
    )


def is_r2_worth_paying(n_records: int, epsilon: float, settings: DataSettings) -> bool:
    """Return whether public facts promise an interval of R2 that says something.

    `n_records` are those of the whole table, of which a part is held out.
    """
    n_test = max(1, round(settings.test_share * n_records))
    found = summaries.r2_half_width(n_test, epsilon=settings.evaluation_share * epsilon)
    return found <= _WIDEST_R2


def _words(length: float, n: int, epsilon: float) -> str:
    found = f"the noise of a step is {length:.2g} times the longest possible mean gradient: "
    if length > _DROWNED:
        need = math.ceil(n * length / _CLEAR)
        return found + (
            f"the records drown in it. Use about {need:,} records, fewer columns, or an epsilon "
            f"of about {epsilon * length / _CLEAR:.2g}."
        )
    if length > _CLEAR:
        return found + "expect a visible loss of accuracy; fewer columns help."
    return found + "expect little loss of accuracy."
