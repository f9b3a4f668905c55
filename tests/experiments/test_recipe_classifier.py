"""A recipe as an estimator: it pays once for what it trains, and takes settings by their names."""

import numpy as np
import pytest
from sklearn.base import clone

from tacit.datasets import load
from tacit.experiments import Recipe, RecipeClassifier
from tacit.ledger import Ledger

QUICK = '[training]\nbatch_size = 360\nepochs = 1\n[features]\nkind = "none"'


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_one_event_is_paid_for_features_and_steps(digits):
    ledger = Ledger()
    recipe = Recipe.read("digits").with_settings({"training.epochs": 1})
    model = RecipeClassifier(recipe, epsilon=3.0, delta=1e-5, ledger=ledger, random_state=0)
    model.fit(digits.x_train, digits.y_train)
    assert [entry.event for entry in ledger.history()] == [model.event_]
    assert model.event_ == model.planned(digits.n_records).event
    assert model.score(digits.x_test, digits.y_test) > 0.5
    assert model.predict(digits.x_test[:5]).shape == (5,)


def test_labels_of_any_kind_come_back(digits):
    names = np.array([f"digit {k}" for k in range(10)])
    model = RecipeClassifier(Recipe.parse(QUICK), epsilon=8.0, delta=1e-5, random_state=0)
    model.fit(digits.x_train, names[digits.y_train])
    assert set(model.predict(digits.x_test)) <= set(names)


def test_settings_go_by_the_names_of_the_recipe():
    model = RecipeClassifier(Recipe.parse(QUICK)).set_params(**{"training.clip_norm": 0.5})
    copied = clone(model).set_params(epsilon=2.0)
    assert copied.planned(1000).recipe.training.clip_norm == 0.5
    assert copied.planned(1000).recipe.privacy.epsilon == 2.0
    with pytest.raises(ValueError, match="has no 'clipnorm'"):
        model.set_params(**{"training.clipnorm": 0.5})
    with pytest.raises(ValueError, match="no setting 'clip_norm'"):
        model.set_params(clip_norm=0.5)
    for name, value in {"privacy.epsilon": 8.0, "run.seed": 1, "data.name": "mnist"}.items():
        with pytest.raises(ValueError, match=f"{name} cannot be varied"):
            model.set_params(**{name: value})
    with pytest.raises(ValueError, match="delta cannot be varied"):
        RecipeClassifier(Recipe.parse(QUICK), {"privacy.delta": 0.5}).planned(1000)
    with pytest.raises(ValueError, match="shrink must be 1"):
        model.set_params(**{"training.shrink": 2}).planned(1000)


def test_a_setting_that_is_tuned_wins_over_the_sections_for_an_epsilon():
    text = QUICK + "\n[[at]]\nepsilon = 1.0\ntraining = {learning_rate = 0.1}"
    model = RecipeClassifier(Recipe.parse(text), epsilon=1.0)
    assert model.planned(1000).recipe.training.learning_rate == 0.1
    model.set_params(**{"training.learning_rate": 3.0})
    assert model.planned(1000).recipe.training.learning_rate == 3.0
