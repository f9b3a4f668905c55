"""A small finished run, made without training."""

import json

import pytest

import tacit
from tacit import Ledger
from tacit import events as ev
from tacit.experiments import Facts, Recipe, RunFolder
from tacit.experiments.facts import with_files


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    recipe = Recipe.from_dict({"training": {"batch_size": 1000, "clip_norm": 0.1}}).to_toml()
    folder.write("recipe.toml", recipe)
    header = json.dumps({"__metadata__": {"tacit": json.dumps({"recipe": recipe})}}).encode()
    folder.write("model.safetensors", len(header).to_bytes(8, "little") + header)
    event = ev.Repeated(ev.PoissonSampled(0.02, ev.Gaussian(1.3)), 500)
    rows = [
        {"step": 50 * k, "epoch": k, "epsilon": 0.4 + 0.1 * k, "accuracy": 0.5 + 0.04 * k}
        for k in range(1, 11)
    ]
    folder.write_lines("metrics.jsonl", rows)
    twin = [{"step": 50 * k, "epoch": k, "accuracy": 0.7 + 0.027 * k} for k in range(1, 11)]
    folder.write_lines("baseline.jsonl", twin)
    facts = {
        "version": 2,
        "event": event.to_dict(),
        "relation": "add_remove",
        "unit": "record",
        "delta": 1e-5,
        "epsilon": tacit.epsilon(event, delta=1e-5),
        "epsilon_target": 1.5,
        "data": "<digits> & friends",
        "n_records": 50_000,
        "assumed_public": ["number of records", "pixel range"],
        "sampling_assumed": "Poisson, rate 0.02",
        "sampling_used": "Poisson, drawn for every step",
        "touches": [{"what": "training", "how": "500 noisy steps", "cost": "paid"}],
        "released": ["the model after the last step"],
        "seed": "OS entropy",
        "model": "linear layer on scattering features",
        "hyperparameters": Recipe.parse(recipe).to_dict()["training"],
        "utility": {
            "metric": "accuracy",
            "private": [{"seed": None, "value": 0.90}, {"seed": None, "value": 0.91}],
            "non_private": [{"seed": None, "value": 0.97}],
            "n_test": 10_000,
            "intervals": {},
        },
        "baseline_file": "baseline.jsonl",
    }
    with Ledger(folder / "run.ledger") as ledger:
        ledger.spend(event)
        folder.write(
            "facts.json", with_files(Facts.from_dict(facts), folder.path, ledger).to_json()
        )
    return folder
