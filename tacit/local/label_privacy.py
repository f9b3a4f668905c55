"""Label privacy: features are public, and only the label of each example is protected.

Labels are randomized once, before training, and any model may then be trained on them for as
long as one likes. Two losses undo the noise on average:

- *unbiased*: a combination of the losses of all classes whose mean over the noise is the loss of
  the true label (Natarajan et al. 2013; "backward correction" of Patrini et al. 2017,
  arXiv:1609.03683, Theorem 1). It can be negative, so large models overfit it;
- *forward*: the likelihood of the noisy label, -log sum_c P(noisy | c) softmax_c (Theorem 2
  there). Its minimum over all models is the same as without noise, and it trains well.

`RandomizedLabels.with_prior` is the randomized response with a prior of Ghazi et al. 2021
(arXiv:2102.06062, Algorithm 2): a prior over labels that does not depend on the label, such as a
model trained on other examples, restricts the answer to the most likely labels.

torch is imported on use.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import whole
from tacit.events import Event
from tacit.local.coins import flip, round_up, whole_numbers
from tacit.local.frequencies import Floats, LocalRandomizer
from tacit.local.randomized_response import RandomizedResponse
from tacit.mechanisms import Seed, generator

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["forward", "unbiased"]


@dataclass(frozen=True, kw_only=True)
class RandomizedLabels(LocalRandomizer):
    """Randomizer of class labels, for training under `epsilon`-label differential privacy.

    The event is that of any `epsilon`-private report: a label drawn `with_prior` may reveal more,
    at the same epsilon, than randomized response among all classes.

    Examples
    --------
    >>> labels = RandomizedLabels(epsilon=2.0, n_classes=10)
    >>> labels.randomize([3, 1, 4], rng=0).shape
    (3,)
    """

    n_classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(n_classes=self.n_classes, least=2)

    def shuffled(self, n_reports: int) -> Event:  # noqa: ARG002  # the signature of the base
        """Raise an error: labels travel with public features, which identify the sender."""
        raise TypeError(
            "randomized labels cannot be shuffled: each belongs to public features. "
            "If labels are sent without features, use RandomizedResponse."
        )

    def worst_case_ratio(self) -> Fraction:
        """Return P(the true label is sent) / P(a given other label is sent)."""
        return self._response.worst_case_ratio()

    def randomize(self, labels: ArrayLike, rng: Seed = None) -> NDArray[np.int64]:
        """Return noisy labels by randomized response among all classes."""
        return self._response.randomize(labels, rng)

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

    def transition(self, prior: ArrayLike | None = None, n_labels: int = 1) -> Floats:
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

    def loss(
        self,
        logits: "Tensor",
        noisy_labels: "Tensor",
        correction: Correction = "forward",
        transition: "Tensor | None" = None,
    ) -> "Tensor":
        """Return one loss per example, corrected for the noise of the labels.

        Parameters
        ----------
        logits
            Scores of a PyTorch model, shape (batch, classes).
        correction
            "forward" for training; "unbiased" for an unbiased estimate of the true loss.
        transition
            Rows of `transition(prior)` for these examples, if labels were drawn `with_prior`
            (forward correction only).
        """
        import torch
        from torch.nn import functional

        logs = functional.log_softmax(logits, dim=1)
        rows = torch.arange(len(logits), device=logits.device)
        if correction == "unbiased":
            if transition is not None:
                raise ValueError("the unbiased loss is for labels drawn without a prior.")
            p, q = (float(x) for x in (self._response.hit_probability, self._miss))
            # The mean of l_y over the noise is (p - q) l_c + q sum_c l_c.
            return (q * logs.sum(dim=1) - logs[rows, noisy_labels]) / (p - q)
        if correction != "forward":
            raise ValueError(f"correction must be 'forward' or 'unbiased', got {correction!r}.")
        if transition is None:
            table = torch.as_tensor(self.transition()[0], dtype=logits.dtype, device=logits.device)
            column = table.log()[:, noisy_labels].T
        else:
            column = transition[rows, :, noisy_labels].log()
        return -torch.logsumexp(logs + column, dim=1)

    @property
    def _response(self) -> RandomizedResponse:
        return RandomizedResponse(epsilon=self.epsilon, n_options=self.n_classes)

    @property
    def _miss(self) -> Fraction:
        return self._response.miss_probability

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


def _random_probability(most: Fraction, n_options: int) -> Fraction:
    """Return the probability of a uniform answer; `most` is just below e^epsilon."""
    return round_up(n_options / (most + n_options - 1))
