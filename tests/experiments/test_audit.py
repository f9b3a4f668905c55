"""An honest run passes its audit; a run whose noise is too small does not."""

import json
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.experiments import AUDIT, Recipe, audit, audit_run, demonstrations, run_pate, train
from tacit.training.noise import NoisyMean

SMALL = """
[training]
epochs = 2
[privacy]
epsilon = 6.0
[run]
seed = 1
baseline_steps = 0
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "small"
    train(Recipe.parse(SMALL), folder)
    return folder


@pytest.fixture(scope="module")
def unshown(tmp_path_factory):
    """A run that is fast to audit: all records in every lot, and no demonstrations."""
    folder = tmp_path_factory.mktemp("run") / "unshown"
    changes = {"data.is_public": False, "training.batch_size": 1438}
    train(Recipe.parse(SMALL).with_settings(changes), folder)
    return folder


@pytest.fixture
def quiet_noise(monkeypatch):
    """A fault of the kind an audit is for: a quarter of the billed noise."""
    honest = NoisyMean.release

    def release(self, sums, scales, *, noise_multiplier, **options):
        return honest(self, sums, scales, noise_multiplier=noise_multiplier / 4, **options)

    monkeypatch.setattr(NoisyMean, "release", release)


def test_an_honest_run_passes_and_the_attack_is_not_idle(run):
    found = audit_run(run, n_canaries=1500, seed=0)
    assert found.passes
    assert found.epsilon == pytest.approx(6.0, rel=0.05)  # the recipe's rate, kept up to rounding
    best = max(bound.epsilon_lower for bound in found.bounds)
    assert 0.3 * found.epsilon < best < found.epsilon
    assert found.accuracy is not None
    shown = found.demonstrations
    assert shown is not None
    assert shown.membership["without privacy"]["auc"] >= 0.6
    assert 0.4 < shown.membership["released model"]["auc"] < 0.57
    assert shown.inversion["without privacy"] > 0.99
    assert shown.inversion["epsilon 6"] < 0.6
    written = json.loads((run / AUDIT).read_text())
    assert written["passes"] is True
    assert written["bounds"][0]["method"] == "one run"
    for name in ("membership", "inversion"):
        assert (run / f"figures/{name}.csv").is_file()


def test_too_little_noise_is_found(unshown, quiet_noise):
    found = audit_run(unshown, n_canaries=1500, seed=0)
    assert not found.passes
    assert any(test.is_refuted for test in found.tests)


@pytest.mark.slow
def test_too_little_noise_is_found_in_sampled_lots(run, quiet_noise):
    found = audit_run(run, n_canaries=1500, seed=0)
    assert not found.passes
    assert any(test.is_refuted for test in found.tests)


@pytest.mark.slow
def test_a_certificate_that_claims_too_little_is_found(unshown, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(unshown, copied)
    facts = json.loads((copied / "facts.json").read_text())
    (copied / "facts.json").write_text(json.dumps(facts | {"epsilon": facts["epsilon"] / 8}))
    found = audit_run(copied, n_canaries=1500, seed=0)
    assert not any(test.is_refuted for test in found.tests)  # the noise is right, the claim is not
    assert not found.passes


@pytest.mark.slow
def test_all_attacks_together_raise_a_false_alarm_as_rarely_as_stated(unshown):
    found = audit_run(unshown, n_canaries=200, confidence=0.9, seed=0)
    attacks = (*found.bounds, *found.tests, found.mechanism)
    assert sum(1 - attack.confidence for attack in attacks) == pytest.approx(0.1)


@pytest.mark.slow
def test_private_records_are_not_measured(unshown):
    found = audit_run(unshown, n_canaries=200, seed=0)
    assert found.accuracy is None
    assert found.demonstrations is None


@pytest.mark.slow
def test_the_verb_prints_bounds_and_ends_with_zero(run, monkeypatch):
    monkeypatch.setattr(demonstrations, "_SHADOW_STEPS", 50)
    result = CliRunner().invoke(app, ["audit", str(run), "--canaries", "400", "--seed", "0"])
    assert result.exit_code == 0, result.output
    assert "no fault found (a correct bill is flagged in at most 5 % of audits)" in result.output
    page = (run / "report.html").read_text()
    assert "What the audit found" in page
    for name in ("membership", "inversion"):
        assert f'<figure id="{name}">' in page
        assert (run / f"figures/{name}.svg").is_file()


@pytest.mark.slow
def test_the_verb_ends_with_one_where_the_bill_is_refuted(unshown, quiet_noise):
    command = ["audit", str(unshown), "--canaries", "1500", "--seed", "0", "--no-page", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "refuted" in result.stderr


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert result.exit_code == 2
    assert "no finished run" in result.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"answers.mechanism": "laplace"}, marks=pytest.mark.slow),
        pytest.param(
            {"answers.threshold": 30.0, "answers.threshold_noise": 12.0}, marks=pytest.mark.slow
        ),
    ],
    ids=["gaussian", "laplace", "threshold"],
)
def test_the_answers_of_a_pate_run_are_attacked(tmp_path, changes, monkeypatch):
    recipe = Recipe(method="pate")
    run_pate(recipe.with_settings({"run.seed": 1, "answers.noise": 8.0, **changes}), tmp_path)
    found = audit_run(tmp_path, n_canaries=2000, seed=0)
    assert found.passes
    assert max(bound.epsilon_lower for bound in found.bounds) > 0.15 * found.epsilon
    honest = audit._answer

    def loud(aggregator, n_teachers, inside, random):  # a quarter of the billed noise
        quiet = {name: value / 4 for name, value in vars(aggregator).items() if name != "threshold"}
        return honest(replace(aggregator, **quiet), n_teachers, inside, random)

    monkeypatch.setattr(audit, "_answer", loud)
    assert not audit_run(tmp_path, n_canaries=2000, seed=0).passes
