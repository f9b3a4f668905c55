"""The planner chooses from public facts, within its rule, and never above the budget."""

import math

import pytest

import tacit
from tacit import events as ev
from tacit.experiments import Recipe
from tacit.sampling import Poisson
from tacit.text.planner import LEAST_STEPS, WITHIN, WORST, filled, plan_finetuning


@pytest.mark.parametrize(("epsilon", "epochs"), [(3.0, 10), (8.0, 3), (1.0, 0.5)])
@pytest.mark.parametrize("n_records", [1, 30, 1_000, 10_000])
def test_the_plan_keeps_its_rule_and_its_budget(n_records, epsilon, epochs):
    plan = plan_finetuning(n_records, epsilon=epsilon, delta=1e-5, epochs=epochs)
    chosen, least = plan.chosen, plan.candidates[0].ratio
    assert chosen.steps == math.ceil(epochs * n_records / chosen.batch_size)
    assert chosen.ratio <= WORST * least
    smaller = [one for one in plan.candidates if one.batch_size < chosen.batch_size]
    most = WITHIN if chosen.steps >= LEAST_STEPS else WORST
    assert all(one.ratio > most * least for one in smaller)
    step = Poisson(chosen.batch_size / n_records).amplify(ev.Gaussian(chosen.noise_multiplier))
    assert tacit.epsilon(ev.Repeated(step, chosen.steps), delta=1e-5) <= epsilon
    assert ("<- chosen" in str(plan)) == (len(plan.candidates) > 1)


def test_few_records_get_fewer_steps_instead_of_tiny_batches():
    plan = plan_finetuning(100, epsilon=8.0, delta=1e-5, epochs=3)
    assert plan.chosen.batch_size >= 9
    assert "finetune.epochs = " in str(plan)
    enough = plan._epochs_for_enough_steps()
    again = plan_finetuning(100, epsilon=8.0, delta=1e-5, epochs=enough)
    assert again.chosen.steps >= plan.chosen.steps


def test_a_given_batch_and_other_releases_are_part_of_the_plan():
    alone = plan_finetuning(5_000, epsilon=3.0, delta=1e-5, epochs=3, batch_size=500)
    paid = (ev.PureDP(0.5),)
    beside = plan_finetuning(5_000, epsilon=3.0, delta=1e-5, epochs=3, batch_size=500, also=paid)
    assert alone.chosen.batch_size == beside.chosen.batch_size == 500
    assert beside.chosen.noise_multiplier > alone.chosen.noise_multiplier
    assert "as given" in str(alone)


def test_bands_are_chosen_for_the_batch_and_never_lose():
    few = {"epsilon": 8.0, "delta": 1e-5, "epochs": 1, "batch_size": 100}
    plain, chosen = (plan_finetuning(20_000, bands=bands, **few) for bands in (None, "auto"))
    assert (plain.bands, plain.noise_multiplier) == (1, plain.chosen.noise_multiplier)
    assert chosen.bands > 1
    assert chosen.correlation.saving > 2
    assert chosen.chosen == plain.chosen
    assert f"correlated over {chosen.bands} steps" in str(chosen)
    assert plan_finetuning(20_000, bands="auto", most_bands=4, **few).bands == 4
    given = plan_finetuning(20_000, bands=chosen.bands, **few)
    assert given.correlation == chosen.correlation
    large = few | {"batch_size": 15_000, "epsilon": 1.0, "epochs": 50}
    alone = plan_finetuning(20_000, bands="auto", **large)
    assert (alone.bands, alone.correlation.saving) == (1, 1.0)
    assert alone.noise_multiplier == alone.chosen.noise_multiplier
    assert "independent" in str(alone)


def test_more_bands_than_steps_are_all_steps():
    setting = {"epsilon": 8.0, "delta": 1e-5, "epochs": 1, "batch_size": 100}
    assert plan_finetuning(1_000, bands=64, **setting).bands == 10


def test_a_filled_recipe_reads_back_and_fills_to_itself():
    recipe = Recipe.parse('method = "finetune"\n[text]\npath = "x.txt"\nperson = "who"')
    once, plan = filled(recipe, 2_000)
    assert once.privacy.unit == "person"
    assert once.finetune.batch_size == plan.chosen.batch_size
    assert Recipe.parse(once.to_toml()) == once
    assert filled(once, 2_000)[0] == once
    text = once.to_toml().replace("[finetune]", '[finetune]\nbands = "auto"')
    correlated, plan = filled(Recipe.parse(text), 2_000)
    assert correlated.finetune.bands == plan.bands
    assert Recipe.parse(correlated.to_toml()) == correlated
    assert filled(correlated, 2_000)[0] == correlated
