"""Features of handwritten characters, each computed from one image alone.

Nothing is learned here, so there is nothing to pay for: the features of an image depend on that
image only. A teacher needs a few hundred images with these features, and thousands with raw pixels.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import map_coordinates

Images = NDArray[np.float32]
_CHUNK = 5000


def character_features(images: ArrayLike, *, n_orientations: int = 8) -> Images:
    """Return features of character images, (images, features), from which classifiers learn well.

    They are square roots of histograms of oriented gradients (Dalal & Triggs 2005) over 4 x 4 and
    7 x 7 Gaussian windows, after centering and removing the slant (LeCun et al. 1998, Sec. III-A).
    The features of each window grid form a vector of length 1. `images` are (images, height, width)
    with a dark background near 0.
    """
    pixels = np.asarray(images, dtype=np.float32)
    if pixels.ndim != 3:
        raise ValueError(f"images must have shape (images, height, width), got {pixels.shape}.")
    if not np.all(np.isfinite(pixels)):
        raise ValueError("images must be finite, but hold NaN or infinity.")
    parts = [
        _oriented_gradients(straighten(pixels[i : i + _CHUNK]), n_orientations)
        for i in range(0, len(pixels), _CHUNK)
    ]
    return np.concatenate(parts) if parts else np.empty((0, n_orientations * 65), np.float32)


def straighten(images: Images) -> Images:
    """Return images moved to their center of mass and sheared to remove their slant."""
    height, width = images.shape[1:]
    y, x = np.mgrid[:height, :width].astype(np.float32)
    mass = images.sum(axis=(1, 2)) + 1e-6
    center_y = (images * y).sum(axis=(1, 2)) / mass
    center_x = (images * x).sum(axis=(1, 2)) / mass
    away_y = y - center_y[:, None, None]
    away_x = x - center_x[:, None, None]
    vertical = (images * away_y**2).sum(axis=(1, 2)) / mass
    slant = (images * away_y * away_x).sum(axis=(1, 2)) / mass / (vertical + 1e-6)
    from_middle_y, from_middle_x = y - (height - 1) / 2, x - (width - 1) / 2
    source_y = center_y[:, None, None] + from_middle_y
    source_x = center_x[:, None, None] + from_middle_x + slant[:, None, None] * from_middle_y
    number = np.broadcast_to(np.arange(len(images))[:, None, None], images.shape)
    # Bilinear interpolation, with zeros beyond the edges of an image.
    places = [number, np.broadcast_to(source_y, images.shape), source_x]
    return np.asarray(map_coordinates(images, places, order=1, mode="grid-constant"), np.float32)


def _oriented_gradients(images: Images, n_orientations: int) -> Images:
    slope_y, slope_x = np.zeros_like(images), np.zeros_like(images)
    slope_y[:, 1:-1] = (images[:, 2:] - images[:, :-2]) / 2
    slope_x[:, :, 1:-1] = (images[:, :, 2:] - images[:, :, :-2]) / 2
    strength = np.hypot(slope_x, slope_y)
    turn = np.arctan2(slope_y, slope_x) / (2 * np.pi) % 1 * n_orientations
    low = np.floor(turn).astype(int) % n_orientations
    share = turn - np.floor(turn)
    maps = np.empty((len(images), n_orientations, *images.shape[1:]), np.float32)
    for k in range(n_orientations):
        maps[:, k] = strength * (
            (low == k) * (1 - share) + ((low + 1) % n_orientations == k) * share
        )
    scales = []
    for cells in (4, 7):
        rows, columns = (_windows(size, cells) for size in images.shape[1:])
        pooled = np.einsum("nkyx,ay,bx->nkab", maps, rows, columns, optimize=True)
        flat = np.sqrt(np.maximum(pooled, 0)).reshape(len(images), -1)
        scales.append(flat / (np.linalg.norm(flat, axis=1, keepdims=True) + 1e-6))
    return np.concatenate(scales, axis=1)


def _windows(size: int, cells: int) -> Images:
    """Return the weights of `cells` evenly spaced Gaussian windows over `size` pixels."""
    center = (np.arange(cells) + 0.5) * size / cells - 0.5
    spread = size / cells / 1.7
    weight = np.exp(-(((np.arange(size) - center[:, None]) / spread) ** 2) / 2)
    return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)
