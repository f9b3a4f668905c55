"""Options of `make_private` that change the speed only, and the microbatch it starts with."""

import pytest
import torch

from tacit.training import Speed


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


def test_by_default_nothing_is_compiled_or_padded_on_a_cpu(problem):
    private = problem().private
    assert Speed().compile is False
    assert private._lot_sum._compiled is None
    assert private._lots.padding is None
