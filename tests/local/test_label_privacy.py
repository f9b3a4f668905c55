"""Label privacy: exact ratios, transitions that match the code, and losses without bias."""

import numpy as np
import pytest

import tacit
from tacit import local

torch = pytest.importorskip("torch")


def test_plain_labels_are_exactly_private(enumeration):
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=4)
    enumeration.check_private(labels, range(4))
    laws, outcomes = zip(
        *[enumeration.law(lambda rng, c=c: labels.randomize(c, rng)) for c in range(4)],
        strict=True,
    )
    table = labels.transition()
    for true, (law, seen) in enumerate(zip(laws, outcomes, strict=True)):
        for key, probability in law.items():
            assert float(probability) == pytest.approx(table[true, int(seen[key])])


def test_the_unbiased_loss_has_the_mean_of_the_true_loss():
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=4)
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = torch.as_tensor(labels.transition())
    true = torch.nn.functional.cross_entropy(logits, torch.arange(4), reduction="none")
    noisy = [labels.loss(logits, torch.full((4,), y), "unbiased") for y in range(4)]
    mean = (table * torch.stack(noisy, dim=1)).sum(dim=1)
    torch.testing.assert_close(mean, true)


def test_the_forward_loss_is_least_at_the_true_probabilities():
    labels = local.RandomizedLabels(epsilon=1.0, n_classes=3)
    truth = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    noisy = truth @ torch.as_tensor(labels.transition())
    logits = truth.log().clone().requires_grad_()
    each = torch.cat([labels.loss(logits, torch.tensor([y])) for y in range(3)])
    (noisy[0] * each).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-12, rtol=0)


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


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_event_covers_labels(epsilon):
    labels = local.RandomizedLabels(epsilon=epsilon, n_classes=4)
    table = labels.transition()
    for share in (0.0, 0.3, 0.9):
        excess = table[:, None] - np.exp(share * epsilon) * table[None, :]
        delta = np.maximum(excess, 0).sum(axis=2).max()
        assert delta <= tacit.delta(labels.event, epsilon=share * epsilon) + 1e-12


def test_labels_of_public_features_cannot_be_shuffled():
    with pytest.raises(TypeError, match="cannot be shuffled"):
        local.RandomizedLabels(epsilon=1.0, n_classes=3).shuffled(100)
