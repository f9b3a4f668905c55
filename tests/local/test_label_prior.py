"""Labels with a prior: exact ratios, and transitions that match the code."""

import numpy as np
import pytest

import tacit

torch = pytest.importorskip("torch")
from _label_prior import PriorLabels, forward_loss  # noqa: E402  # needs torch

PRIORS = np.array([[0.7, 0.2, 0.05, 0.05], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]])


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_labels_with_a_prior_are_exactly_private_and_follow_the_transition(
    row, epsilon, enumeration
):
    labels = PriorLabels(epsilon=epsilon, n_classes=4)
    prior = PRIORS[row : row + 1]
    table = labels.transitions(prior)[0]
    laws = []
    for true in range(4):
        law, seen = enumeration.law(lambda rng, c=true: labels.with_prior([c], prior, rng))
        laws.append(law)
        found = {int(seen[key][0]): float(p) for key, p in law.items()}
        np.testing.assert_allclose(table[true], [found.get(c, 0.0) for c in range(4)], atol=1e-12)
    assert enumeration.ratio(laws) <= enumeration.exponential(epsilon)


def test_a_prior_keeps_the_number_of_classes_of_the_algorithm():
    # Ghazi et al. 2021, Algorithm 2: maximize e^eps / (e^eps + k - 1) times the prior of the top k.
    labels = PriorLabels(epsilon=1.0, n_classes=4)
    kept = (labels.transitions(PRIORS, 3)[:, 0] > 0).sum(axis=1)
    scores = np.exp(1) / (np.exp(1) + np.arange(4)) * np.cumsum(-np.sort(-PRIORS, axis=1), axis=1)
    assert kept.tolist() == (scores.argmax(axis=1) + 1).tolist()


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_event_covers_labels_with_and_without_a_prior(row, epsilon):
    labels = PriorLabels(epsilon=epsilon, n_classes=4)
    for table in (labels.transitions(PRIORS[row : row + 1])[0], labels.transitions()[0]):
        for share in (0.0, 0.3, 0.9):
            excess = table[:, None] - np.exp(share * epsilon) * table[None, :]
            delta = np.maximum(excess, 0).sum(axis=2).max()
            assert delta <= tacit.delta(labels.event, epsilon=share * epsilon) + 1e-12


def test_the_loss_of_an_even_prior_is_that_without_one():
    labels = PriorLabels(epsilon=1.0, n_classes=3)
    logits = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    even = torch.as_tensor(labels.transitions(np.full((1, 3), 1 / 3)))
    found = forward_loss(logits, torch.tensor([2]), even)
    torch.testing.assert_close(found, labels.loss(logits, torch.tensor([2])))
    with pytest.raises(ValueError, match="prior must have shape"):
        labels.with_prior([0, 1], np.ones((1, 3)))
