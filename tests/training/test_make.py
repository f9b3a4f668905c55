"""Options of `make_private` that change the speed only, and the microbatch it starts with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import tacit
from tacit.training import Banded, Noise, NoisyLoss, Speed, make


@pytest.mark.parametrize(
    "option",
    [{"max_microbatch": 4}, {"num_workers": 1}],
)
def test_options_of_speed_are_given_there_alone(problem, option):
    case = problem(speed=Speed(**option), check=False)
    case.private.step(next(iter(case.private)))
    assert case.private.microbatch <= option.get("max_microbatch", 64)
    with pytest.raises(TypeError, match="unexpected keyword"):
        tacit.make_private(case.model, case.optimizer, (case.x, case.y), abs, **option)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_microbatch": 0}, ValueError),
        ({"num_workers": 0.5}, TypeError),
    ],
)
def test_wrong_speed_options_are_refused_at_once(options, error):
    with pytest.raises(error, match=next(iter(options))[:3]):
        Speed(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "secure"}, "noise must be tacit.training.Noise"),
        ({"noise": Noise(), "correlated": NoisyLoss(upper=1.0)}, "noise must be tacit.training"),
        ({"callbacks": [1]}, "callbacks must be a list of functions"),
        ({"secure": 1}, "secure must be"),
        ({"errors_in_full": "yes"}, "errors_in_full must be"),
        ({"check": None}, "check must be"),
    ],
    ids=str,
)
def test_settings_of_noise_and_reports_are_checked(problem, options, message):
    with pytest.raises(TypeError, match=message):
        problem(**options)


def test_correlated_noise_alone_is_short_for_its_settings(problem):
    banded = Banded(bands=2, average=0.0)
    short, long = problem(noise=banded).private, problem(noise=Noise(correlated=banded)).private
    assert short.event == long.event
    secure = problem(noise=Noise(correlated=banded, secure=True, arithmetic="bounded")).private
    assert secure.arithmetic.eta > 0
    assert secure.event.equivalent == short.event.equivalent


def test_by_default_nothing_is_compiled_or_padded_on_a_cpu(problem, capsys):
    case = problem(steps=10**6)
    assert Speed().compile == "auto"
    assert case.private._lot_sum._compiled is None
    assert case.private._lots.padding is None
    case.private.step(next(iter(case.private)))
    assert "compiled" not in capsys.readouterr().err  # a slow machine says that it traces


def choice(problem, *, tensors=150, steps=10_000, speed=None, is_cuda=True, **options):
    """Return what is decided for a model of so many tensors, on a device that need not exist."""
    plan = replace(problem(check=False).private._plan, steps=steps, **options.pop("plan", {}))
    parameters = {str(i): SimpleNamespace(is_cuda=is_cuda) for i in range(tensors)}
    records = SimpleNamespace(n_lengths=1)
    return make._with_choice_of_compilation(speed or Speed(), plan, parameters, records)


def test_on_a_gpu_a_long_run_is_compiled_and_told_so(problem):
    speed, reason = choice(problem)
    assert speed.compile == "auto"
    assert "is compiled" in reason
    assert "10,000 steps" in reason
    assert "compile=False" in reason


@pytest.mark.parametrize(
    "setting",
    [
        {"is_cuda": False},
        {"steps": 100},  # would not earn the compilation back
        {"speed": Speed(compile=False)},
    ],
)
def test_where_compiling_does_not_pay_nothing_is_compiled_or_said(problem, setting):
    speed, reason = choice(problem, **setting)
    assert speed.compile is False
    assert reason == ""


def test_what_keeps_a_long_run_from_being_compiled_is_named(problem):
    speed, reason = choice(problem, plan={"noisy_loss": NoisyLoss(upper=1.0)})
    assert speed.compile is False
    assert "not compiled" in reason
    assert "noisy_loss" in reason
    with pytest.raises(ValueError, match="cannot release noisy_loss"):
        choice(problem, speed=Speed(compile=True), plan={"noisy_loss": NoisyLoss(upper=1.0)})


def test_more_steps_and_more_tensors_lead_to_compilation(problem):
    for tensors in (1, 8, 150, 1_000):
        found = [
            bool(choice(problem, tensors=tensors, steps=10**k)[0].compile) for k in range(1, 7)
        ]
        assert found == sorted(found)  # once it pays, it pays for more steps too
        assert found[-1]
        assert not found[0]


def test_the_reason_is_printed_once_before_the_first_lot(problem, capsys):
    case = problem()
    case.private._lot_sum._reason = "The step is compiled."
    for lot in case.private:
        case.private.step(lot)
    assert capsys.readouterr().err == "The step is compiled.\n"
