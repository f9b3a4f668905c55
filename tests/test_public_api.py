"""Names that scripts outside this repository rely on: a change here is a decision."""

from importlib import import_module

import pytest

from tacit.cli import VERBS

NAMES = {
    "tacit": """
        Budget Ledger Relation __version__ accounting auditing bracket calibrate datasets delta
        epsilon errors events experiments ledger local make_private mechanisms pate regression
        report sampling summaries text training tuning
    """,
    "tacit.errors": """
        BudgetExceeded IncompatibleModel LearningStep LedgerError NotCertified ProgramError
        TacitError UnsupportedEvent WeakGuarantee
    """,
    "tacit.events": """
        ApproximateDP BandedGaussian BestOf ChosenOf DiscreteGaussian DiscreteLaplace Event
        Exponential FixedSizeSampled Gaussian GaussianMixture Laplace NonPrivate OneOf
        PoissonSampled PureDP RandomAllocation RandomizedResponse Relation RenyiCurve Repeated
        SampledWithReplacement Sequence Shuffled TreeAggregation Trials TruncatedPoissonSampled
        ZeroConcentratedDP from_dict from_json
    """,
    "tacit.mechanisms": """
        DiscreteGaussianMechanism DiscreteLaplaceMechanism ExponentialMechanism GaussianMechanism
        GaussianNoisyMax GridGaussianMechanism LaplaceMechanism LaplaceNoisyMax MOST_BANDS Mechanism
        PermuteAndFlip Rng SecureGenerator Seed Size StatisticalGenerator generator optimal_bands
        participation_sensitivity rounded_normal running_error secure_generator square_root
        step_deviations tail_mass tree_error
    """,
    "tacit.sampling": """
        CyclicPoisson FixedOrder FixedSize Poisson RandomAllocation Shuffle Stream
        TruncatedPoisson
    """,
}

# Parts that grow: these names must be there, others may be.
AT_LEAST = {
    "tacit.accounting": """
        BasicComposition Bracket CentralLimitGDP GDP Moments PLD RDP StrongComposition bracket
        calibrate delta epsilon
    """,
    "tacit.ledger": "Budget Ledger",
    "tacit.local": """
        DuchiMean HadamardResponse HybridMean LocalHashing LocalHistogram
        LocalQuantiles LocalSGD OptimizedUnary PiecewiseMean RandomizedLabels RandomizedResponse
        Rappor SampledVector choose_oracle
    """,
    "tacit.summaries": """
        PrivateBounds ReleaseTerms Statistic StatisticTable accuracy auc contingency_table count
        count_outside covariance describe histogram log_loss mean mean_squared_error
        private_bounds quantiles r2 variance
    """,
}


def public_names(module) -> set[str]:
    """`__all__`, or else what the module itself defines without an underscore."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_exactly_these(module):
    assert sorted(public_names(import_module(module))) == sorted(NAMES[module].split())


@pytest.mark.parametrize("module", AT_LEAST)
def test_public_names_include_these(module):
    loaded = import_module(module)
    missing = [name for name in AT_LEAST[module].split() if not hasattr(loaded, name)]
    assert missing == []


def test_light_top_level_names_resolve_and_unknown_ones_do_not():
    import tacit

    for name in ("epsilon", "delta", "bracket", "calibrate", "Ledger", "Budget", "Relation"):
        assert callable(getattr(tacit, name))
        assert name in dir(tacit)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tacit.nonsense


def test_the_verbs_are_exactly_these():
    verbs = "advise audit calibrate curve demo epsilon experiment finetune ledger local pate"
    verbs += " predict recipes regress report schema sign summarize surface sweep train transfer"
    verbs += " tune verify"
    assert sorted(VERBS) == verbs.split()
