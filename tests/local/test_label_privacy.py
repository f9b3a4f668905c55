"""Label privacy: exact ratios, transitions that match the code, and losses without bias."""

import numpy as np
import pytest

import tacit
from tacit import local

torch = pytest.importorskip("torch")

PRIORS = np.array([[0.7, 0.2, 0.05, 0.05], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]])


def test_plain_labels_are_exactly_private(enumeration):
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=4)
    enumeration.check_private(labels, range(4))
    laws, outcomes = zip(
        *[enumeration.law(lambda rng, c=c: labels.randomize(c, rng)) for c in range(4)],
        strict=True,
    )
    table = labels.transition()[0]
    for true, (law, seen) in enumerate(zip(laws, outcomes, strict=True)):
        for key, probability in law.items():
            assert float(probability) == pytest.approx(table[true, int(seen[key])])


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_labels_with_a_prior_are_exactly_private_and_follow_the_transition(
    row, epsilon, enumeration
):
    labels = local.RandomizedLabels(epsilon=epsilon, n_classes=4)
    prior = PRIORS[row : row + 1]
    table = labels.transition(prior)[0]
    laws = []
    for true in range(4):
        law, seen = enumeration.law(lambda rng, c=true: labels.with_prior([c], prior, rng))
        laws.append(law)
        found = {int(seen[key][0]): float(p) for key, p in law.items()}
        np.testing.assert_allclose(table[true], [found.get(c, 0.0) for c in range(4)], atol=1e-12)
    assert enumeration.ratio(laws) <= enumeration.exponential(epsilon)


def test_a_prior_keeps_the_number_of_classes_of_the_algorithm():
    # Ghazi et al. 2021, Algorithm 2: maximize e^eps / (e^eps + k - 1) times the prior of the top k.
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=4)
    kept = (labels.transition(PRIORS, 3)[:, 0] > 0).sum(axis=1)
    scores = np.exp(1) / (np.exp(1) + np.arange(4)) * np.cumsum(-np.sort(-PRIORS, axis=1), axis=1)
    assert kept.tolist() == (scores.argmax(axis=1) + 1).tolist()


def test_the_unbiased_loss_has_the_mean_of_the_true_loss():
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=4)
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = torch.as_tensor(labels.transition()[0])
    true = torch.nn.functional.cross_entropy(logits, torch.arange(4), reduction="none")
    noisy = [labels.loss(logits, torch.full((4,), y), "unbiased") for y in range(4)]
    mean = (table * torch.stack(noisy, dim=1)).sum(dim=1)
    torch.testing.assert_close(mean, true)


def test_the_forward_loss_is_least_at_the_true_probabilities():
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=3)
    truth = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    noisy = truth @ torch.as_tensor(labels.transition()[0])
    logits = truth.log().clone().requires_grad_()
    each = torch.cat([labels.loss(logits, torch.tensor([y])) for y in range(3)])
    (noisy[0] * each).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-12, rtol=0)
    prior = torch.as_tensor(labels.transition(np.full((1, 3), 1 / 3)))
    with_table = labels.loss(logits, torch.tensor([2]), transition=prior)
    torch.testing.assert_close(with_table, each[2:3])


@pytest.mark.parametrize("correction", ["forward", "unbiased"])
def test_a_model_learns_from_randomized_labels(correction):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 6000)
    x = torch.as_tensor(np.eye(3)[y] + rng.normal(0, 0.4, (6000, 3)), dtype=torch.float32)
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=3)
    noisy = torch.as_tensor(labels.randomize(y, rng=1))
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(150):
        optimizer.zero_grad()
        labels.loss(model(x), noisy, correction).mean().backward()
        optimizer.step()
    accuracy = (model(x).argmax(1).numpy() == y).mean()
    assert accuracy > 0.85


def test_wrong_arguments_are_named():
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=3)
    with pytest.raises(ValueError, match="correction must be"):
        labels.loss(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), "backward")
    with pytest.raises(ValueError, match="without a prior"):
        labels.loss(
            torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), "unbiased", torch.ones(1, 3, 3)
        )
    with pytest.raises(ValueError, match="prior must have shape"):
        labels.with_prior([0, 1], np.ones((1, 3)))


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_event_covers_labels_with_and_without_a_prior(row, epsilon):
    labels = local.RandomizedLabels(epsilon=epsilon, n_classes=4)
    for table in (labels.transition(PRIORS[row : row + 1])[0], labels.transition()[0]):
        for share in (0.0, 0.3, 0.9):
            excess = table[:, None] - np.exp(share * epsilon) * table[None, :]
            delta = np.maximum(excess, 0).sum(axis=2).max()
            assert delta <= tacit.delta(labels.event, epsilon=share * epsilon) + 1e-12


def test_labels_of_public_features_cannot_be_shuffled():
    with pytest.raises(TypeError, match="cannot be shuffled"):
        local.RandomizedLabels(epsilon=1.0, n_classes=3).shuffled(100)
