"""The logit model of one attribute: its surface, its paths, and what is refused."""

import numpy as np
import pytest

from tacit.experiments import Recipe, study_logit

RECIPE = """
name = "toy"
[data]
name = "table"
path = "toy.csv"
is_public = true
[data.schema]
target = "married"
[data.schema.columns.married]
categories = ["0", "1"]
[data.schema.columns.educ]
lower = 0
upper = 10
[training]
batch_size = 400
epochs = 20
clip_norm = 2.0
momentum = 0.0
average = 0.0
learning_rate = 0.5
[run]
seed = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    educ = rng.integers(0, 11, 2500)
    married = rng.random(2500) < 1 / (1 + np.exp(-(educ - 5) * 0.3 - 0.5))
    path = tmp_path_factory.mktemp("data")
    rows = "".join(f"{e},{int(m)}\n" for e, m in zip(educ, married, strict=True))
    (path / "toy.csv").write_text("educ,married\n" + rows)
    return path


@pytest.fixture(scope="module")
def study(folder):
    return study_logit(Recipe.parse(RECIPE), epsilons=(0.1, 5.0), repeats=2, root=folder)


def test_the_ordinary_path_ends_at_the_maximum_of_the_surface(study):
    log_odds, slope = study.ordinary[-1]
    assert log_odds == pytest.approx(0.5, abs=0.15)
    assert slope == pytest.approx(0.3, abs=0.06)
    assert -study.loss >= max(max(row) for row in study.surface)
    heights = np.asarray(study.surface)
    row, column = np.unravel_index(heights.argmax(), heights.shape)
    assert study.log_odds[column] == pytest.approx(log_odds, abs=0.1)
    assert study.slopes[row] == pytest.approx(slope, abs=0.05)


def test_every_path_starts_at_zero_and_more_budget_ends_nearer(study):
    assert {run.points[0] for run in study.private} == {(0.0, 0.0)}
    assert [run.epsilon for run in study.private] == [0.1, 0.1, 5.0, 5.0]
    little, much = study.private[0], study.private[-1]
    assert study.loss < much.loss < little.loss
    assert len(much.points) == len(little.points) > 90


def test_shares_are_those_of_the_table(study):
    assert [value for value, _, _ in study.levels] == list(range(11))
    assert sum(count for _, _, count in study.levels) == study.n_records


def test_what_has_no_surface_is_refused(folder):
    recipe = Recipe.parse(RECIPE)
    with pytest.raises(ValueError, match="is_public"):
        study_logit(recipe.with_settings({"data.is_public": False}), epsilons=(1,), root=folder)
    with pytest.raises(ValueError, match="one attribute"):
        study_logit(Recipe(), epsilons=(1,))
