"""Accountants: pure functions from an event to what it cost.

`epsilon`, `delta` and `bracket` answer by the tightest accountant; `calibrate` inverts them. Every
accountant has `.epsilon(event, *, delta, relation)` and `.delta(event, *, epsilon, relation)`, and
gives an upper bound or raises `UnsupportedEvent`, except `CentralLimitGDP`, which is an
approximation and no guarantee.
"""

from tacit.accounting.brackets import Bracket
from tacit.accounting.calibrate import calibrate, calibrate_count
from tacit.accounting.compose import flatten
from tacit.accounting.composition import BasicComposition, StrongComposition, asymptotic_noise
from tacit.accounting.gdp import GDP, CentralLimitGDP, gaussian_delta, gaussian_epsilon
from tacit.accounting.moments import Moments
from tacit.accounting.pld import PLD
from tacit.accounting.rdp import RDP, Charge, delta_from_rdp, epsilon_from_rdp
from tacit.accounting.tightest import Accountant, bracket, delta, epsilon

__all__ = [
    "GDP",
    "PLD",
    "RDP",
    "Accountant",
    "BasicComposition",
    "Bracket",
    "CentralLimitGDP",
    "Charge",
    "Moments",
    "StrongComposition",
    "asymptotic_noise",
    "bracket",
    "calibrate",
    "calibrate_count",
    "delta",
    "delta_from_rdp",
    "epsilon",
    "epsilon_from_rdp",
    "flatten",
    "gaussian_delta",
    "gaussian_epsilon",
]
