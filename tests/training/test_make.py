"""Options of `make_private` that change the speed only, and the microbatch it starts with."""

import pytest
import torch

from tacit.training import Speed, make
from tacit.training.make import starting_limit, usual_lot

CPU = torch.device("cpu")


def test_speed_options_can_be_given_together_or_one_by_one(problem):
    def trained(**options):
        case = problem(seed=1, **options)
        for lot in case.private:
            case.private.step(lot)
        return torch.cat([p.detach().flatten() for p in case.model.parameters()])

    together = trained(speed=Speed(max_microbatch=5, static_shapes=True, engine="vmap"))
    assert torch.equal(together, trained(max_microbatch=5, static_shapes=True, engine="vmap"))
    assert problem(speed=Speed(max_microbatch=5)).private.microbatch == 5


@pytest.mark.parametrize(
    "option",
    [{"max_microbatch": 4}, {"static_shapes": True}, {"num_workers": 1}, {"engine": "loop"}],
)
def test_an_option_given_twice_is_refused(problem, option):
    with pytest.raises(ValueError, match="in speed=Speed"):
        problem(speed=Speed(), **option)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"engine": "fast"}, ValueError),
        ({"max_microbatch": 0}, ValueError),
        ({"num_workers": 0.5}, TypeError),
        ({"compile": True, "engine": "vmap"}, ValueError),
    ],
)
def test_wrong_speed_options_are_refused_at_once(options, error):
    with pytest.raises(error, match=next(iter(options))[:3]):
        Speed(**options)


def test_the_starting_limit_follows_memory_and_lot():
    assert starting_limit(1, CPU, largest_lot=300) == 300
    assert starting_limit(2**34, CPU, largest_lot=300) == 1
    few = starting_limit(2**22, CPU, largest_lot=10**6)
    assert 1 <= few <= 64


def test_lots_above_the_usual_are_rare():
    assert usual_lot(600, deviations=6.0) == 752
    assert usual_lot(256, deviations=2.0) == 288
    assert usual_lot(0.01, deviations=6.0) == 8


def test_by_default_nothing_is_compiled_or_padded_on_a_cpu(problem):
    private = problem().private
    assert Speed().compile is False
    assert private._lot_sum._compiled is None
    assert private._lots.padding is None


def test_the_measured_limit_follows_what_the_tests_needed(monkeypatch):
    gigabyte = 2**30
    found = make._GPUBytes(used=2 * gigabyte, kept=12 * gigabyte, free=30 * gigabyte)
    monkeypatch.setattr(make, "_gpu_bytes", lambda _: found)
    # 10 rows needed 10 GB, and 40 GB can be had, of which a fifth stays free.
    assert make._measured_limit(10, 2 * gigabyte, CPU, largest_lot=100) == 32
    assert make._measured_limit(10, 2 * gigabyte, CPU, largest_lot=20) == 20
    assert make._measured_limit(1, 12 * gigabyte, CPU, largest_lot=20) == 20
