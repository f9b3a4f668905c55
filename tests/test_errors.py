"""A guarantee that protects very little is asked for with one warning, and is still given."""

import warnings

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.errors import WeakGuarantee

TORCH = {"batch_size": 10, "steps": 1, "clip_norm": 1.0}


def run(epsilon, delta):
    x = torch.zeros(50, 1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = {"epsilon": epsilon, "delta": delta}
    tacit.make_private(model, optimizer, (x,), lambda m, b: m(b[0]).sum(1), **budget, **TORCH)


def regression(epsilon, delta):
    x = np.zeros((50, 1))
    model = tacit.regression.LinearRegression(
        epsilon=epsilon, delta=delta, bounds=(0, 1), target_bounds=(0, 1), method="adassp"
    )
    model.fit(x, x[:, 0])


def issued(call, *arguments, **named):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", WeakGuarantee)
        call(*arguments, **named)
    return [str(one.message) for one in found if one.category is WeakGuarantee]


@pytest.mark.parametrize("call", [run, regression])
def test_a_weak_guarantee_is_asked_for_with_a_warning(call):
    (large,) = issued(call, 500.0, 1e-3)
    assert "epsilon 500 is above 20" in large
    (likely,) = issued(call, 1.0, 0.1)
    assert "delta 0.1 is above 1 / 50" in likely
    assert issued(call, 20.0, 0.02) == []


def test_only_numbers_that_are_given_and_public_are_judged():
    assert issued(WeakGuarantee.issue, epsilon=None, delta=0.5) == []
    assert issued(WeakGuarantee.issue, epsilon="many", delta=None, n_records=5) == []
    assert len(issued(WeakGuarantee.issue, epsilon=21, delta=0.5, n_records=np.int64(3))) == 2


def test_the_command_line_prints_one_sentence(tmp_path):
    command = ["ledger", "create", str(tmp_path / "a.ledger"), "--epsilon", "500"]
    with warnings.catch_warnings():
        warnings.simplefilter("always", WeakGuarantee)
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "warning: epsilon 500 is above 20" in result.output
    assert "errors.py" not in result.output
