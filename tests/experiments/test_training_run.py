"""A run: what it writes, what it costs, and that no interruption makes it cheaper or different."""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slow_cases import one_fast

from tacit import accounting, datasets
from tacit.errors import BudgetExceeded
from tacit.events import Gaussian, Relation, Repeated
from tacit.experiments import Facts, Recipe, RunFolder, data, load_model, train
from tacit.experiments import training_loop as plan
from tacit.experiments.features import PrivateMean
from tacit.experiments.recipe import TrainingSettings
from tacit.experiments.training_run import Session, _filled
from tacit.experiments.training_touches import releases
from tacit.ledger import Budget, Ledger
from tacit.report import verify_run, write_page
from tacit.sampling import Poisson
from tacit.training import Banded
from tacit.training.banded_noise import Bands
from tacit.training.noise import NoisyMean

ROOT = Path(__file__).resolve().parents[2]
QUICK = """
[features]
kind = "none"
[training]
batch_size = 240
epochs = 2
learning_rate = 2.0
[privacy]
epsilon = 2.0
[run]
seed = 3
baseline_steps = 0
"""


def quick(**settings) -> Recipe:
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    return Recipe.parse(QUICK).with_settings(changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Facts, RunFolder]:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "quick")
    return train(quick(run__baseline_steps=50), folder.path), folder


def test_a_run_folder_holds_what_its_contract_says(finished):
    facts, folder = finished
    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "recipe.toml",
        "metrics.jsonl",
        "baseline.jsonl",
        "model.safetensors",
        "run.ledger",
        "facts.json",
        "data.json",
        ".lock",
    }, "and no key of the noise"
    assert folder.facts() == facts
    assert Facts.from_dict(facts.to_dict()) == facts
    for name, digest in (
        ("model.safetensors", facts.model_sha256),
        ("recipe.toml", facts.recipe_sha256),
    ):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_the_claim_is_what_the_ledger_recorded_and_keeps_within_the_budget(finished):
    facts, folder = finished
    with Ledger(folder / "run.ledger", read_only=True) as ledger:
        assert ledger.event == facts.claim
        assert ledger.verify().head == facts.ledger_head
        assert ledger.epsilon(delta=facts.delta) == facts.epsilon
    bracket = accounting.bracket(facts.claim, delta=facts.delta, relation=Relation.ADD_REMOVE)
    assert facts.epsilon == bracket.upper <= 2.0
    assert facts.epsilon > 1.99, "nothing of the budget is wasted"
    assert facts.seed == 3
    assert facts.n_records == 1438
    assert facts.steps == 12


def test_metrics_are_measured_each_epoch_and_end_with_the_whole_price(finished):
    facts, folder = finished
    rows = folder.read_lines("metrics.jsonl")
    assert [row["step"] for row in rows] == [6, 12]
    assert rows[0]["epsilon"] < rows[1]["epsilon"] == facts.epsilon
    assert rows[-1]["accuracy"] == facts.utility.private[0].value
    assert folder.read_lines("baseline.jsonl")[-1]["step"] == 50
    assert facts.utility.non_private[0].value > 0.5


def test_the_released_model_predicts_what_was_measured(finished):
    facts, folder = finished
    data = datasets.load("digits")
    released = load_model(folder.path)
    accuracy = (released.predict(data.x_test) == data.y_test).mean()
    assert accuracy == pytest.approx(facts.utility.private[0].value)


def test_every_look_at_the_data_is_listed(finished):
    facts, _ = finished
    costs = {touch.what: touch.cost for touch in facts.touches}
    assert costs == {
        "size": "public",
        "preprocessing": "free",
        "training": "paid",
        "model selection": "public",
        "early stopping": "public",
        "evaluation": "public",
        "baseline": "not covered",
    }


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
    facts, folder = finished
    monkeypatch.setattr(Session, "__post_init__", lambda self: pytest.fail("trained again"))
    assert train(quick(run__baseline_steps=50), folder.path) == facts


def test_a_folder_of_another_recipe_or_of_something_else_is_refused(finished, tmp_path):
    _, folder = finished
    with pytest.raises(ValueError, match="holds a run of another recipe"):
        train(quick(training__epochs=3), folder.path)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        train(quick(), tmp_path)


def test_no_twin_is_trained_on_data_that_are_not_public(tmp_path):
    facts = train(quick(run__baseline_steps=50, data__is_public=False), tmp_path / "run")
    assert facts.utility.non_private == ()
    assert facts.baseline_file is None
    assert not (tmp_path / "run" / "baseline.jsonl").exists()


def test_what_is_measured_on_held_out_records_is_not_covered_and_not_called_public(tmp_path):
    from tacit.report import write_page

    facts = train(quick(data__validation_share=0.1), tmp_path / "run")
    assert {t.cost for t in facts.touches if t.what == "evaluation"} == {"not covered"}
    assert facts.released[-1] == "metrics on records held out of the training set after each epoch"
    assert facts.n_records == 1438 - facts.utility.n_test
    page = write_page(tmp_path / "run").read_text(encoding="utf-8")
    assert "Not covered by the claim: records held out" in page
    assert "public test records" not in page


def test_fresh_entropy_gives_another_model_each_time(tmp_path):
    recipe = Recipe.parse(QUICK.replace("seed = 3", ""))
    first, second = (train(recipe, tmp_path / name) for name in "ab")
    assert first.seed == second.seed == "OS entropy"
    assert first.model_sha256 != second.model_sha256


@pytest.mark.parametrize("kind", ["pca", "projection"])
@pytest.mark.parametrize("model", one_fast(["mlp", "cnn"], 2))
def test_features_and_models_combine(tmp_path, kind, model):
    if model == "cnn":
        settings = {"model__kind": "cnn", "model__channels": [4], "model__activation": "tanh"}
    else:
        settings = {"model__kind": "mlp", "model__hidden": [8], "features__components": 10}
        settings["features__kind"] = kind
    recipe = quick(**settings, training__learning_rate=0.5)
    facts = train(recipe, tmp_path / "run", cache=tmp_path / "cache")
    paid = [touch for touch in facts.touches if touch.event is not None]
    assert len(paid) == (settings.get("features__kind") == "pca")
    data = datasets.load("digits")
    released = load_model(tmp_path / "run")
    accuracy = (released.predict(data.x_test) == data.y_test).mean()
    assert accuracy == pytest.approx(facts.utility.private[0].value)


def test_a_model_on_evened_features_predicts_what_was_measured(tmp_path):
    settings = {"kind": "scattering", "scales": 1, "groups": 9, "contrast": True, "even": 20}
    settings |= {"mean_noise_multiplier": 20.0, "even_noise_multiplier": 20.0}
    recipe = quick().with_settings({f"features.{name}": v for name, v in settings.items()})
    facts = train(recipe, tmp_path / "run", cache=tmp_path / "cache")
    assert [touch.cost for touch in facts.touches].count("paid") == 3
    data = datasets.load("digits")
    released = load_model(tmp_path / "run")
    accuracy = (released.predict(data.x_test) == data.y_test).mean()
    assert accuracy == pytest.approx(facts.utility.private[0].value)


def test_paid_features_and_training_share_one_budget(tmp_path):
    recipe = quick(features__kind="pca", features__components=5, features__noise_multiplier=9.0)
    recipe = recipe.with_settings({"features.mean_noise_multiplier": 9.0})
    facts = train(recipe, tmp_path / "run")
    assert facts.epsilon <= 2.0
    with Ledger(tmp_path / "run" / "run.ledger", read_only=True) as ledger:
        assert [entry.kind for entry in ledger.history()] == ["spend", "spend", "plan"]
        both = ledger.epsilon(delta=facts.delta, accountant=accounting.PLD())
    assert both == pytest.approx(facts.epsilon)
    with pytest.raises(ValueError, match="raise their noise_multiplier"):
        plan.noise_multiplier(
            recipe.with_settings({"features.noise_multiplier": 0.5}).filled(99), 99
        )


def test_a_shrunk_run_keeps_steps_and_signal_and_states_its_real_price(tmp_path):
    whole, small = quick().filled(1438), quick(training__shrink=8).filled(1438)
    assert plan.steps_of(small, 1438) == plan.steps_of(whole, 1438)
    assert plan.noise_multiplier(small, 1438) == plan.noise_multiplier(whole, 1438) / 8
    facts = train(small, tmp_path / "run")
    assert facts.steps == 12
    assert facts.sampling_used.startswith(f"Poisson, rate {30 / 1438:.6g}")
    assert facts.epsilon > 2 * facts.epsilon_target
    step = Poisson(30 / 1438).amplify(Gaussian(facts.hyperparameters["noise_multiplier"]))
    assert facts.claim == Repeated(step, 12 + 1)


def test_a_data_sets_own_ledger_pays_and_refuses(tmp_path):
    from tacit.errors import BudgetExceeded
    from tacit.ledger import Budget

    path = tmp_path / "clinic.ledger"
    Ledger(path, budget=Budget(2.0, 1e-5)).close()
    recipe = quick(privacy__ledger=str(path))
    train(recipe, tmp_path / "first")
    with pytest.raises(BudgetExceeded):
        train(recipe.with_settings({"run.seed": 4}), tmp_path / "second")
    assert not (tmp_path / "second" / "facts.json").exists()


def test_two_runs_of_one_seed_both_pay_for_their_features(tmp_path):
    path = tmp_path / "clinic.ledger"
    recipe = quick(privacy__ledger=str(path), features__mean_noise_multiplier=9.0)
    with Ledger(path, budget=Budget(epsilon=100.0, delta=1e-3)):
        pass
    for name in "ab":
        train(recipe, tmp_path / name)
    with Ledger(path, read_only=True) as ledger:
        assert [entry.kind for entry in ledger.history()] == ["spend", "plan"] * 2


def test_any_importable_module_can_be_trained(tmp_path):
    arguments = {"model.kind": "module", "model.module": "torch.nn:Identity"}
    with pytest.raises(ValueError, match="parameters"):
        train(quick().with_settings(arguments), tmp_path / "none")
    arguments["model.module"] = "nonsense:Name"
    with pytest.raises(ValueError, match="cannot be made"):
        train(quick().with_settings(arguments), tmp_path / "absent")


# Interruptions ----------------------------------------------------------------------------------

STOPPED = """
import os, signal, sys
from tacit.experiments import Recipe, train

at, how, where = int(sys.argv[3]), getattr(signal, sys.argv[4]), sys.argv[5]
count = 0

def stop(*given):
    global count
    count += not (given and given[0].doing)  # steps count, not what comes before them
    if count == at:
        os.kill(os.getpid(), how)

if where == "step":
    train(Recipe.read(sys.argv[1]), sys.argv[2], on_progress=stop)
else:  # at the at-th file that is replaced
    replace = os.replace
    def replacing(*files):
        stop()
        return replace(*files)
    os.replace = replacing
    train(Recipe.read(sys.argv[1]), sys.argv[2])
"""


def stopped(recipe: Recipe, folder: Path, *, at: int, how: str, where: str) -> int:
    """Return code of a process that trains and sends itself a signal at the given moment."""
    path = folder.parent / "given.toml"
    path.write_text(recipe.to_toml())
    command = [sys.executable, "-c", STOPPED, str(path), str(folder), str(at), how, where]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Facts:
    recipe = quick(features__kind="pca", features__components=9)
    return train(recipe, tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.parametrize(
    "stop",
    one_fast(
        [
            (9, "SIGKILL", "step"),
            (1, "SIGKILL", "file"),  # the recipe
            (3, "SIGKILL", "file"),  # the first checkpoint, after the features were paid
            (5, "SIGINT", "step"),
            (13, "SIGKILL", "step"),  # after the last step, before the facts
        ],
        6,
    ),
)
@pytest.mark.filterwarnings("ignore:the run goes on after")
def test_a_stopped_run_resumes_and_its_bill_is_what_was_paid(tmp_path, undisturbed, stop):
    at, how, where = stop
    recipe = quick(features__kind="pca", features__components=9)
    assert stopped(recipe, tmp_path / "run", at=at, how=how, where=where) != 0
    facts = train(recipe, tmp_path / "run", lost_steps="pay")
    assert facts.steps == undisturbed.steps == 12
    assert abs(facts.utility.mean - undisturbed.utility.mean) < 0.2
    with Ledger(tmp_path / "run" / "run.ledger", read_only=True) as ledger:
        assert accounting.flatten(ledger.event) == accounting.flatten(facts.claim)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run goes on after")
def test_a_run_killed_at_every_file_resumes(tmp_path):
    recipe = quick(features__kind="pca", features__components=9)
    for at in range(1, 60):
        folder = tmp_path / f"run-{at}"
        code = stopped(recipe, folder, at=at, how="SIGKILL", where="file")
        facts = train(recipe, folder, lost_steps="pay")
        with Ledger(folder / "run.ledger", read_only=True) as ledger:
            assert accounting.flatten(ledger.event) == accounting.flatten(facts.claim)
        if code == 0:
            return
    pytest.fail("the run has more files than expected")


class Killed(BaseException):
    pass


def killed_at(recipe, folder, step):
    """Train until the process would be killed after a step: nothing more is written."""

    def kill(progress):
        if progress.step == step and not progress.doing:
            raise Killed

    with pytest.raises(Killed):
        train(recipe, folder, on_progress=kill)


def test_one_crash_stays_within_the_budget_and_a_second_asks(tmp_path, monkeypatch):
    """On a machine, too, whose sums differ in their last bits, as those of every GPU do."""
    release = NoisyMean.release_into

    def jittered(self, parameters, sums, *rest, **options):
        sums = [total * (1 + 1e-7 * torch.randn_like(total)) for total in sums]
        release(self, parameters, sums, *rest, **options)

    monkeypatch.setattr(NoisyMean, "release_into", jittered)
    recipe = Recipe.parse(QUICK.replace("seed = 3", "")).with_settings(
        {"training.epochs": 40}
    )  # 240 steps
    killed_at(recipe, tmp_path / "run", 101)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.warns(UserWarning, match=r"up to 3, .* reserve; epsilon 2 at"):
        facts = train(recipe, tmp_path / "run")
    assert (facts.steps, facts.resumed) == (240, 1)
    assert 1.99 < facts.epsilon <= 2.0
    assert facts.hyperparameters["reserve"] == 3
    page = write_page(tmp_path / "run").read_text(encoding="utf-8")
    assert "240 steps, and 3 reserved for those that a crash loses" in page
    with pytest.warns(UserWarning, match="reserve"):
        killed_at(recipe, copy, 151)
    with pytest.raises(BudgetExceeded, match="lost_steps='skip' ends the run after 237 of 240"):
        train(recipe, copy)
    with pytest.raises(BudgetExceeded, match="no room for them"):
        train(recipe, copy, lost_steps="pay")
    with pytest.warns(UserWarning, match="The run ends after 237 steps"):
        fewer = train(recipe, copy, lost_steps="skip")
    assert (fewer.steps, fewer.epsilon) == (237, facts.epsilon)
    write_page(copy)
    assert not verify_run(copy)


def test_lost_steps_of_a_run_with_a_seed_need_consent(tmp_path):
    killed_at(quick(), tmp_path / "run", 7)
    with pytest.raises(ValueError, match="not what its seed gives"):
        train(quick(), tmp_path / "run")
    with pytest.warns(UserWarning, match="reserve"):
        facts = train(quick(), tmp_path / "run", lost_steps="pay")
    assert (facts.seed, facts.resumed) == (3, 1)


def test_features_whose_payment_was_lost_are_paid_again_if_asked_to(tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    recipe = quick(features__mean_noise_multiplier=9.0)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateMean, "release", killed)
        with pytest.raises(Killed):
            train(recipe, tmp_path / "run")
    with pytest.raises(BudgetExceeded, match="was paid, and the process ended"):
        train(recipe, tmp_path / "run")
    facts = train(recipe, tmp_path / "run", lost_steps="pay")
    with Ledger(tmp_path / "run" / "run.ledger", read_only=True) as ledger:
        assert [entry.kind for entry in ledger.history()] == ["spend", "spend", "plan"]
        assert accounting.flatten(ledger.event) == accounting.flatten(facts.claim)
    assert facts.epsilon > 2.0


@pytest.mark.slow
def test_a_checkpoint_is_readable_by_its_owner_alone(tmp_path):
    recipe = quick()
    stopped(recipe, tmp_path / "run", at=4, how="SIGKILL", where="step")
    secret = tmp_path / "run" / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret.iterdir())


def test_a_run_is_resumed_on_other_records(tmp_path, monkeypatch):
    recipe = Recipe.parse(QUICK.replace("seed = 3", ""))
    killed_at(recipe, tmp_path / "run", 7)
    digits = datasets.load("digits")
    changed = replace(digits, x_train=digits.x_train[::-1].copy())
    monkeypatch.setattr(data, "load", lambda *_, **__: changed)
    with pytest.warns(UserWarning, match="reserve"):
        assert train(recipe, tmp_path / "run").epsilon <= 2.0


def test_payments_without_a_checkpoint_are_not_built_upon(tmp_path):
    recipe = quick(features__mean_noise_multiplier=9.0)
    train(recipe, tmp_path / "run")
    (tmp_path / "run" / "facts.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint to resume it from"):
        train(recipe, tmp_path / "run")


@pytest.mark.slow  # prices for groups of records take seconds
@pytest.mark.parametrize("bands", ["auto", 4, 1000])
def test_the_page_shows_correlated_noise_and_what_it_saved(tmp_path, bands):
    facts = train(quick(training__bands=bands), tmp_path / "run")
    found = facts.hyperparameters["bands"]
    if found == 1:
        assert facts.event["type"] != "BandedGaussian"
        return
    column, saving = facts.event["column"], facts.hyperparameters["noise_saving"]
    assert len(column) == found <= facts.steps
    assert saving > 0
    page = write_page(tmp_path / "run").read_text(encoding="utf-8")
    assert f"noise correlated over {len(column)} steps by the column ({column[0]:.3f}" in page
    compared = f"{saving:.2f} times less" if saving >= 1 else f"{1 / saving:.2f} times more"
    assert f"running sums carry {compared} noise than independent noise" in page


@pytest.mark.parametrize(
    ("settings", "released"),
    [
        ({}, "running mean of the weights"),
        ({"average": 0.0}, "final weights"),
        ({"bands": 4}, "mean of the last weights"),
        ({"bands": 4, "average": 0.0}, "final weights"),
    ],
    ids=str,
)
def test_the_facts_list_the_mean_that_is_released(settings, released):
    recipe = replace(Recipe(), training=TrainingSettings(**settings))
    dataset = SimpleNamespace(is_test_public=False, flags=())
    assert releases(recipe, dataset)[0] == released


def test_bands_are_chosen_for_all_that_is_paid_and_for_memory(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    lines = [f"{number % 10},{'ab'[number % 3 == 0]}" for number in range(2000)]
    path.write_text("\n".join(["x,y", *lines]) + "\n")
    schema = {"target": "y", "columns": {"x": [0, 9], "y": ["a", "b"]}}
    asked = Recipe.from_dict({
        "data": {"name": "table", "path": str(path), "schema": schema},
        "privacy": {"epsilon": 3.0},
        "training": {"epochs": 2.0, "batch_size": 20, "bands": "auto"},
        "model": {"kind": "linear"},
        "run": {"baseline_steps": 0},
    })  # fmt: skip
    dataset, found = data.load(asked.data, None, takes_persons=True), []

    def note(_, **options):
        found.append(options)
        return Bands(2, 1.0, 1.0)

    monkeypatch.setattr(plan, "price_bands", note)
    assert _filled(asked, dataset).training.bands == 2
    paid = [event.epsilon for event in found[0]["also"]]
    shares = asked.data.check_share, asked.data.evaluation_share
    assert paid == pytest.approx([3.0 * share for share in shares])
    assert found[0]["most"] == 256
    monkeypatch.setattr(plan, "Banded", partial(Banded, memory=8 * 4 * 6))
    _filled(asked, dataset)
    assert found[1]["most"] == 1 + 6  # a model of four parameters
