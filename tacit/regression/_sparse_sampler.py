"""Draws an item with probability proportional to its weight, where few weights change at a time.

Two levels: items lie in about sqrt(D) blocks of about sqrt(D) items. A draw picks a block by the
sums, then an item within it ("big step, little step", the idea of Raff, Khanna & Lu 2023,
arXiv:2310.19978): O(sqrt(D)) work. An update costs what it changes, plus O(sqrt(D)).

Weights are kept relative to a reference near the largest, so that logarithms of any size are safe;
what falls below 1e-300 of the largest counts as impossible. Sums are updated by differences, whose
rounding errors add up: a block is summed afresh once it has shrunk to a hundredth of the largest
sum it has held since, and all of them every `_FRESH` updates. Relative errors of the
probabilities therefore stay below 1e-10.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Items = NDArray[np.integer]

_FRESH = 2_000
_SHRUNK = 1e-2
_HIGHEST = 300.0
"""Logarithm, above the reference, from which weights are taken relative to a new one."""
_LOWEST = -300.0


class BlockSampler:
    """Items 0, 1, ... with weights exp(log_weights); the weights are **private**.

    >>> sampler = BlockSampler(np.log([1.0, 3.0]))
    >>> sampler.draw(0.5, 0.24), sampler.draw(0.5, 0.26)
    (0, 1)
    """

    def __init__(self, log_weights: Floats) -> None:
        side = math.isqrt(len(log_weights) - 1) + 1
        self._side = side
        self._weights = np.zeros((side, side))
        self._flat = self._weights.reshape(-1)
        self.reset(log_weights)

    def reset(self, log_weights: Floats) -> None:
        """Take new weights for all items: O(D)."""
        self.log_weights = log_weights
        self._reference = float(log_weights.max())
        np.exp(log_weights - self._reference, out=self._flat[: len(log_weights)])
        self._sum_afresh()

    def update(self, items: Items, log_weights: Floats) -> None:
        """Take new weights for `items`, which must be distinct."""
        self.log_weights[items] = log_weights
        if log_weights.max(initial=-math.inf) > self._reference + _HIGHEST:
            self.reset(self.log_weights)
            return
        weights = np.exp(log_weights - self._reference)
        changes = weights - self._flat[items]
        self._flat[items] = weights
        self._sums += np.bincount(items // self._side, changes, self._side)
        self._guard()

    def draw(self, first: float, second: float) -> int:
        """The item that two independent uniforms in [0, 1) pick."""
        block = _pick(self._sums, first)
        return block * self._side + _pick(self._weights[block], second)

    def probabilities(self) -> Floats:
        """Private probability of each item, as `draw` has it: O(D), for tests."""
        inside = self._weights / np.maximum(self._weights.sum(axis=1, keepdims=True), 1e-300)
        shares = self._sums / self._sums.sum()
        return (shares[:, None] * inside).reshape(-1)[: len(self.log_weights)]

    def _guard(self) -> None:
        """Sum afresh what has lost digits; move the reference if all weights have shrunk."""
        self._updates += 1
        np.maximum(self._peaks, self._sums, out=self._peaks)
        shrunk = np.flatnonzero(self._sums < _SHRUNK * self._peaks)
        if len(shrunk):
            self._sums[shrunk] = self._peaks[shrunk] = self._weights[shrunk].sum(axis=1)
        if self._updates >= _FRESH:
            self._sum_afresh()
        if self._sums.sum() < math.exp(_LOWEST):
            self.reset(self.log_weights)

    def _sum_afresh(self) -> None:
        self._sums = self._weights.sum(axis=1)
        self._peaks = self._sums.copy()
        self._updates = 0


def _pick(weights: Floats, uniform: float) -> int:
    """Index drawn in proportion to `weights`, never one of weight zero."""
    edges = weights.cumsum()
    last = edges.searchsorted(edges[-1])
    return int(min(edges.searchsorted(uniform * edges[-1], side="right"), last))
