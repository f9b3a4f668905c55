"""Local differential privacy: each person adds noise to a value before it leaves their device.

No server has to be trusted with the values. The price is much more noise than a trusted server
would add. Every randomizer has `.randomize(values, rng)` for the side of the person, an unbiased
`.estimate(reports)` with intervals for the side of the server, `.event` for accountants and
ledger, `.shuffled(n)` for reports whose senders are hidden, and `.worst_case_ratio()`: the exact
largest ratio of the probabilities of one report under two values.
"""

from tacit.local.choice import ORACLES, choose_oracle
from tacit.local.frequencies import Estimate, FrequencyOracle, LocalRandomizer
from tacit.local.hadamard import HadamardResponse
from tacit.local.histograms import LocalHistogram, LocalQuantiles
from tacit.local.label_privacy import RandomizedLabels
from tacit.local.learning import LocalModel, LocalSGD
from tacit.local.local_hashing import LocalHashing
from tacit.local.means import (
    DuchiMean,
    HybridMean,
    PiecewiseMean,
    SampledVector,
)
from tacit.local.randomized_response import RandomizedResponse
from tacit.local.rappor import Rappor, RapporClient
from tacit.local.unary import OptimizedUnary

__all__ = [
    "ORACLES",
    "DuchiMean",
    "Estimate",
    "FrequencyOracle",
    "HadamardResponse",
    "HybridMean",
    "LocalHashing",
    "LocalHistogram",
    "LocalModel",
    "LocalQuantiles",
    "LocalRandomizer",
    "LocalSGD",
    "OptimizedUnary",
    "PiecewiseMean",
    "RandomizedLabels",
    "RandomizedResponse",
    "Rappor",
    "RapporClient",
    "SampledVector",
    "choose_oracle",
]
