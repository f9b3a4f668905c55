"""Every recipe and every regression: noise outside the priced law is a thousandth of delta."""

import dataclasses

import pytest

from tacit import Relation
from tacit import events as ev
from tacit.experiments.features import summaries_of
from tacit.experiments.recipe import Recipe, shipped
from tacit.mechanisms import GaussianMechanism, LaplaceMechanism, tail_mass
from tacit.regression import adassp, functional, irls, newton, objective

SIZE, RELEASES = 10**9, 10**6  # more coordinates and releases than any recipe has


def gaussians(event: ev.Event) -> list[ev.Gaussian]:
    """Return all Gaussian events inside `event`."""
    if isinstance(event, ev.Gaussian):
        return [event]
    inner = [getattr(event, name, ()) for name in ("event", "parts")]
    flat = [part for found in inner for part in (found if isinstance(found, tuple) else [found])]
    return [gaussian for part in flat for gaussian in gaussians(part)]


def recipe_mechanisms(recipe: Recipe) -> list[GaussianMechanism | LaplaceMechanism]:
    """Return the mechanisms of a recipe at each of its epsilons: summaries, votes and checks."""
    epsilons = {recipe.privacy.epsilon} | {given["epsilon"] for given in recipe.at}
    found = []
    for epsilon in filter(None, epsilons):
        privacy = dataclasses.replace(recipe.privacy, epsilon=epsilon)
        filled = dataclasses.replace(recipe, privacy=privacy).filled(50_000)
        summaries = summaries_of(filled.features, 50_000).values()
        found += [
            GaussianMechanism(gaussian.noise_multiplier, l2_sensitivity=1.0)
            for summary in summaries
            for gaussian in gaussians(summary.event)
        ]
    aggregator = recipe.answers.aggregator(250)
    return [*found, aggregator._mechanism, *filter(None, [aggregator._check])]


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_prices_all_of_its_noise(name):
    recipe = Recipe.read(name)
    delta = recipe.privacy.delta or 1e-8
    for mechanism in recipe_mechanisms(recipe):
        assert RELEASES * tail_mass(mechanism, size=SIZE) <= 1e-3 * delta


def plan_mechanisms(plan: object) -> list[GaussianMechanism | LaplaceMechanism]:
    values = [getattr(plan, field.name) for field in dataclasses.fields(plan)]
    return [value for value in values if isinstance(value, GaussianMechanism | LaplaceMechanism)]


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
def test_a_regression_prices_all_of_its_noise(epsilon, relation):
    budget = {"epsilon": epsilon, "delta": 1e-6, "relation": relation}
    plans = [
        adassp.plan_adassp(row_norm=1.0, **budget),
        functional.plan_functional(100, epsilon=epsilon, relation=relation),
        objective.plan_objective(100, row_norm=1.0, n_records=10**5, **budget),
        irls.plan_irls(100, n_classes=2, row_norm=1.0, n_records=10**5, **budget),
        newton.plan_newton(100, row_norm=1.0, n_records=10**5, **budget),
    ]
    for plan in plans:
        mechanisms = plan_mechanisms(plan)
        assert mechanisms
        for mechanism in mechanisms:
            assert 1000 * tail_mass(mechanism, size=10**6) <= 1e-3 * 1e-6
