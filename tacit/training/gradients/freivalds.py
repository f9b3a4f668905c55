"""Freivalds' check: matrix products in float32 whose error is proved small by random probes.

The bounded mode (`tacit.training.arithmetic`) needs weighted sums S = sum_i x_i y_i' over the
examples of a lot whose error is far below float32's guarantee, and products in float64 take twice
as long as in float32. On a CPU, S is therefore computed in float32, some rows at a time, and then
compared with the exact product in a few random directions (Freivalds 1977, Probabilistic machines
can use less running time). A lot whose sums fail is summed again in float64.

Let E be the error of the computed sum, and V a matrix of m columns of independent normal numbers.
E V is found from the computed sum and from sum_i x_i (y_i' V), both in float64, which costs m
columns instead of a whole product. For every E and every f < 1,

    P(|E V| <= f sqrt(m) |E|) <= (f^2 exp(1 - f^2))^(m / 2)            (Frobenius norms).

Proof. With s_j the singular values of E, |E V|^2 is sum_j s_j^2 X_j for independent chi-square X_j
of m degrees of freedom. Markov's inequality for exp(-t |E V|^2) bounds the probability by
exp(t f^2 m |E|^2) prod_j (1 + 2 t s_j^2)^(-m / 2), and the product of 1 + 2 t s_j^2 is at least
1 + 2 t |E|^2. The best t gives the claim.

With m = 32 and f = 1/8 the probability is below 2^-73. So sums that pass are within the stated
error, whatever the library did, except with that probability; what the failed ones are replaced by
is within it too. Several parameters are one product with a block-diagonal E. Directions come from
the run's key, which is independent of the data; a resumed run repeats them, and so the outcome.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit.training.arithmetic import gamma
from tacit.training.clip import Clip, group_of

PROBES = 32  # m
SHARE = 0.125  # f
_STEP = 512  # rows of one product in float32, twice as many of large lots: fewer round less
_PROBED = 128  # rows of one product in float64: a copy of these fits in the cache
_NARROWEST = 128  # narrower products take less time in float64 than their check


class _Probe(NamedTuple):
    """The directions of one parameter's check, and the exact product in these directions."""

    directions: Tensor  # (width of the narrower side, PROBES)
    expected: Tensor  # (PROBES, width of the wider side), a running sum
    shape: tuple[int, int]  # of the product


class ProductCheck:
    """Sums of products over one lot in float32, and the check of their error. Private."""

    def __init__(self, rng: np.random.Generator, largest_error: float) -> None:
        """Check for an error of at most `largest_error` times the clip norm."""
        self._rng = rng
        self._largest_error = largest_error
        self._probes: dict[str, _Probe] = {}
        self._rows = 0

    @staticmethod
    def takes(left: Tensor, right: Tensor) -> bool:
        """Return whether the check is worth its time: float32 on a CPU, with two wide sides."""
        is_plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (left, right))
        return is_plain and min(left.shape[1], right.shape[1]) >= _NARROWEST

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum over rows i of left_i right_i', for the parameter `name`, in float64.

        One example is one row, and |left_i| |right_i| is at most its clip norm.
        """
        self._rows += len(left)
        directions, expected, shape = self._probe(name, left, right)
        narrow, wide = (left, right) if shape[0] <= shape[1] else (right, left)
        for a, b in zip(narrow.split(_PROBED), wide.split(_PROBED), strict=True):
            expected.addmm_((a.double() @ directions).t(), b.double())
        step = _STEP if len(left) <= 4 * _STEP else 2 * _STEP
        total = (left[:step].t() @ right[:step]).double()
        for a, b in zip(left[step:].split(step), right[step:].split(step), strict=True):
            np.add(total, a.t() @ b, out=total.numpy())  # torch is slower at mixed dtypes
        return total

    def holds(self, sums: Mapping[str, Tensor], clip: Clip) -> bool:
        """Return whether the lot's sums are within the stated error of the exact ones."""
        group = group_of(clip, list(sums))
        squares, slack = ([0.0] * len(clip.clip_norms) for _ in range(2))
        for name, (directions, expected, shape) in self._probes.items():
            found = sums[name].reshape(shape)
            found = (found.t() if shape[0] <= shape[1] else found) @ directions
            squares[group[name]] += float((found - expected.t()).square().sum())
            # Of the two products in float64: no row is longer than the clip norm.
            roundings = 2 * gamma(self._rows + sum(shape) + 8)
            slack[group[name]] += roundings * self._rows * float(directions.norm())
        allowed = SHARE * math.sqrt(PROBES) * self._largest_error
        bounds = zip(squares, slack, clip.clip_norms, strict=True)
        return all(math.sqrt(square) <= (allowed - lost) * norm for square, lost, norm in bounds)

    def _probe(self, name: str, left: Tensor, right: Tensor) -> _Probe:
        if name not in self._probes:
            shape = left.shape[1], right.shape[1]
            directions = self._rng.standard_normal((min(shape), PROBES))
            expected = torch.zeros(PROBES, max(shape), dtype=torch.float64)
            self._probes[name] = _Probe(torch.from_numpy(directions), expected, shape)
        return self._probes[name]
