"""Prices are what was recorded: a tenth in every run, all in the slow suite. Needs numpy alone."""

import golden_prices
import golden_store as store
import pytest
from golden_events import query, types
from slow_cases import one_fast

from tacit.events import Event

PARTS = 40  # tests of random events: 50 in each


@pytest.mark.parametrize("name", store.one_of_ten(golden_prices.KNOWN_PRICES))
def test_prices_are_as_recorded(name):
    store.check({name: golden_prices.KNOWN_PRICES[name]})


@pytest.mark.parametrize("part", one_fast(range(PARTS), 10))
def test_prices_of_random_events_are_as_recorded(part):
    store.check(dict(list(golden_prices.FUZZED.items())[part::PARTS]))


def test_every_type_of_event_is_among_the_random_ones():
    drawn = set().union(*(types(query(seed).event) for seed in golden_prices.seeds()))
    assert len(drawn) == 25  # all that there were when prices were recorded
    assert drawn <= set(Event.__subclasses__())
