"""The loops of a recipe: its schedule, its event, and the ordinary twin beside it."""

import numpy as np
import pytest
import torch

from tacit.events import Gaussian, Sequence
from tacit.experiments import Recipe, models
from tacit.experiments.training_loop import (
    TrainingLoop,
    evaluate,
    fit,
    learning_rate,
    noise_multiplier,
    tensors,
)

N = 64
RECIPE = Recipe.parse(
    """
    [training]
    batch_size = 16
    epochs = 2
    learning_rate = 0.4
    learning_rate_end = 0.1
    decay_epochs = 1
    [privacy]
    epsilon = 4.0
    delta = 1e-3
    """
).filled(N)


@pytest.fixture
def records():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3)).astype(np.float32)
    return tensors(x, (x[:, 0] > 0).astype(np.int64))


def loop_of(recipe, records, **options) -> TrainingLoop:
    model = models.build(recipe.model, (3,), 2, seed=0)
    return TrainingLoop(recipe, model, records, n_records=N, seed=0, **options)


def test_the_learning_rate_falls_linearly_and_then_stays():
    rates = [learning_rate(RECIPE, N, step) for step in range(8)]
    assert rates == pytest.approx([0.4, 0.325, 0.25, 0.175, 0.1, 0.1, 0.1, 0.1])


def test_the_loop_takes_all_steps_at_the_scheduled_rates(records):
    loop = loop_of(RECIPE, records, noise_multiplier=1.0)
    rates = [loop.optimizer.param_groups[0]["lr"] for _ in loop.steps()]
    assert rates == [learning_rate(RECIPE, N, step) for step in range(8)]


def test_the_released_weights_are_the_running_mean_inside_the_context_only(records):
    loop = loop_of(RECIPE, records, noise_multiplier=1.0)
    assert list(loop.steps()) == list(range(1, 9))
    last = [p.detach().clone() for p in loop.model.parameters()]
    with loop.released() as model:
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), last, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), last, strict=True))


def test_the_noise_keeps_features_and_training_within_the_budget(records):
    paid = RECIPE.with_settings({"features.mean_noise_multiplier": 9.0})
    noise, dearer = noise_multiplier(RECIPE, N), noise_multiplier(paid, N)
    assert dearer > noise
    loop = loop_of(paid, records, noise_multiplier=dearer, also=(Gaussian(9.0),))
    assert isinstance(loop.private.event, Sequence)
    costs = [loop.private.epsilon_at(steps, delta=1e-3) for steps in (1, 8)]
    assert costs[0] < costs[1] <= 4.0


def test_a_paid_loss_is_noted_and_changes_no_price(records):
    plain, paid = RECIPE, RECIPE.with_settings({"training.loss_upper": 2.0})
    loops = [loop_of(recipe, records, noise_multiplier=1.0) for recipe in (plain, paid)]
    assert loops[0].private.event == loops[1].private.event
    for loop in loops:
        list(loop.steps())
    assert loops[0].latest is None
    assert loops[1].latest.step == 8
    assert loops[1].latest.loss == loops[1].private.noisy_losses[-1]


def test_two_classes_are_also_measured_by_the_area_under_the_curve(records):
    x, y = records
    model = torch.nn.Linear(3, 2)
    found = evaluate(model, x, y)
    assert model.training
    scores = model(x).detach().diff(dim=1)[:, 0]
    above = (scores[y == 1][:, None] > scores[y == 0]).double().mean()
    assert found["auc"] == pytest.approx(float(above))
    assert "auc" not in evaluate(model, x, torch.zeros_like(y)), "one class has no curve"


def test_the_twin_learns_and_its_metrics_are_at_most_thirty_rows(records):
    rows = fit(torch.nn.Linear(3, 2), records, records, steps=200, rate=0.1, seed=0)
    assert len(rows) <= 30
    assert rows[-1]["step"] == 200
    assert rows[-1]["accuracy"] > 0.95
