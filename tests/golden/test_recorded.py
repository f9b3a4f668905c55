"""What everything releases is what was recorded: a tenth in every run, all in the slow suite."""

import golden_draws
import golden_fits
import golden_prices
import golden_store as store
import golden_training
import pytest
from golden_events import query, types
from slow_cases import one_fast

from tacit.events import Event

RECORDED, AGAIN = store.load()
ONE_BY_ONE = (
    golden_prices.KNOWN_PRICES | golden_draws.CASES | golden_fits.CASES | golden_training.CASES
)
CASES = ONE_BY_ONE | golden_prices.FUZZED
PARTS = 40  # tests of random events: 50 in each


def compare(names):
    """Fail with all names whose value is not the recorded one."""
    wrong = []
    for name in names:
        with store.quiet():
            found = CASES[name]()
        assert name in RECORDED, f"{name} is not recorded yet: run tests/golden/record.py."
        if difference := store.difference(found, RECORDED[name]):
            wrong.append(f"{name}: {difference}")
    assert not wrong, (
        "\n".join(wrong) + "\nA recorded release has changed. If an issue that may change it did "
        "so on purpose, add a row to tests/golden/CHANGED.md and run tests/golden/record.py "
        "--changed PATTERN."
    )


def one_of_ten(names):
    """Return all names, marked slow except one of ten."""
    slow = pytest.mark.slow
    return [name if store.is_fast(name) else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize("name", one_of_ten(ONE_BY_ONE))
def test_releases_are_as_recorded(name):
    compare([name])


@pytest.mark.parametrize("part", one_fast(range(PARTS), 10))
def test_prices_of_random_events_are_as_recorded(part):
    compare(list(golden_prices.FUZZED)[part::PARTS])


def test_every_recorded_value_has_a_case_and_every_case_a_value():
    assert RECORDED.keys() == CASES.keys()


def test_every_type_of_event_is_among_the_random_ones():
    drawn = set().union(*(types(query(seed).event) for seed in golden_prices.seeds()))
    assert len(drawn) == 25  # all that there were when prices were recorded
    assert drawn <= set(Event.__subclasses__())


def test_what_was_recorded_again_is_explained():
    text = store.CHANGED.read_text(encoding="utf-8")
    missing = sorted(name for name in AGAIN if not store.explained(name, text))
    assert not missing, f"no row in tests/golden/CHANGED.md explains {', '.join(missing)}"


def test_only_a_full_row_of_an_issue_that_may_explains_a_value():
    row = "| `fits/linear/*` | utility, 0123abc | 1e-3 | another law |"
    assert store.explained("fits/linear/auto", row)
    assert not store.explained("fits/logistic/auto", row)
    assert not store.explained("fits/linear/auto", row.replace("utility", "front"))
    assert not store.explained("fits/linear/auto", row.replace("another law", ""))


def test_a_difference_is_found():
    assert not store.difference([[3.0, 4.0]], store.flat([[3.0, 4.0 + 1e-6]]))
    assert store.difference([[3.0, 4.0]], store.flat([[3.0, 4.0 + 1e-5]]))
    assert store.difference([[0.0], [4.0]], store.flat([[1e-5], [4.0]]))
    assert store.difference((1.0, 2.0), [1.0, 2.0 + 1e-8])
    assert store.difference("UnsupportedEvent", [1.0, 2.0])
    assert store.digest([1, 2]) == store.digest((1, 2)) != store.digest([1.0, 2.0])
