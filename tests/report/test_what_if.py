"""The what-if control: prices of the run's own event with other noise and steps."""

import json
from dataclasses import replace

import pytest

import tacit
from tacit import events as ev
from tacit.report import write_page
from tacit.report.what_if import NOISE, what_if


def facts_of(run, event, **hyperparameters):
    return replace(run.facts(), event=event.to_dict(), hyperparameters=hyperparameters)


STEP = ev.PoissonSampled(0.02, ev.Gaussian(1.3))


def test_the_run_itself_is_in_the_middle(run):
    found = what_if(run.facts())
    assert found is not None
    assert found.noise[found.start] == 1.3
    row = found.epsilons[found.steps.index("the steps of this run")]
    own = tacit.epsilon(ev.Repeated(STEP, 500), delta=1e-5)
    assert row[found.start] == own
    assert list(row) == sorted(row, reverse=True)
    assert f"epsilon {found.data['epsilons'][1][found.start]} at delta 1e-05" in found.words


def test_other_noise_and_steps_are_priced_exactly(run):
    also = ev.Sequence((ev.Gaussian(20.0), ev.Repeated(STEP, 500)))
    found = what_if(facts_of(run, also, noise_multiplier=1.3))
    assert found is not None
    twice = found.epsilons[found.steps.index("twice the steps")]
    step = ev.PoissonSampled(0.02, ev.Gaussian(1.3 * NOISE[-1]))
    expected = tacit.epsilon(ev.Sequence((ev.Gaussian(20.0), ev.Repeated(step, 1000))), delta=1e-5)
    assert twice[-1] == pytest.approx(expected, rel=1e-9)


def test_correlated_noise_and_several_noises_have_a_control_too(run):
    banded = ev.BandedGaussian(2.0, (1.0, 0.5), 40, 4, rate=0.1)
    assert what_if(facts_of(run, banded, noise_multiplier=2.0)).label == "noise multiplier"
    mixed = ev.Sequence((ev.Gaussian(5.0), ev.Repeated(ev.Gaussian(9.0), 3), ev.PureDP(0.1)))
    found = what_if(facts_of(run, mixed))
    assert found.label == "noise, times that of this run"
    assert found.steps == ("the steps of this run",)
    assert found.noise[found.start] == 1.0


@pytest.mark.parametrize("event", [ev.PureDP(1.0), ev.NonPrivate(), ev.Sequence(())])
def test_without_noise_to_change_there_is_none(run, event):
    assert what_if(facts_of(run, event)) is None


def test_stated_prices_are_never_below_the_exact_ones(run):
    found = what_if(run.facts())
    for exact, shown in zip(found.epsilons, found.data["epsilons"], strict=True):
        assert all(float(text) >= value for text, value in zip(shown, exact, strict=True))


def test_the_page_holds_all_prices_and_their_figure(run):
    page = write_page(run.path).read_text(encoding="utf-8")
    assert '<form class="what-if"' in page
    assert "What if" in page
    assert (run / "figures/what-if.csv").is_file()
    data = what_if(run.facts()).data
    assert json.dumps(data["epsilons"][0][0])[1:-1] in page
