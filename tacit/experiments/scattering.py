"""Scattering features: two layers of fixed Morlet wavelets and moduli, averaged over space.

Nothing is learned: the features of an image depend on that image only, so they cost no privacy.
Mallat 2012 (arXiv:1101.2286), Bruna & Mallat 2013 (arXiv:1203.1513); filter shapes as in Kymatio
(arXiv:1812.11214). Tramèr & Boneh 2021 (arXiv:2011.11660) showed that a private linear layer on
scattering features beats private end-to-end networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft

_FAINT = 0.1  # added to variances, so that faint contrast is not amplified
_KEPT = 0.3  # share of the channels' common mean that contrast normalization keeps


@dataclass(frozen=True)
class Scattering:
    """Scattering of square images: `scales` octaves (J) and `angles` orientations (L).

    The result, with these letters, has 1 + J L + L^2 J (J - 1) / 2 channels at a 2^J times coarser
    resolution: with the defaults, 81 x 7 x 7 for 28 x 28 images.

    >>> Scattering()(np.zeros((3, 28, 28))).shape
    (3, 81, 7, 7)
    """

    scales: int = 2
    angles: int = 8

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return features (records, channels, height / 2^J, width / 2^J) in float32.

        Memory grows with the number of images, so give a few hundred at a time.
        """
        if images.ndim != 3 or images.shape[1] != images.shape[2]:
            raise ValueError(f"images must be (records, size, size), got {images.shape}.")
        if images.shape[1] % 2**self.scales:
            raise ValueError(
                f"image size must be a multiple of {2**self.scales}, got {images.shape[1]}. "
                "Pad the images."
            )
        x = images.astype(np.float32)
        margin = 2**self.scales  # reflected border, cut off again below
        x = np.pad(x, ((0, 0), (margin, margin), (margin, margin)), mode="reflect")
        size = x.shape[1]
        low_pass, wavelets = _filters(size, self.scales, self.angles)
        x_hat = _fft(x)
        zeroth = [self._average(x_hat, low_pass, size)]
        first, second = [], []
        for j1, band in enumerate(wavelets):
            for wavelet in band:
                u1 = _modulus(x_hat * wavelet, 2**j1)
                u1_hat = _fft(u1)
                first.append(self._average(u1_hat, low_pass, size))
                for j2 in range(j1 + 1, self.scales):
                    for coarser in wavelets[j2]:
                        u2 = _modulus(u1_hat * _fold(coarser, 2**j1), 2 ** (j2 - j1))
                        second.append(self._average(_fft(u2), low_pass, size))
        return np.stack(zeroth + first + second, axis=1)[:, :, 1:-1, 1:-1]

    @property
    def channels(self) -> int:
        """Number of channels: one for each path of order 0, 1 and 2."""
        J, L = self.scales, self.angles
        return 1 + J * L + L * L * J * (J - 1) // 2

    @property
    def orders(self) -> tuple[slice, slice, slice]:
        """The ranges of channels that have order 0, 1 and 2 (number of wavelets applied)."""
        first = 1 + self.scales * self.angles
        return slice(0, 1), slice(1, first), slice(first, self.channels)

    def _average(self, u_hat: np.ndarray, low_pass: np.ndarray, size: int) -> np.ndarray:
        """Smooth and subsample a signal u, given by its Fourier transform `u_hat`.

        The signal may have any resolution; the result has the coarsest one, `size` / 2^J.
        """
        done = size // u_hat.shape[-1]
        smooth = u_hat * _fold(low_pass, done)
        return np.real(_inverse(_fold(smooth, 2**self.scales // done, mean=True)))


def group_normalize(features: np.ndarray, groups: int = 27) -> np.ndarray:
    """Standardize the features of each image within `groups` groups of channels, and flatten them.

    The mean and the standard deviation are those of one image, so no other record is used. A group
    with a constant value becomes zero. Tramèr & Boneh 2021 use 27 groups.
    """
    n = len(features)
    grouped = features.reshape(n, groups, -1)
    centered = grouped - grouped.mean(axis=2, keepdims=True)
    spread = np.sqrt((centered**2).mean(axis=2, keepdims=True) + 1e-5)
    return (centered / spread).reshape(n, -1).astype(np.float32)


def contrast_normalize(features: np.ndarray, orders: Sequence[slice]) -> np.ndarray:
    """At each position of an image, standardize the scattering channels of each order.

    Most of the variance between images is local contrast that all channels share. Removing most of
    it makes the variances of the feature directions more equal, so that fewer noisy steps learn
    more. `orders` gives the channels of each order. The mean and the standard deviation are those
    of one position of one image, so no other record is used. Order 0 has one channel and is
    unchanged. Dalal & Triggs 2005 normalize histograms of gradients in a similar way.
    """
    parts = []
    for channels in orders:
        part = features[:, channels]
        if part.shape[1] > 1:
            mean = part.mean(axis=1, keepdims=True)
            spread = np.sqrt(((part - mean) ** 2).mean(axis=1, keepdims=True) + _FAINT)
            part = (part - (1 - _KEPT) * mean) / spread
        parts.append(part)
    return np.concatenate(parts, axis=1).astype(np.float32)


def by_frequency(features: np.ndarray, scattering: Scattering) -> np.ndarray:
    """Return features (records, inputs) as frequencies over position and angle, coarsest first.

    The map is fixed and orthogonal: nothing is learned, and distances between records are kept.
    """
    L, side, n = scattering.angles, features.shape[-1], len(features)
    spectrum = np.asarray(fft.dctn(features, axes=(2, 3), norm="ortho"))
    turn = np.minimum(np.arange(L), L - np.arange(L)).astype(float)  # angles are a circle
    zeroth, first, _ = scattering.orders
    once = spectrum[:, first].reshape(n, scattering.scales, L, side, side)
    parts = [spectrum[:, zeroth], _hartley(once, 2).reshape(n, -1, side, side)]
    found = [np.zeros(1), np.tile(turn, scattering.scales)]
    start = first.stop
    for j in range(scattering.scales - 1):  # pairs of angles, for each pair of scales
        coarser = scattering.scales - 1 - j
        twice = spectrum[:, start : start + L * coarser * L]
        start += L * coarser * L
        twice = _hartley(_hartley(twice.reshape(n, L, coarser, L, side, side), 1), 3)
        parts.append(twice.reshape(n, -1, side, side))
        found.append((turn[:, None, None] + turn + np.zeros((1, coarser, 1))).ravel())
    place = np.hypot(*np.mgrid[:side, :side])
    frequency = (np.concatenate(found)[:, None, None] + place).ravel()
    order = np.argsort(frequency, kind="stable")
    return np.concatenate(parts, axis=1).reshape(n, -1)[:, order].astype(np.float32)


def _hartley(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the Hartley transform along `axis`, a real and orthogonal Fourier transform."""
    transform = np.asarray(fft.fft(values, axis=axis, norm="ortho"))
    return np.real(transform) - np.imag(transform)


@lru_cache(maxsize=4)
def _filters(size: int, scales: int, angles: int) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Return Fourier transforms, real-valued, of the low-pass filter and of the Morlet wavelets.

    The wavelets are indexed [scale][angle].
    """
    low_pass = _transform(_gabor(size, 0.8 * 2 ** (scales - 1), 0.0, 0.0, 1.0))
    wavelets = [
        [_morlet(size, 0.8 * 2**j, np.pi * 0.75 / 2**j, np.pi * a / angles, 4 / angles)
         for a in range(angles)]
        for j in range(scales)
    ]  # fmt: skip
    return low_pass, wavelets


def _morlet(size: int, sigma: float, frequency: float, angle: float, slant: float) -> np.ndarray:
    """Return the Fourier transform of a Morlet wavelet, which is a Gabor wave with mean zero.

    The mean is removed by subtracting a multiple of the wave's Gaussian envelope. `slant` is the
    ratio of the envelope's two widths.
    """
    wave = _gabor(size, sigma, frequency, angle, slant)
    envelope = _gabor(size, sigma, 0.0, angle, slant)
    return _transform(wave - wave.sum() / envelope.sum() * envelope)


def _gabor(size: int, sigma: float, frequency: float, angle: float, slant: float) -> np.ndarray:
    """Return a Gaussian of width `sigma` times a plane wave, on a periodic grid of side `size`."""
    cos, sin = np.cos(angle), np.sin(angle)
    total = np.zeros((size, size), complex)
    for dy in (-2, -1, 0, 1, 2):
        for dx in (-2, -1, 0, 1, 2):
            y, x = np.mgrid[dy * size : (dy + 1) * size, dx * size : (dx + 1) * size]
            along, across = cos * y + sin * x, -sin * y + cos * x
            bell = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
            total += bell * np.exp(1j * frequency * along)
    return total / (2 * np.pi * sigma**2 / slant)


def _transform(filter_: np.ndarray) -> np.ndarray:
    return np.real(_fft(filter_)).astype(np.float32)  # symmetric about 0: the transform is real


def _fold(transform: np.ndarray, factor: int, *, mean: bool = False) -> np.ndarray:
    """Return the Fourier transform of a signal of which only every `factor`-th sample is kept.

    Frequencies that coincide after subsampling are added, or averaged if `mean` is True.
    """
    if factor == 1:
        return transform
    *lead, size, _ = transform.shape
    blocks = transform.reshape(*lead, factor, size // factor, factor, size // factor)
    return blocks.mean(axis=(-4, -2)) if mean else blocks.sum(axis=(-4, -2))


def _modulus(transform: np.ndarray, factor: int) -> np.ndarray:
    return np.abs(_inverse(_fold(transform, factor, mean=True)))


def _fft(values: np.ndarray) -> np.ndarray:
    return np.asarray(fft.fft2(values, workers=-1))


def _inverse(transform: np.ndarray) -> np.ndarray:
    return np.asarray(fft.ifft2(transform, workers=-1))
