"""Scattering features: two layers of fixed Morlet wavelets and moduli, averaged over space.

Nothing is learned: the features of an image depend on that image only, so they cost no privacy.
Mallat 2012 (arXiv:1101.2286), Bruna & Mallat 2013 (arXiv:1203.1513); filter shapes as in Kymatio
(arXiv:1812.11214). Tramèr & Boneh 2021 (arXiv:2011.11660) showed that a private linear layer on
scattering features beats private end-to-end networks.

Wavelets are applied in the Fourier domain. They are real there, so that a product with one is a
product of real numbers. The low-pass filter, with the average over neighboring positions that may
follow, is one matrix product, from all pixels to the few positions that are kept.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit.experiments.recipe import FeatureSettings

_FAINT = 0.1  # added to variances, so that faint contrast is not amplified
_KEPT = 0.3  # share of the channels' common mean that contrast normalization keeps
_PLANES = {"cpu": 8, "cuda": 3072}
"""Color planes transformed at a time: on a CPU few, so that all of their products are in cache."""
_IMAGES = {"cpu": 64, "cuda": 512}
"""Images whose features are normalized at a time, by one thread."""


@dataclass(frozen=True)
class Scattering:
    """Scattering of square images: `scales` octaves (J) and `angles` orientations (L).

    The result, with these letters, has 1 + J L + L^2 J (J - 1) / 2 channels, called paths, at a 2^J
    times coarser resolution: with the defaults, 81 x 7 x 7 for 28 x 28 images. Each color plane of
    an image has its own paths. Squares of `pool` x `pool` positions are averaged.

    >>> Scattering()(torch.zeros(5, 28, 28)).shape
    torch.Size([5, 81, 7, 7])
    >>> Scattering()(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 243, 8, 8])
    >>> Scattering(pool=2)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 243, 4, 4])
    """

    scales: int = 2
    angles: int = 8
    pool: int = 1

    def __call__(self, images: Tensor) -> Tensor:
        """Return features (records, planes x paths, side, side) in float32; side is size / 2^J.

        `images` has shape (records, size, size) or (records, planes, size, size), on any device.
        With `pool`, the side is that many times smaller.
        """
        if images.dim() not in (3, 4) or images.shape[-1] != images.shape[-2]:
            raise ValueError(
                "images must be (records, size, size) or (records, planes, size, size), "
                f"got {tuple(images.shape)}."
            )
        size, records = images.shape[-1], len(images)
        if size % 2**self.scales:
            raise ValueError(
                f"image size must be a multiple of {2**self.scales}, got {size}. Pad the images."
            )
        side, rest = divmod(size // 2**self.scales, self.pool)
        if rest:
            raise ValueError(
                f"pool must divide the {size // 2**self.scales} positions on a side, "
                f"got {self.pool}."
            )
        per_image = images.shape[1:-2].numel()  # color planes
        planes = images.reshape(records * per_image, size, size).float()
        shape = (records, per_image * self.paths, side, side)
        if not records:
            return planes.new_empty(shape)
        at_once = _PLANES.get(planes.device.type, _PLANES["cuda"])
        bank = _bank(size, self.scales, self.angles, self.pool, planes.device)
        found = planes.new_empty(len(planes), self.paths, side * side)
        for part, into in zip(planes.split(at_once), found.split(at_once), strict=True):
            self._scatter(part, bank, into)
        return found.view(shape)

    @property
    def paths(self) -> int:
        """Number of channels of one color plane: one for each path of order 0, 1 and 2."""
        J, L = self.scales, self.angles
        return 1 + J * L + L * L * J * (J - 1) // 2

    @property
    def orders(self) -> tuple[slice, slice, slice]:
        """The ranges of paths that have order 0, 1 and 2 (number of wavelets applied)."""
        first = 1 + self.scales * self.angles
        return slice(0, 1), slice(1, first), slice(first, self.paths)

    def _scatter(self, planes: Tensor, bank: "_Bank", into: Tensor) -> None:
        """Write the features (planes, paths, positions) of planes (planes, size, size) `into`."""
        L, (_, first, second) = self.angles, self.orders
        margin = 2**self.scales  # reflected border, which the low-pass matrices leave out
        x = pad(planes[:, None], [margin] * 4, mode="reflect")[:, 0]
        into[:, 0] = x.flatten(1) @ bank.averages[0]
        x_hat = torch.fft.fft2(x)
        once, twice = first.start, second.start
        for j1 in range(self.scales):
            u1 = _moduli(x_hat, bank.wavelets[0, j1])  # (planes, angles, side, side)
            into[:, once : once + L] = u1.flatten(2) @ bank.averages[j1]
            once += L
            later = range(j1 + 1, self.scales)
            if not later:
                break
            u1_hat = torch.fft.fft2(u1)
            shape = (len(planes), L, len(later), L, -1)
            paths = into[:, twice : twice + L * len(later) * L].view(shape)
            twice += L * len(later) * L
            for place, j2 in enumerate(later):
                u2 = _moduli(u1_hat, bank.wavelets[j1, j2])  # (planes, angles, angles, side, side)
                paths[:, :, place] = u2.flatten(3) @ bank.averages[j2]


class ScatteringFeatures:
    """The scattering and the normalizations of the recipe, for images of one shape."""

    def __init__(
        self, settings: FeatureSettings, shape: tuple[int, ...], device: str = "cpu"
    ) -> None:
        self.settings = settings
        self.device = device
        self.scattering = Scattering(settings.scales, settings.angles, settings.pool)
        self.planes = shape[0] if len(shape) == 3 else 1
        channels = self.planes * self.scattering.paths
        if settings.groups and channels % settings.groups:
            raise ValueError(
                f"features.groups must divide the {channels} channels, got {settings.groups}."
            )
        side, rest = divmod(shape[-1] // 2**settings.scales, settings.pool)
        if rest:
            raise ValueError(
                f"features.pool must divide the {shape[-1] // 2**settings.scales} positions on a "
                f"side, got {settings.pool}."
            )
        self.is_flat = bool(settings.even_noise_multiplier)
        self.shape = (channels * side**2,) if self.is_flat else (channels, side, side)
        free = settings.log_scale, settings.groups, settings.contrast
        self.label = f"{self.scattering}|{free}|{self.is_flat}"
        if device != "cpu":  # devices round in different ways
            self.label += f"|{device}"

    def fill(
        self, features: np.ndarray, images: np.ndarray, done: Callable[[int], None] | None = None
    ) -> None:
        """Write the features of `images` into `features`; call `done` with numbers of images.

        On a CPU each of torch's threads transforms its own images: one transform is too short to be
        divided. The features do not depend on the number of threads.
        """
        size = _IMAGES.get(self.device, _IMAGES["cuda"])

        def transform(start: int) -> int:
            part = images[start : start + size]
            features[start : start + size] = self(part)
            return len(part)

        starts, threads = range(0, len(images), size), torch.get_num_threads()
        workers = min(len(starts), threads) if self.device == "cpu" else 1
        pool = ThreadPoolExecutor(max(1, workers), "scattering", _use_one_thread)
        try:
            for count in pool.map(transform, starts):
                if done is not None:
                    done(count)
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for a few images only
            torch.set_num_threads(threads)  # the workers have set it for threads to come, too

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the features (records, *shape) of `images`, each of them by itself."""
        settings, scattering, n = self.settings, self.scattering, len(images)
        features = scattering(torch.from_numpy(images).to(self.device))
        if settings.log_scale:
            # 0 and 1 stay what they are: features of images in [0, 1] stay in that range.
            features.div_(settings.log_scale).log1p_().div_(math.log1p(1 / settings.log_scale))
        if settings.groups:
            features = group_normalize(features, settings.groups)
        planes = features.unflatten(1, (self.planes, -1)).flatten(0, 1)
        if settings.contrast:
            planes = contrast_normalize(planes, scattering.orders)
        if not self.is_flat:
            return planes.reshape(n, *self.shape).cpu().numpy()
        found = by_frequency(planes, scattering).unflatten(0, (n, self.planes))
        return (
            found.transpose(1, 2).flatten(1).cpu().numpy()
        )  # the coarsest frequencies of all planes first


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def group_normalize(features: Tensor, groups: int = 27) -> Tensor:
    """Standardize the features of each image within `groups` groups of channels.

    The mean and the standard deviation are those of one image, so no other record is used. A group
    with a constant value becomes zero. Tramèr & Boneh 2021 use 27 groups.
    """
    grouped = features.reshape(len(features), groups, -1)
    centered = grouped - grouped.mean(2, keepdim=True)
    spread = (centered.square().mean(2, keepdim=True) + 1e-5).sqrt()
    return (centered / spread).view_as(features)


def contrast_normalize(features: Tensor, orders: Sequence[slice]) -> Tensor:
    """At each position of an image, standardize the scattering channels of each order.

    Most of the variance between images is local contrast that all channels share. Removing most of
    it makes the variances of the feature directions more equal, so that fewer noisy steps learn
    more. `features` has shape (records, paths, side, side) and `orders` gives the paths of each
    order. The mean and the standard deviation are those of one position of one image, so no other
    record is used. Order 0 has one channel and is unchanged. Dalal & Triggs 2005 normalize
    histograms of gradients in a similar way.
    """
    parts = []
    for channels in orders:
        part = features[:, channels]
        if part.shape[1] > 1:
            mean = part.mean(1, keepdim=True)
            spread = ((part - mean).square().mean(1, keepdim=True) + _FAINT).sqrt()
            part = (part - (1 - _KEPT) * mean) / spread
        parts.append(part)
    return torch.cat(parts, 1)


def by_frequency(features: Tensor, scattering: Scattering) -> Tensor:
    """Return features (records, inputs) as frequencies over position and angle, coarsest first.

    The map is fixed and orthogonal: nothing is learned, and distances between records are kept.
    """
    L, side, n = scattering.angles, features.shape[-1], len(features)
    cosines, turns = _cosine_matrix(side).to(features), _hartley_matrix(L).to(features)
    spectrum = cosines @ features @ cosines.T
    turn = np.minimum(np.arange(L), L - np.arange(L)).astype(float)  # angles are a circle
    zeroth, first, _ = scattering.orders
    once = spectrum[:, first].reshape(n, scattering.scales, L, -1)
    parts = [spectrum[:, zeroth].flatten(1), (turns @ once).flatten(1)]
    found = [np.zeros(1), np.tile(turn, scattering.scales)]
    start = first.stop
    for j in range(scattering.scales - 1):  # pairs of angles, for each pair of scales
        coarser = scattering.scales - 1 - j
        twice = spectrum[:, start : start + L * coarser * L]
        start += L * coarser * L
        twice = turns @ twice.reshape(n, L, coarser, L, -1)
        parts.append((turns @ twice.reshape(n, L, -1)).flatten(1))
        found.append((turn[:, None, None] + turn + np.zeros((1, coarser, 1))).ravel())
    place = np.hypot(*np.mgrid[:side, :side])
    frequency = (np.concatenate(found)[:, None, None] + place).ravel()
    order = np.argsort(frequency, kind="stable")
    return torch.cat(parts, 1)[:, torch.from_numpy(order).to(features.device)]


def _cosine_matrix(size: int) -> Tensor:
    """Return the orthogonal discrete cosine transform of vectors of this size."""
    k, t = np.mgrid[:size, :size]
    matrix = np.cos(np.pi * k * (t + 0.5) / size) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return torch.from_numpy(matrix)


def _hartley_matrix(size: int) -> Tensor:
    """Return the Hartley transform, a real and orthogonal Fourier transform."""
    angle = 2 * np.pi * np.outer(np.arange(size), np.arange(size)) / size
    return torch.from_numpy((np.cos(angle) + np.sin(angle)) / np.sqrt(size))


class _Bank(NamedTuple):
    """The filters for images of one size, on one device."""

    wavelets: dict[tuple[int, int], Tensor]
    """By the scales (j1, j2) of the input and the wavelet: (blocks, angles, 2 x frequencies), the
    frequencies in blocks as `_blocks` has them. Each number is there twice, for the real and the
    imaginary part of what it multiplies."""
    averages: list[Tensor]
    """By the scale of the input: low-pass filter and pooling as a matrix (pixels, positions)."""


def _moduli(u_hat: Tensor, wavelets: Tensor) -> Tensor:
    """Return |u * wavelet| for all angles, (..., angles, side, side), from the transform of u.

    Keeping every `factor`-th pixel of a convolution adds those of its frequencies that coincide.
    """
    factor = math.isqrt(len(wavelets))
    side = u_hat.shape[-1] // factor
    shown = _blocks(u_hat, factor).unsqueeze(-2)  # (blocks, ..., 1, 2 x frequencies)
    total = shown[0] * wavelets[0]
    for block, wavelet in zip(shown[1:], wavelets[1:], strict=True):
        total.addcmul_(block, wavelet)
    transform = torch.view_as_complex(total.unflatten(-1, (side, side, 2)))
    # The factor 1 / pixels of the inverse transform is part of the wavelets.
    squares = torch.view_as_real(torch.fft.ifft2(transform, norm="forward")).square_()
    return torch.add(squares[..., 0], squares[..., 1]).sqrt_()


def _blocks(u_hat: Tensor, factor: int) -> Tensor:
    """Return a transform cut in factor x factor squares, (blocks, ..., 2 x frequencies).

    Each square is contiguous, since products of long rows take less time.
    """
    side = u_hat.shape[-1] // factor
    parts = torch.view_as_real(u_hat).reshape(*u_hat.shape[:-2], factor, side, factor, 2 * side)
    return parts.movedim((-4, -2), (0, 1)).flatten(-2).flatten(0, 1)


@lru_cache(maxsize=8)
def _bank(size: int, scales: int, angles: int, pool: int, device: torch.device) -> _Bank:
    padded = size + 2 ** (scales + 1)
    low_pass, morlets = _filters(padded, scales, angles)
    wavelets = {}
    for j1 in range(scales):
        for j2 in range(j1, scales) if j1 == 0 else range(j1 + 1, scales):
            start, factor = padded // 2**j1, 2 ** (j2 - j1)
            folded = torch.from_numpy(np.stack([_fold(w, 2**j1) for w in morlets[j2]]) / start**2)
            wavelets[j1, j2] = _blocks(torch.complex(folded, folded), factor).to(device)
    rows = [_low_pass_rows(low_pass, padded, 2**j, 2**scales) for j in range(scales)]
    pooled = [r.reshape(-1, pool, r.shape[1]).mean(1) for r in rows]
    averages = [torch.from_numpy(np.kron(r, r).T.astype(np.float32)).to(device) for r in pooled]
    return _Bank(wavelets, averages)


def _low_pass_rows(low_pass: np.ndarray, padded: int, done: int, factor: int) -> np.ndarray:
    """Return the matrix (positions kept, pixels) that smooths and subsamples one axis.

    The two-dimensional filter is a Gaussian, so it is the product of two one-dimensional ones. The
    signal has every `done`-th pixel; the result every `factor`-th, without the reflected border.
    """
    one_axis = low_pass[0].astype(float) / np.sqrt(low_pass[0, 0])
    smooth = one_axis.reshape(done, -1).sum(0)
    kernel = np.fft.ifft(np.fft.fft(np.eye(padded // done), axis=0) * smooth[:, None], axis=0)
    return np.real(kernel)[:: factor // done][1:-1]


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
    return np.real(np.fft.fft2(filter_)).astype(
        np.float32
    )  # symmetric about 0: the transform is real


def _fold(transform: np.ndarray, factor: int) -> np.ndarray:
    """Return the Fourier transform of a filter of which only every `factor`-th sample is kept.

    Frequencies that coincide after subsampling are added.
    """
    size = len(transform)
    blocks = transform.reshape(factor, size // factor, factor, size // factor)
    return blocks.sum(axis=(0, 2))
