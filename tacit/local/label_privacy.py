"""Label privacy: features are public, and only the label of each example is protected.

Labels are randomized once, before training, and any model may then be trained on them for as
long as one likes. Two losses undo the noise on average:

- *unbiased*: a combination of the losses of all classes whose mean over the noise is the loss of
  the true label (Natarajan et al. 2013; "backward correction" of Patrini et al. 2017,
  arXiv:1609.03683, Theorem 1). It can be negative, so large models overfit it;
- *forward*: the likelihood of the noisy label, -log sum_c P(noisy | c) softmax_c (Theorem 2
  there). Its minimum over all models is the same as without noise, and it trains well.

torch is imported on use.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import whole
from tacit.events import Event
from tacit.local.frequencies import Floats, LocalRandomizer
from tacit.local.randomized_response import RandomizedResponse
from tacit.mechanisms import Seed

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["forward", "unbiased"]


@dataclass(frozen=True, kw_only=True)
class RandomizedLabels(LocalRandomizer):
    """Randomizer of class labels, for training under `epsilon`-label differential privacy.

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

    def transition(self) -> Floats:
        """Return P(noisy label | true label), shape (true classes, noisy classes)."""
        table = np.full((self.n_classes, self.n_classes), float(self._response.miss_probability))
        np.fill_diagonal(table, float(self._response.hit_probability))
        return table

    def loss(
        self,
        logits: "Tensor",
        noisy_labels: "Tensor",
        correction: Correction = "forward",
    ) -> "Tensor":
        """Return one loss per example, corrected for the noise of the labels.

        Parameters
        ----------
        logits
            Scores of a PyTorch model, shape (batch, classes).
        correction
            "forward" for training; "unbiased" for an unbiased estimate of the true loss.
        """
        import torch
        from torch.nn import functional

        logs = functional.log_softmax(logits, dim=1)
        rows = torch.arange(len(logits), device=logits.device)
        if correction == "unbiased":
            p, q = map(float, (self._response.hit_probability, self._response.miss_probability))
            # The mean of l_y over the noise is (p - q) l_c + q sum_c l_c.
            return (q * logs.sum(dim=1) - logs[rows, noisy_labels]) / (p - q)
        if correction != "forward":
            raise ValueError(f"correction must be 'forward' or 'unbiased', got {correction!r}.")
        table = torch.as_tensor(self.transition(), dtype=logits.dtype, device=logits.device)
        return -torch.logsumexp(logs + table.log()[:, noisy_labels].T, dim=1)

    @property
    def _response(self) -> RandomizedResponse:
        return RandomizedResponse(epsilon=self.epsilon, n_options=self.n_classes)
