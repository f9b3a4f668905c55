"""The audit of a recipe's DP-SGD covers all that the recipe says of a step, and restarts."""

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import pytest

from tacit.experiments import Recipe, mechanism_checks
from tacit.training import EMA, AdamBC, Banded, NoisyLoss, Views

N = 60
FAULTS = run_path(str(Path(__file__).parents[1] / "auditing" / "faults.py"))["FAULTS"]


def check(monkeypatch=None, **training):
    """Return the audit of a recipe; with `monkeypatch`, only the setup that it would audit."""
    rng, seen = np.random.default_rng(0), []
    changes = {f"training.{name}": value for name, value in training.items()}
    recipe = Recipe.parse("[training]\nepochs = 2\nbatch_size = 12").with_settings(changes)
    images, classes = rng.normal(size=(N, 8, 8)).astype(np.float32), rng.integers(0, 10, N)
    if monkeypatch is not None:
        monkeypatch.setattr(mechanism_checks, "audit_training", lambda one, **_: seen.append(one))
    found = mechanism_checks.check_training(
        recipe.filled(N),
        SimpleNamespace(n_records=N, hyperparameters={"noise_multiplier": 1.0}),
        SimpleNamespace(x_train=images, y_train=classes, shape=(8, 8)),
        SimpleNamespace(persons=None, n_classes=10),
        confidence=0.999,
        rng=0,
    )
    return seen[0] if seen else found


def test_the_setup_is_that_of_the_recipe(monkeypatch):
    setup = check(monkeypatch, views=3, loss_upper=2.0, optimizer="adam", average=0.5)
    augment = setup.settings["augment"]
    assert isinstance(augment, Views)
    assert (augment.count, setup.noisy_loss) == (3, NoisyLoss(upper=2.0))
    assert setup.how == "resumed"
    assert isinstance(setup.optimizer(list(setup.model.parameters())), AdamBC)
    average = setup.average(setup.model)
    assert isinstance(average, EMA)
    assert average.decay == 0.5


def test_correlated_noise_is_not_resumed(monkeypatch):
    setup = check(monkeypatch, bands=4)
    assert isinstance(setup.settings["noise"], Banded)
    assert (setup.how, setup.average(setup.model)) == ("step", None)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"views": 2, "loss_upper": 2.0}, {"bands": 4}], ids=str)
def test_a_correct_recipe_passes(options):
    assert check(**options).passes


@pytest.mark.slow
def test_noise_that_starts_again_after_a_restart_is_found(monkeypatch):
    FAULTS["noise_starts_again_after_a_restart"].plant(monkeypatch)
    assert not check().passes
