"""Correlated noise for training: how many bands pay, by arithmetic on public facts.

With b bands, step t draws from group t mod b of the records, at b times the rate, and the columns
of the strategy that a record can touch do not overlap. So each group sees ceil(steps / b) sampled
Gaussian releases, which any accountant can price (Choquette-Choo et al. 2023, arXiv:2306.08153).
More bands cancel more noise in running sums, and amplify less by sampling. What counts is the
product of noise and error, and it can be computed for each b before the run: b = 1 is DP-SGD.
"""

from typing import NamedTuple

from tacit import sampling
from tacit._check import whole
from tacit.accounting import calibrate
from tacit.events import Event, Gaussian, Relation, Repeated
from tacit.mechanisms import optimal_bands, running_error


class Bands(NamedTuple):
    """A number of bands, the noise multiplier at a given price, and the noise of running sums.

    `noise` is the root mean square noise of all running sums, in units of the clip norm.
    """

    bands: int
    noise_multiplier: float
    noise: float


def banded_event(
    noise_multiplier: float, *, bands: int, batch_size: int, n_records: int, steps: int
) -> Event:
    """Return the event of `steps` steps with `bands` bands and cyclic Poisson sampling."""
    rate = min(1.0, bands * batch_size / n_records)
    step = sampling.Poisson(rate).amplify(Gaussian(noise_multiplier))
    return Repeated(step, -(-steps // bands))


def price_bands(
    bands: int,
    *,
    batch_size: int,
    n_records: int,
    steps: int,
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
) -> Bands:
    """Return the least noise of `bands` bands that costs at most `epsilon` at `delta`."""

    def event(noise_multiplier: float) -> Event:
        return banded_event(
            noise_multiplier, bands=bands, batch_size=batch_size, n_records=n_records, steps=steps
        )

    multiplier = calibrate(event, epsilon=epsilon, delta=delta, relation=relation)
    column = optimal_bands(steps, bands)
    return Bands(bands, multiplier, multiplier * running_error(column, steps))


def choose_bands(
    *,
    batch_size: int,
    n_records: int,
    steps: int,
    epsilon: float,
    delta: float,
    most: int = 256,
    relation: Relation = Relation.ADD_REMOVE,
) -> Bands:
    """Return the power of two of bands with the least noise of running sums, at most `most`.

    Bands that would need more records than there are (bands * batch_size > n_records) are left out.
    """
    largest = min(whole(most=most, least=1), steps, max(1, n_records // batch_size))
    candidates = [2**k for k in range(largest.bit_length())]
    return min(
        (
            price_bands(
                bands,
                batch_size=batch_size,
                n_records=n_records,
                steps=steps,
                epsilon=epsilon,
                delta=delta,
                relation=relation,
            )
            for bands in candidates
        ),
        key=lambda found: found.noise,
    )
