"""The training loss of every step, released with noise that is part of the step's price.

A step releases its gradient and, if asked, the mean loss of its lot. Each example's loss is clipped
to a declared range and rounded to whole multiples of a public unit, so that lots of any size are
added exactly. Gradient and loss are one Gaussian release, because the noise of both is widened:

    let s be the `share` of the loss. The noise of the gradient is divided by sqrt(1 - s), that of
    the loss by sqrt(s). Divided by its noise at noise multiplier 1, one example moves the gradient
    by at most sqrt(1 - s) and the loss by at most sqrt(s), hence both together by at most
    sqrt((1 - s) + s) = 1 in L2 norm.

So the event of a run, its price and its noise multiplier stay what they are without the loss, and
the loss is paid by noise: at a share of 1 %, the noise of the gradient grows by 0.5 %.

With correlated noise (`banded_noise`), a record moves all the gradients of a run together by at
most M, the participation norm of the strategy, and the losses, whose noise is independent, by at
most sqrt(k), k being the number of its turns. The noise of the loss is multiplied by sqrt(k) / M,
so that the shares add up as before. At a rate below 1, that holds for each turn by itself (k = 1):
what a record adds in a turn is seen in the steps before its next turn only.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from tacit._check import in_open_unit
from tacit.events import BandedGaussian, Event, Gaussian
from tacit.training.clip import ClippedSum
from tacit.training.noise import NoisyMean

_UNITS = 2**20  # of a clipped loss, from the middle of its range to an end
_ROUNDING = 1 + 1e-12  # covers the rounding of the factors below


@dataclass(frozen=True, kw_only=True)
class NoisyLoss:
    """Asks a run to release the mean training loss of every step: `Reports(noisy_loss=...)`.

    Parameters
    ----------
    upper, lower
        Range to which the loss of each example is clipped. Choose it without looking at the data:
        noise grows with the range, and losses outside of it are counted as its ends. A loss that
        is not a number counts as the middle of the range.
    share
        Share of the step's privacy that the loss takes, as a part of 1 / noise_multiplier^2. The
        noise of the gradient grows by the factor 1 / sqrt(1 - share), and no price changes.

    Examples
    --------
    >>> loss = NoisyLoss(upper=4.0)
    >>> round(loss.noise_std(noise_multiplier=1.0, expected_batch=256), 3)
    0.078
    >>> round(loss.gradient_factor, 4)
    1.005
    """

    upper: float
    lower: float = 0.0
    share: float = 0.01

    def __post_init__(self) -> None:
        in_open_unit(share=self.share)
        if not 0 < self.upper - self.lower < math.inf:  # also refuses NaN
            raise ValueError(
                f"upper must be above lower, by a finite number, got {self.upper} and {self.lower}."
            )

    @property
    def gradient_factor(self) -> float:
        """Factor by which the noise of the gradient grows."""
        return _ROUNDING / math.sqrt(1 - self.share)

    def multiplier(self, noise_multiplier: float, correlation: float = 1.0) -> float:
        """Return the noise on the sum of losses, in units of half the range; see `correlation`."""
        return noise_multiplier * correlation * _ROUNDING / math.sqrt(self.share)

    def noise_std(
        self, *, noise_multiplier: float, expected_batch: float, correlation: float = 1.0
    ) -> float:
        """Return the standard deviation of the noise on the loss of one step."""
        half = (self.upper - self.lower) / 2
        return half * self.multiplier(noise_multiplier, correlation) / expected_batch

    def total(self, losses: Tensor, mask: Tensor, *, views: int = 1) -> int:
        """Return the sum of clipped losses, less the middle of the range, in whole units. Private.

        `losses` has `views` rows for each example, whose mean is the example's loss. One example
        moves the result by at most `_UNITS`, which stands for half the range.
        """
        middle, half = (self.upper + self.lower) / 2, (self.upper - self.lower) / 2
        of_example = losses.detach().double().view(-1, views).mean(1)  # (examples,)
        scaled = ((of_example - middle) / half).nan_to_num(nan=0.0).clamp(-1.0, 1.0)
        return int((scaled * _UNITS).round().long()[mask].sum())

    def release(
        self,
        total: int,
        *,
        noise: NoisyMean,
        step: int,
        noise_multiplier: float,
        correlation: float,
        expected_batch: float,
    ) -> float:
        """Return the noisy mean loss of a lot; the caller has paid for it with the gradient.

        The sum is divided by the declared `expected_batch`: the size of the lot is private. A lot
        of another size moves the result towards the middle of the range, or away from it.
        """
        exact = total / _UNITS
        multiplier = self.multiplier(noise_multiplier, correlation)
        if multiplier > 0:  # without noise, the event of the run is `NonPrivate`
            (exact,) = noise.release_counts(
                [exact], step=step, noise_multiplier=multiplier, sensitivity=1.0, purpose="loss"
            )
        middle, half = (self.upper + self.lower) / 2, (self.upper - self.lower) / 2
        return middle + half * exact / expected_batch


def correlation_of(correlated: Event, independent: Event) -> float:
    """Return sqrt(k) / M for a run with correlated noise, 1 for any other; see above.

    The events are those of the same run and noise multiplier, with its strategy and with
    independent noise: their prices are those of multipliers m / M and m / sqrt(k).
    """
    if not isinstance(correlated, BandedGaussian) or not isinstance(independent, BandedGaussian):
        return 1.0
    return _multiplier(correlated.equivalent) / _multiplier(independent.equivalent)


def _multiplier(event: Event) -> float:
    """Return the noise multiplier of the one Gaussian release inside of an event."""
    while not isinstance(event, Gaussian):
        event = event.event  # type: ignore[attr-defined]  # Repeated or PoissonSampled
    return event.noise_multiplier


def with_loss(
    total: ClippedSum, loss: NoisyLoss | None, losses: Tensor, mask: Tensor, *, views: int = 1
) -> ClippedSum:
    """Return a clipped sum together with the sum of its examples' losses, if `loss` asks for it."""
    if loss is None:
        return total
    return replace(total, loss=loss.total(losses, mask, views=views))
