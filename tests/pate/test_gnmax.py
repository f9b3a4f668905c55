"""Answers of GNMax cost what their events state; test_votes holds what all aggregators share."""

import math

import numpy as np
import pytest
from _pate_costs import winner_log_probabilities

import tacit
from tacit import Ledger
from tacit.events import Gaussian, Laplace, Relation, Repeated, Sequence
from tacit.pate import (
    NO_ANSWER,
    ConfidentGNMax,
    GNMax,
    LaplaceMax,
)

CONFIDENT = ConfidentGNMax(threshold=80, sigma_threshold=10.0, sigma_answer=8.0)


def test_events_state_the_sensitivity_under_every_relation():
    assert GNMax(40.0).event(1) == Sequence((Repeated(Gaussian(40 / math.sqrt(2), 1.0), 1),))
    assert LaplaceMax(20.0).event(1) == Sequence((Repeated(Laplace(10.0, 1.0), 1),))
    check, answer = CONFIDENT.event(10, 4).parts
    assert check == Repeated(Gaussian(10.0, 1.0), 10)
    assert answer == Repeated(Gaussian(8 / math.sqrt(2), 1.0), 4)
    prices = {
        relation: tacit.epsilon(CONFIDENT.event(10, 4), delta=1e-5, relation=relation)
        for relation in Relation
    }
    assert len({round(price, 9) for price in prices.values()}) == 1


def test_published_data_independent_prices_are_beaten_by_exact_composition():
    # 286 of 640 answered on MNIST: 3.175 by RDP in 2018; one Gaussian of mu = 0.6212 costs 2.543.
    paper = ConfidentGNMax(threshold=200, sigma_threshold=150, sigma_answer=40)
    assert tacit.epsilon(paper.event(640, 286), delta=1e-5) == pytest.approx(2.543, abs=2e-3)
    assert tacit.epsilon(LaplaceMax(20.0).event(100), delta=1e-5) < 4.31


def test_refused_queries_cost_their_check_alone():
    ledger = Ledger()
    votes = [[34, 33, 33]] * 20
    aggregator = ConfidentGNMax(threshold=90, sigma_threshold=2.0, sigma_answer=8.0)
    labels = aggregator.answer(votes, ledger=ledger, rng=0)
    assert set(labels) == {NO_ANSWER}
    assert {entry.event for entry in ledger.history()} == {Gaussian(2.0, 1.0)}


def test_answers_follow_the_noise_law():
    # GNMax on (60, 50, 40) at sigma 20: the winner's law by quadrature, 5 standard errors each.
    votes = np.repeat([[60, 50, 40]], 20_000, axis=0)
    labels = GNMax(20.0).answer(votes, rng=0, block=20_000)
    p = np.exp(winner_log_probabilities([60, 50, 40], sigma=20.0))
    seen = np.bincount(labels, minlength=3) / len(labels)
    assert np.all(np.abs(seen - p) < 5 * np.sqrt(p * (1 - p) / len(labels)))


def test_a_class_without_votes_is_no_trouble():
    assert LaplaceMax(2.0).answer([[0, 50, 0, 0]], rng=0).tolist() == [1]
