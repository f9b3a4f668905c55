"""What everything releases is what was recorded: a tenth in every run, all in the slow suite."""

import golden_store as store
import pytest

for needed in ("torch", "sklearn", "pandas"):
    pytest.importorskip(needed)

import golden_draws  # noqa: E402
import golden_fits  # noqa: E402
import golden_prices  # noqa: E402
import golden_training  # noqa: E402

CASES = golden_draws.CASES | golden_fits.CASES | golden_training.CASES


@pytest.mark.parametrize("name", store.one_of_ten(CASES))
def test_releases_are_as_recorded(name):
    store.check({name: CASES[name]})


def test_every_recorded_value_has_a_case_and_every_case_a_value():
    assert store.load()[0].keys() == CASES.keys() | golden_prices.CASES.keys()


def test_what_was_recorded_again_is_explained():
    again, text = store.load()[1], store.CHANGED.read_text(encoding="utf-8")
    missing = sorted(name for name in again if not store.explained(name, text))
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
