"""A small finished run, made without training."""

import json

import pytest

from tacit import events as ev
from tacit.experiments import Facts, RunFolder, file_hash


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write("model.safetensors", b"weights")
    step = ev.PoissonSampled(0.02, ev.Gaussian(1.3))
    rows = [
        {"step": 50 * k, "epoch": k, "epsilon": 0.4 + 0.1 * k, "accuracy": 0.5 + 0.04 * k}
        for k in range(1, 11)
    ]
    folder.write_lines("metrics.jsonl", rows)
    twin = [{"step": 50 * k, "epoch": k, "accuracy": 0.7 + 0.027 * k} for k in range(1, 11)]
    folder.write_lines("baseline.jsonl", twin)
    facts = {
        "version": 1,
        "event": ev.Repeated(step, 500).to_dict(),
        "relation": "add_remove",
        "unit": "record",
        "delta": 1e-5,
        "epsilon": 1.4,
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
        "hyperparameters": {"batch_size": 1000, "clip_norm": 0.1},
        "utility": {
            "metric": "accuracy",
            "private": [{"seed": None, "value": 0.90}, {"seed": None, "value": 0.91}],
            "non_private": [{"seed": None, "value": 0.97}],
            "n_test": 10_000,
        },
        "model_sha256": file_hash(folder / "model.safetensors"),
        "baseline_file": "baseline.jsonl",
        "versions": {"tacit": "0.1.0", "python": "3.11"},
        "created": "2026-11-15T12:00:00Z",
    }
    folder.write("facts.json", json.dumps(Facts.from_dict(facts).to_dict()))
    return folder
