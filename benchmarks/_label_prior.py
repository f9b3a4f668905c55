"""Randomized response of labels with a prior (Ghazi et al. 2021, arXiv:2102.06062, Algorithm 2).

A prior over labels that does not depend on the label, such as a model trained on other examples,
restricts the answer to the most likely labels. `benchmarks/local_labels.py` compares it with
`tacit.local.RandomizedLabels`, which asks among all classes and is as good.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn import functional

from tacit.local import RandomizedLabels
from tacit.local.coins import flip, round_up, whole_numbers
from tacit.local.frequencies import Floats
from tacit.mechanisms import Seed, generator


@dataclass(frozen=True, kw_only=True)
class PriorLabels(RandomizedLabels):
    """Randomizer of class labels that may use a prior; a label costs `epsilon` in either case."""

    def with_prior(
        self, labels: ArrayLike, prior: ArrayLike, rng: Seed = None
    ) -> NDArray[np.int64]:
        """Return noisy labels, each restricted to the classes that its row of `prior` favors.

        Classes are sorted by falling prior, and the first k are kept, with the k that maximizes
        e^epsilon / (e^epsilon + k - 1) times their total prior. A label among the kept classes is
        sent by randomized response among these k. Any other label is replaced by a uniform draw
        from them.

        Parameters
        ----------
        prior
            One row of probabilities per label; it must not depend on that label.
        """
        found = whole_numbers(labels, self.n_classes)
        order, kept = self._kept_classes(np.asarray(prior, dtype=np.float64), len(found))
        source = generator(rng)
        place = np.argmax(order == found[:, None], axis=1)  # rank of the true label
        noisy = np.empty(len(found), dtype=np.int64)
        for k in np.unique(kept):
            rows = np.nonzero(kept == k)[0]
            uniform = source.integers(0, int(k), size=len(rows))
            heads = _random_probability(self._most, int(k))
            is_random = flip(heads, source, len(rows)) | (place[rows] >= k)
            noisy[rows] = order[rows, np.where(is_random, uniform, place[rows])]
        return noisy

    def transitions(self, prior: ArrayLike | None = None, n_labels: int = 1) -> Floats:
        """Return P(noisy label | true label), shape (labels, true classes, noisy classes)."""
        k, size = self.n_classes, (n_labels, self.n_classes)
        if prior is None:
            order, kept = np.tile(np.arange(k), (n_labels, 1)), np.full(n_labels, k)
        else:
            order, kept = self._kept_classes(np.asarray(prior, dtype=np.float64), n_labels)
        is_kept = np.zeros(size, dtype=bool)
        np.put_along_axis(is_kept, order, np.arange(k) < kept[:, None], axis=1)
        uniform = is_kept / kept[:, None]  # (labels, noisy)
        heads = np.array([float(_random_probability(self._most, int(m))) for m in kept])
        table = np.where(is_kept[:, :, None], heads[:, None, None], 1.0) * uniform[:, None, :]
        diagonal = np.arange(k)
        table[:, diagonal, diagonal] += is_kept * (1 - heads[:, None])
        return table

    def _kept_classes(
        self, prior: Floats, n_labels: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each row's classes by falling prior, and how many of them are kept."""
        if prior.shape != (n_labels, self.n_classes):
            raise ValueError(f"prior must have shape ({n_labels}, {self.n_classes}).")
        order = np.argsort(-prior, axis=1, kind="stable")
        total = np.cumsum(np.take_along_axis(prior, order, axis=1), axis=1)
        e = float(self._most)
        sizes = np.arange(1, self.n_classes + 1)
        return order, np.argmax(e / (e + sizes - 1) * total, axis=1) + 1


def forward_loss(
    logits: torch.Tensor, noisy_labels: torch.Tensor, transitions: torch.Tensor
) -> torch.Tensor:
    """Return one loss per example, corrected for the noise by each example's own transitions."""
    rows = torch.arange(len(logits), device=logits.device)
    column = transitions[rows, :, noisy_labels].log()
    return -torch.logsumexp(functional.log_softmax(logits, dim=1) + column, dim=1)


def _random_probability(most: Fraction, n_options: int) -> Fraction:
    """Return the probability of a uniform answer; `most` is just below e^epsilon."""
    return round_up(n_options / (most + n_options - 1))
