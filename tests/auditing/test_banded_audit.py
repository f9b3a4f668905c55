"""Audits of correlated noise: correct runs pass, and faults of its own kinds are found."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from tacit import sampling
from tacit.auditing import TrainingSetup, audit_training
from tacit.auditing.draws import turn_findings
from tacit.events import BandedGaussian
from tacit.training import Banded, Speed
from tacit.training.banded_noise import BandedNoise
from tacit.training.plan import TrainingPlan

RECORDS = 100


def squared_error(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y) ** 2


def audit(seed=0, *, how="step", **options):
    torch.manual_seed(seed)
    x = torch.randn(RECORDS, 3)
    settings = {"batch_size": 10, "steps": 40, "clip_norm": 0.7, "noise_multiplier": 1.1}
    settings["speed"] = Speed(check=False)
    setup = TrainingSetup(
        make_private=tacit.make_private,
        model=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
        dataset=(x, x.sum(1)),
        loss_fn=squared_error,
        settings=settings | {"noise": Banded(bands=8)} | options,
        how=how,
    )
    return audit_training(setup, rng=seed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "backward"])
def test_correct_runs_pass(how):
    assert sum(audit(seed, how=how).passes for seed in range(3)) >= 2  # 5 % each may not


def test_a_restart_is_tested_as_a_run_of_its_own():
    with pytest.raises(ValueError, match="how='resumed' is for independent noise"):
        audit(how="resumed")


@pytest.mark.slow
def test_chosen_bands_and_fixed_orders_pass():
    """At most one of three audits that raise an alarm with probability 5 %: 0.7 %."""
    chosen = {"noise": Banded(), "epsilon": 8.0, "delta": 1e-3, "noise_multiplier": None}
    order = {"batch_size": sampling.FixedOrder(8)}
    runs = [audit(1, **chosen), audit(2, **order), audit(3, **order)]
    assert sum(found.passes for found in runs) >= 2


@pytest.mark.slow
def test_a_stream_that_is_shorter_than_the_audit_can_be_audited():
    order = [[i % RECORDS for i in range(3 * step, 3 * step + 3)] for step in range(40)]
    stream = sampling.Stream(order, separation=8, participations=3, expected_batch=10)
    assert len(audit(1, batch_size=stream).findings) > 10


def redrawn_turns(patch):
    """Records get other groups in every epoch."""
    drawer = TrainingPlan.drawer

    def redrawn(self, key, n):
        epochs = {}

        def draw(step):
            epoch = step // 10
            if epoch not in epochs:
                secret = key.bytes("epoch", epoch, 32)
                epochs[epoch] = drawer(self, type(key)(secret), n)
            return epochs[epoch](step)

        return draw

    patch.setattr(TrainingPlan, "drawer", redrawn)


def wrong_lag(patch):
    """Each residual is used one step too late."""
    right = BandedNoise._past

    def late(self, kept, step):
        return right(self, kept, step - 1)

    patch.setattr(BandedNoise, "_past", late)


def reset_state(patch):
    """Residuals are dropped in every epoch."""
    right = BandedNoise._begin_step

    def reset(self, step):
        if step % 10 == 0:
            self.start_anew(step)
        right(self, step)

    patch.setattr(BandedNoise, "_begin_step", reset)


def skipped_empty_steps(patch):
    """Steps without records release nothing, and the turns of the groups shift."""
    right = TrainingPlan.drawer

    def shifted(self, key, n):
        draw = right(self, key, n)
        lots, step = [], 0

        def next_lot(number):
            nonlocal step
            while len(lots) <= number:
                lot = draw(step)
                step += 1
                if len(lot):
                    lots.append(lot)
            return lots[number]

        return next_lot

    patch.setattr(TrainingPlan, "drawer", shifted)


def rate_of_one_group(patch):
    """The bill has the rate batch / records, which is that of independent noise."""
    right = TrainingPlan.event_of

    def cheaper(self, noise_multipliers):
        event = right(self, noise_multipliers)
        if not isinstance(event, BandedGaussian):
            return event
        return dataclasses.replace(event, rate=event.rate / event.separation)

    patch.setattr(TrainingPlan, "event_of", cheaper)


def fewer_turns_billed(patch):
    """The bill has half of the steps."""
    right = TrainingPlan.event_of
    patch.setattr(
        TrainingPlan, "event_of", lambda self, noise: right(self, noise[: -(-len(noise) // 2)])
    )


def longer_column(patch):
    """The noise is mixed by a column of norm 1.5 that is billed as one of norm 1."""
    right = BandedNoise.__init__

    def longer(self, key, *, column, **options):
        right(self, key, column=[1.5 * c for c in column], **options)

    patch.setattr(BandedNoise, "__init__", longer)


def noise_of_the_step_before(patch):
    """Every second step repeats the noise of the step before."""
    right = BandedNoise._source

    def repeated(self, purpose, step):
        return right(self, purpose, step - step % 2)

    patch.setattr(BandedNoise, "_source", repeated)


def wrong_block(patch):
    """From the middle of the run on, lots come from the group after the one whose turn it is."""
    right = sampling.CyclicPoisson.lots

    def shifted(self, n, rng):
        draw = right(self, n, rng)
        return lambda step, rng: draw(step if step < 20 else step + 1, rng)

    patch.setattr(sampling.CyclicPoisson, "lots", shifted)


def wrong_sign(patch):
    """The last coefficient of the column is mixed with the wrong sign."""
    right = BandedNoise.__init__

    def negated(self, key, **options):
        right(self, key, **options)
        self._column[-1] *= -1.0

    patch.setattr(BandedNoise, "__init__", negated)


def fewer_records_than_billed(patch):
    """Lots are drawn as from half of the records that are in the bill."""
    right = sampling.CyclicPoisson.lots

    def denser(self, n, rng):
        return right(dataclasses.replace(self, rate=min(1.0, 2 * self.rate)), n, rng)

    patch.setattr(sampling.CyclicPoisson, "lots", denser)


def scaled_residuals(patch):
    """Residuals count half, so noise that should cancel does not."""
    right = BandedNoise._past

    def halved(self, kept, step):
        older, recent = right(self, kept, step)
        return older * 0.5, [(row, 0.5 * weight) for row, weight in recent]

    patch.setattr(BandedNoise, "_past", halved)


FAULTS = {
    "redrawn turns": (redrawn_turns, {}),
    "wrong lag": (wrong_lag, {}),
    "reset state": (reset_state, {}),
    "skipped empty steps": (skipped_empty_steps, {"batch_size": 1}),
    "rate of one group": (rate_of_one_group, {}),
    "fewer turns billed": (fewer_turns_billed, {}),
    "longer column": (longer_column, {}),
    "repeated noise": (noise_of_the_step_before, {}),
    "wrong block": (wrong_block, {}),
    "wrong sign": (wrong_sign, {}),
    "fewer records than billed": (fewer_records_than_billed, {"batch_size": 5}),
    "scaled residuals": (scaled_residuals, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    plant, options = FAULTS[name]
    plant(monkeypatch)
    found = audit(**options)
    assert not found.passes


# The tests that a fault of the draws meets, on tables ---------------------------------------------

EVENT = BandedGaussian(1.0, (0.9, 0.4), steps=64, separation=4, rate=0.5)


def turns(rng, group, steps=64):
    is_drawn = rng.random((steps, len(group))) < 0.5
    return (is_drawn & (np.arange(steps)[:, None] % 4 == group)).astype(float)


def smallest(tables, event=EVENT):
    return min(f.p_value for f in turn_findings(tables, np.arange(tables[0].shape[1]), event))


def test_turns_as_billed_raise_no_alarm():
    rng = np.random.default_rng(0)
    tables = [turns(rng, rng.integers(0, 4, 200)) for _ in range(2)]
    assert smallest(tables) > 1e-4


def test_turns_that_move_are_impossible():
    rng = np.random.default_rng(1)
    first, second = (turns(rng, rng.integers(0, 4, 200), 32) for _ in range(2))
    assert smallest([np.concatenate([first, second])]) == 0.0
    assert smallest([np.concatenate([first, first[1:]])]) == 0.0  # one step was left out


def test_groups_that_are_no_fair_coins_are_found():
    rng = np.random.default_rng(2)
    assert smallest([turns(rng, np.zeros(200, int))]) < 1e-6


def test_more_participations_than_billed_are_impossible():
    table = np.zeros((20, 3))
    table[::5] = 1.0
    allowed = BandedGaussian(1.0, (1.0,), steps=20, separation=5, participations=4)
    assert smallest([table], allowed) > 0
    for tighter in ({"participations": 3}, {"separation": 6, "participations": 4}):
        assert smallest([table], dataclasses.replace(allowed, **tighter)) == 0.0
