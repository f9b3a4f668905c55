"""Attack on the answers of a finished PATE run: can one vote be seen through the noise?

Every canary is a run of its own: as many queries as the run asked, all with the votes that a
single record changes most (a tie, or a count at the threshold), by the run's own aggregator and
noise. No record and no teacher of the run is touched, so nothing is paid.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit.auditing import flip_coins
from tacit.events import Event
from tacit.experiments.pate import PATERecipe
from tacit.experiments.run import RECIPE, RunFolder
from tacit.mechanisms import Rng, Seed, generator
from tacit.pate import NO_ANSWER, Aggregator, ConfidentGNMax

_PILOT = 100_000  # answers drawn beforehand to learn how telling each outcome is


class Attack(NamedTuple):
    """What is billed for the answers, what came out, and which canaries moved a vote."""

    event: Event
    scores: NDArray[np.float64]
    is_member: NDArray[np.bool_]


def attack_answers(folder: RunFolder, *, n_canaries: int, rng: Seed = None) -> Attack:
    """Scores of canaries whose record moves one vote in every query of the run, or does not.

    The score adds up the log-likelihood ratio of each outcome (an answer, or none). The bill is
    that of the answers; a sanitized cost, if one was published, is not attacked.
    """
    recipe, n_queries = PATERecipe.read(folder / RECIPE), folder.facts().steps
    n_teachers, most = recipe.teachers.count, recipe.answers.most or n_queries
    aggregator, random = recipe.answers.aggregator(n_teachers), generator(rng)
    inside = flip_coins(n_canaries, random)
    tells = _tells(aggregator, n_teachers, random)
    scores, answers = np.zeros(n_canaries), np.zeros(n_canaries, np.int64)
    for _ in range(n_queries):
        asked = answers < most
        outcome = _answer(aggregator, n_teachers, inside, random)
        scores += np.where(asked, tells[outcome], 0.0)
        answers += outcome != NO_ANSWER
    return Attack(aggregator.event(n_queries, min(n_queries, most)), scores, inside)


def _answer(
    aggregator: Aggregator, n_teachers: int, inside: NDArray[np.bool_], random: Rng
) -> NDArray[np.int64]:
    """0, 1 or `NO_ANSWER` for each canary; one teacher's vote goes to class 0 if it is inside."""
    top = n_teachers // 2
    if isinstance(aggregator, ConfidentGNMax):
        top = min(max(round(aggregator.threshold), 0), n_teachers - 1)
    votes = np.column_stack([top + inside, n_teachers - top - inside])
    return aggregator.answer(votes, rng=random, block=len(votes))


def _tells(aggregator: Aggregator, n_teachers: int, random: Rng) -> NDArray[np.float64]:
    """Log-likelihood ratio of the outcomes 0, 1 and `NO_ANSWER` (-1: the last), in against out."""
    rates = []
    for is_inside in (True, False):
        drawn = _answer(aggregator, n_teachers, np.full(_PILOT, is_inside), random)
        counts = np.bincount(drawn + 1, minlength=3) + 1.0
        rates.append(np.log(counts / counts.sum()))
    refused, first, second = rates[0] - rates[1]
    return np.array([first, second, refused])
