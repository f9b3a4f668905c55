"""Inversion gives back what an un-private model holds, and nothing from one that holds nothing."""

import numpy as np
import pytest
import torch
from torch import nn

from tacit.auditing import fit_softmax, invert, likeness, reconstruct
from tacit.datasets import digits


def softmax_regression(x, y, steps=300):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def mean_likeness(model, data, labels, steps):
    images = [invert(model, label, (8, 8), steps=steps) for label in labels]
    groups = [data.x_train[data.y_train == label] for label in labels]
    return np.mean([likeness(i, g) for i, g in zip(images, groups, strict=True)])


def test_a_model_trained_without_noise_gives_some_classes_away():
    data = digits()
    trained = softmax_regression(torch.tensor(data.x_train), torch.tensor(data.y_train), steps=60)
    assert mean_likeness(trained, data, range(3), steps=40) > 0.5


@pytest.mark.slow
def test_a_model_trained_without_noise_gives_its_classes_away():
    data = digits()
    trained = softmax_regression(torch.tensor(data.x_train), torch.tensor(data.y_train))
    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert mean_likeness(trained, data, range(10), steps=300) > 0.5
    assert abs(mean_likeness(fresh, data, range(10), steps=300)) < 0.25


def test_inversion_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).train()
    before = [p.clone() for p in model.parameters()]
    image = invert(model, 3, (8, 8), steps=5)
    assert image.shape == (8, 8)
    assert image.min() >= 0
    assert image.max() <= 1
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_flat_image_is_like_nothing():
    assert likeness(np.ones((2, 2)), np.random.default_rng(0).random((3, 2, 2))) == 0.0


def test_an_informed_attacker_computes_the_record_of_a_class_of_its_own():
    data = digits()
    known, secret = (data.x_train[:300], data.y_train[:300]), data.x_test[:2]
    x, y = np.concatenate([known[0], secret]), np.append(known[1], [10, 11])
    weights = fit_softmax(x, y, n_classes=12, penalty=0.3)
    pictures = reconstruct(weights, *known, penalty=0.3)[10:]
    assert np.abs(pictures - secret.reshape(2, -1)).max() < 0.01


def test_noise_on_the_weights_hides_the_record():
    data, rng = digits(), np.random.default_rng(0)
    known, secret = (data.x_train[:300], data.y_train[:300]), data.x_test[:1]
    x, y = np.concatenate([known[0], secret]), np.append(known[1], 10)
    weights = fit_softmax(x, y, n_classes=11, penalty=0.3)
    noisy = weights + rng.normal(0, 5.0, weights.shape)
    picture = reconstruct(noisy, *known, penalty=0.3)[10].reshape(8, 8)
    assert likeness(np.clip(picture, 0, 1), secret) < 0.9
    assert np.abs(picture - secret[0]).max() > 0.3
