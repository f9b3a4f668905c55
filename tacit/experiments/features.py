"""Features: transforms of the records before training, and the summaries that they release.

Scattering and random projection transform each record by itself, so they are free. Principal
components and the mean depend on all records together, so they are released with noise and paid
for.
"""

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tacit._whole_file import whole_file
from tacit.datasets import Dataset
from tacit.events import Event, Gaussian
from tacit.experiments.recipe import FeatureSettings
from tacit.mechanisms import GaussianMechanism

_CHUNK = 256  # records added up at a time
_CACHE_VERSION = 4


class PaidSummary(Protocol):
    """A value that depends on all records together, so that its release must be paid for."""

    @property
    def event(self) -> Event:
        """Event of one release, for accountants and the ledger."""
        ...

    def release(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the noisy summary of the rows of `x`. The caller pays for `event` first."""
        ...

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Return the summary without noise, which only the non-private twin uses. Private."""
        ...


Show = Callable[[str], None]
"""Function that shows a text about the progress; numbers of records in it are public."""

Release = Callable[[str, PaidSummary, np.ndarray], np.ndarray]
"""Function of a name, a summary and the records that returns the summary; it pays if it must."""


class Prepared(NamedTuple):
    """The records as the model sees them, after all transforms. The training part is private."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    summaries: dict[str, np.ndarray]
    """Released values computed from all records together; part of the released model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record as the model sees it."""
        return tuple(self.x_train.shape[1:])


class _OfSecondMoments:
    """Base of summaries that are computed from the noisy matrix of second moments of the records.

    Only the first `_inputs` coordinates of a record are used. They are scaled to norm 1, so that
    one record changes the matrix by a bounded amount.
    """

    noise_multiplier: float

    @property
    def _inputs(self) -> int | None:
        return None

    @property
    def event(self) -> Gaussian:
        """Event of the one release of the second moments."""
        return _gram_mechanism(self.noise_multiplier).event

    def release(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the summary computed from noisy second moments; the caller pays first."""
        return self._of(_noisy_gram(x[:, : self._inputs], self.noise_multiplier, rng))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Return the summary computed from second moments without noise. Private."""
        return self._of(_gram(x[:, : self._inputs]))

    def _of(self, gram: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class PrivatePCA(_OfSecondMoments):
    """Principal directions of the records, scaled to norm 1, released once with Gaussian noise.

    The result is a matrix (inputs, components) with the direction of largest variance first.
    Guarantee: `event`, for the directions and anything computed from them. The method is Analyze
    Gauss (Dwork, Talwar, Thakurta & Zhang 2014), with noise calibrated to the Frobenius norm.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(1000, 3)) * [5.0, 1.0, 0.1]
    >>> np.abs(PrivatePCA(1, noise_multiplier=4.0).release(x, rng)).round(1).tolist()
    [[1.0], [0.0], [0.0]]
    """

    components: int
    noise_multiplier: float
    whiten: float = 0.0
    """0 gives directions of length 1; 1 gives lengths that equalize the second moments."""

    def _of(self, gram: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(gram)
        chosen = vectors[:, ::-1][:, : self.components]
        # Signs are arbitrary; fixing them makes equal inputs give equal directions.
        largest = np.abs(chosen).argmax(axis=0)
        chosen = chosen * np.sign(chosen[largest, np.arange(chosen.shape[1])])
        kept = np.maximum(values[::-1][: self.components], 1e-12 * values[-1])
        lengths = kept ** (-self.whiten / 2)
        # Rescaled so that whitening does not change the mean squared length of projected records.
        return chosen * lengths * np.sqrt(kept.sum() / (kept * lengths**2).sum())


@dataclass(frozen=True)
class PrivateEvening(_OfSecondMoments):
    """A released linear map that shortens the directions in which the records vary most.

    The map is symmetric and acts on the first `coordinates` of a record. Guarantee: `event`, for
    the map and anything computed with it. The map is a function of the noisy second moments of the
    records, scaled to norm 1. The largest eigenvalue of the noise alone is near 2 noise_multiplier
    sqrt(coordinates). Directions whose second moment is above twice that level are shortened to
    twice that level. Noisy gradient steps then learn in more directions at once.
    """

    coordinates: int
    noise_multiplier: float

    @property
    def _inputs(self) -> int:
        return self.coordinates

    def _of(self, gram: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(gram)
        level = 4 * self.noise_multiplier * math.sqrt(len(gram))
        scales = np.sqrt(level / np.maximum(values, level))
        return ((vectors * scales) @ vectors.T).astype(np.float32)


@dataclass(frozen=True)
class PrivateMean:
    """Mean of `n_records` records, each of norm at most sqrt(size), with Gaussian noise.

    Guarantee: `event`. Without centering, a large part of each clipped gradient points in the
    direction of the mean of all records. Tramèr & Boneh 2021 (arXiv:2011.11660) also normalize by
    private means.
    """

    n_records: int
    noise_multiplier: float

    @property
    def event(self) -> Gaussian:
        """Event of the one release of the mean."""
        return Gaussian(self.noise_multiplier)

    def release(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the noisy mean, in the shape of one record. The caller pays for `event` first."""
        bound = math.sqrt(math.prod(x.shape[1:]))
        # Rows are clipped to norm `bound`, so one record moves their sum by at most `bound`.
        mechanism = GaussianMechanism(self.noise_multiplier, l2_sensitivity=bound)
        noisy = mechanism.release(_bounded_sum(x, bound), rng) / self.n_records
        return noisy.reshape(x.shape[1:]).astype(np.float32)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Return the mean of the records without noise. Private."""
        bound = math.sqrt(math.prod(x.shape[1:]))
        return (_bounded_sum(x, bound) / len(x)).reshape(x.shape[1:]).astype(np.float32)


def summaries_of(settings: FeatureSettings, n_records: int) -> dict[str, PaidSummary]:
    """Return the summaries that these features must pay for, by name, in the order of release."""
    found: dict[str, PaidSummary] = {}
    if settings.mean_noise_multiplier:
        found["mean"] = PrivateMean(n_records, settings.mean_noise_multiplier)
    if settings.kind == "pca":
        found["directions"] = PrivatePCA(
            settings.components, settings.noise_multiplier, settings.whiten
        )
    if settings.even_noise_multiplier:
        if settings.kind != "scattering":
            raise ValueError('features.even_noise_multiplier goes with kind = "scattering".')
        found["evening"] = PrivateEvening(settings.even, settings.even_noise_multiplier)
    return found


def prepare(
    dataset: Dataset,
    settings: FeatureSettings,
    *,
    release: Release,
    cache: Path | None = None,
    device: str = "cpu",
    show: Show | None = None,
) -> Prepared:
    """Transform the training and the test records by the features of the recipe.

    `release` is called once for each paid summary and returns its noisy value. `cache` is a folder
    that keeps scattering features between runs; it holds private values. `device` computes them.
    `show` is called with a text while that takes long.
    """
    needed = summaries_of(settings, dataset.n_records)
    kept: dict[str, np.ndarray] = {}
    is_projected = settings.kind in ("pca", "projection")
    x_train, x_test = dataset.x_train, dataset.x_test
    if is_projected:
        x_train, x_test = (_scaled_rows(x) for x in (x_train, x_test))
    elif settings.kind == "scattering":
        x_train = _scattered(x_train, settings, cache, device, show, "training")
        x_test = _scattered(x_test, settings, cache, device, show, "test")
    if "mean" in needed:
        kept["mean"] = release("mean", needed["mean"], x_train)
        if settings.kind == "none":  # these are the records of the data set itself
            x_train, x_test = x_train - kept["mean"], x_test - kept["mean"]
        else:  # large arrays of our own: new ones would take longer to map than to fill
            for x in (x_train, x_test):
                np.subtract(x, kept["mean"], out=x)
    if is_projected:
        directions = random_directions(x_train.shape[1], settings.components)
        if settings.kind == "pca":
            directions = release("directions", needed["directions"], x_train).astype(np.float32)
            kept["directions"] = directions
        x_train, x_test = (project(x, directions) for x in (x_train, x_test))
    if "evening" in needed:
        kept["evening"] = release("evening", needed["evening"], x_train)
        for x in (x_train, x_test):
            x[:, : settings.even] = x[:, : settings.even] @ kept["evening"]
    return Prepared(x_train, dataset.y_train, x_test, dataset.y_test, kept)


def shape_of(settings: FeatureSettings, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one record's features, from the `shape` of a record."""
    if settings.kind in ("pca", "projection"):
        return (settings.components,)
    if settings.kind == "scattering":
        from tacit.experiments.scattering import ScatteringFeatures  # needs torch

        return tuple(ScatteringFeatures(settings, shape, "cpu").shape)
    return tuple(shape)


def project(x: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Scale each record to norm 1 and return its coordinates along `directions`.

    The coordinates are multiplied by sqrt(number of directions), so that their mean square is at
    most 1.
    """
    scale = np.float32(np.sqrt(directions.shape[1]))
    return (_unit_rows(x) @ directions * scale).astype(np.float32)


def random_directions(inputs: int, components: int) -> np.ndarray:
    """Return orthonormal columns (inputs, components), random from a fixed seed, without data."""
    if components > inputs:
        raise ValueError(
            f"features.components must be <= {inputs}, the size of a record, got {components}."
        )
    draw = np.random.default_rng(20160701).normal(size=(inputs, components))
    return np.linalg.qr(draw)[0].astype(np.float32)


def _scaled_rows(x: np.ndarray) -> np.ndarray:
    """Flatten each record to a row, and scale the row to norm sqrt(number of values)."""
    size = math.prod(x.shape[1:])
    return (_unit_rows(x.reshape(len(x), size)) * math.sqrt(size)).astype(np.float32)


def _unit_rows(x: np.ndarray) -> np.ndarray:
    """Scale each row to norm 1 or just below, so that rounding never makes the norm exceed 1.

    A row of zeros, or with a value that is not finite, becomes zeros.
    """
    x = np.where(np.isfinite(x).all(axis=1, keepdims=True), x, np.zeros((), x.dtype))
    x = x / np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-30)  # now no square overflows
    # The factor keeps rows inside the unit ball in spite of rounding.
    return x / (np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 0.5) * (1 + 1e-6))


def _gram(x: np.ndarray) -> np.ndarray:
    unit = _unit_rows(np.asarray(x, np.float64))
    return unit.T @ unit


def _gram_mechanism(noise_multiplier: float) -> GaussianMechanism:
    # The vector (diagonal, sqrt(2) x upper triangle) of x xᵀ has L2 norm |x xᵀ|_F = |x|² <= 1.
    # Replacing x by z moves it by sqrt(|x|⁴ + |z|⁴ - 2 (x·z)²) <= sqrt(2).
    return GaussianMechanism(noise_multiplier, l2_sensitivity=1.0, replace_factor=np.sqrt(2.0))


def _noisy_gram(x: np.ndarray, noise_multiplier: float, rng: np.random.Generator) -> np.ndarray:
    """Scale each row to norm 1, and return the second moments of the rows with Gaussian noise.

    The result is a symmetric matrix (inputs, inputs). The caller pays for the release first.
    """
    gram, mechanism = _gram(x), _gram_mechanism(noise_multiplier)
    rows, columns = np.triu_indices(len(gram))
    weights = np.where(rows == columns, 1.0, np.sqrt(2.0))
    noisy = np.zeros_like(gram)
    noisy[rows, columns] = mechanism.release(gram[rows, columns] * weights, rng) / weights
    return noisy + np.triu(noisy, 1).T


def _bounded_sum(x: np.ndarray, bound: float) -> np.ndarray:
    """Return the sum of rows clipped to norm `bound`; a row that is not finite counts as zero."""
    total = np.zeros(math.prod(x.shape[1:]))
    for start in range(0, len(x), _CHUNK):
        rows = x[start : start + _CHUNK].reshape(-1, len(total)).astype(np.float64)
        rows[~np.isfinite(rows).all(axis=1)] = 0.0
        norms = np.linalg.norm(rows, axis=1) * (1 + 1e-12)  # so that rounding cannot pass the bound
        total += (np.minimum(1.0, bound / np.maximum(norms, 1e-300))) @ rows
    return total


def cache_folder() -> Path:
    """Return the folder that keeps computed features between runs. Its content is private."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(home) / "tacit" / "features"


def _scattered(
    images: np.ndarray,
    settings: FeatureSettings,
    cache: Path | None,
    device: str,
    show: Show | None,
    part: str,
) -> np.ndarray:
    """Return normalized scattering features of `images`, (records, channels, side, side).

    With `even_noise_multiplier` they are (records, inputs), in the order of `by_frequency`. They
    are read from the folder `cache` if an earlier run stored them there. The caller may write into
    the result.
    """
    from tacit.experiments.scattering import ScatteringFeatures  # needs torch

    transform = ScatteringFeatures(settings, images.shape[1:], device)
    path = None
    if cache is not None and len(images):  # a released model prepares a test split only
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        label = f"{_CACHE_VERSION}|{transform.label}|{images.shape}|{images.dtype}"
        digest = hashlib.sha256(label.encode())
        digest.update(np.ascontiguousarray(images).data)
        path = cache / f"{digest.hexdigest()[:32]}.npy"
        if path.is_file():
            # Copy on write: processes share the pages, and torch may write to the array.
            return np.load(path, mmap_mode="c")
    features, count = np.empty((len(images), *transform.shape), np.float32), 0

    def done(more: int) -> None:
        nonlocal count
        count += more
        if show is not None:
            show(f"features of {count:,} of {len(images):,} {part} images")

    transform.fill(features, images, done)
    if path is not None:
        with whole_file(path) as stream:  # that only the user may read: features are private
            np.save(stream, features)
    return features
