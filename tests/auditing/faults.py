"""Faults for audits to find, planted in tacit's own code, and the audits that must find them.

Each fault is a function that changes the real code through `monkeypatch`. Its class is one of
scale, law, reuse, draws, clip, divisor, leak, key and bill.
"""

import dataclasses
import functools
import os
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import nn

import tacit
from tacit import events as ev
from tacit import mechanisms, pate, regression, sampling
from tacit.auditing import MechanismAudit, Result, TrainingSetup, audit_algorithm, audit_training
from tacit.training import (
    EMA,
    AdamBC,
    AdaptiveClip,
    Banded,
    NoisyLoss,
    PerLayer,
    Reports,
    Speed,
    Users,
    Views,
    checkpoint,
    clipped_sum,
    key,
    lot_sum,
    lots,
    noise,
    plan,
    private,
)
from tacit.training import clip as clip_module
from tacit.training.examples import as_views

RECORDS = 120
USERS = [f"user {number % 50}" for number in range(RECORDS)]


def squared_error(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y) ** 2


def audit_step(seed, **options):
    """Audit DP-SGD on a small network, with the default loop."""
    torch.manual_seed(seed)
    x = torch.randn(RECORDS, 3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    how = {name: options.pop(name) for name in ("how", "optimizer", "average") if name in options}
    settings = {"batch_size": 24, "steps": 40, "clip_norm": 0.7, "noise_multiplier": 1.1}
    settings["speed"] = Speed(check=False)
    setup = TrainingSetup(
        make_private=tacit.make_private,
        model=model,
        dataset=(x, x.sum(1)),
        loss_fn=squared_error,
        settings=settings | options,
        **how,
    )
    return audit_training(setup, rng=seed)


audit_resumed = functools.partial(audit_step, how="resumed")
audit_backward = functools.partial(audit_step, how="backward")
audit_adaptive = functools.partial(audit_step, clip_norm=AdaptiveClip(0.7))
LOSS = Reports(noisy_loss=NoisyLoss(lower=-1.0, upper=4.0))
audit_loss = functools.partial(audit_step, reports=LOSS)
audit_average = functools.partial(audit_step, average=functools.partial(EMA, decay=0.9))
audit_views = functools.partial(audit_step, augment=Views(2, lambda b: (b[0] + 0.1, b[1])))
audit_microbatches = functools.partial(audit_step, speed=Speed(max_microbatch=8, check=False))
audit_layers = functools.partial(audit_step, clip_norm=PerLayer((0.2, 0.6), noise="proportional"))


def audit_gnmax(seed):
    return _audit_votes(pate.GNMax(2.0), seed)


def audit_confident(seed):
    aggregator = pate.ConfidentGNMax(threshold=24.0, sigma_threshold=3.0, sigma_answer=2.0)
    return _audit_votes(aggregator, seed)


def _audit_votes(aggregator, seed):
    rng = np.random.default_rng(seed)

    def answer(votes):
        ledger = tacit.Ledger()
        labels = aggregator.answer(votes, rng=rng, ledger=ledger)
        return Result(labels, ledger.event)

    votes = np.tile([[25, 24, 1], [24, 25, 1], [24, 13, 13]], (20, 1))
    moved = votes + [[-1, 1, 0]]  # the last of three falls below the threshold
    clear = np.tile([[50, 0, 0], [0, 50, 0], [0, 0, 50]], (20, 1))
    pairs = [(votes, moved), (clear, clear + (np.roll(clear, 1, axis=1) - clear) // 50)]
    return audit_algorithm(answer, pairs, part="PATE", rng=seed)


BOUNDS = {"bounds": (-1.0, 1.0), "epsilon": 1.0, "delta": 1e-4, "n_records": 60}
TARGET = {"target_bounds": (-1.0, 1.0)}
FITS: dict[str, tuple[str, dict]] = {
    "functional": ("LinearRegression", TARGET | {"method": "functional", "delta": 0.0}),
    "adassp": ("LinearRegression", TARGET | {"method": "adassp"}),
    "gradient": ("LinearRegression", TARGET | {"method": "gradient"}),
    "logistic": ("LogisticRegression", {"classes": (0, 1)}),
    "frank_wolfe": ("FrankWolfe", TARGET | {"radius": 1.0, "steps": 5}),
    "transfer": ("TransferRegression", TARGET),
}


def audit_fit(name, seed):
    """Audit a regression on records at the corners of their bounds, and far beyond them."""
    rng = np.random.default_rng(seed)
    kind, settings = FITS[name]
    make = getattr(regression, kind)
    x, y = rng.uniform(-1, 1, (60, 3)), rng.integers(0, 2, 60)

    def fit(records):
        features, targets = records
        allowed = make.__init__.__annotations__
        options = {k: v for k, v in (BOUNDS | settings).items() if k in allowed}
        model = make(**options, random_state=int(rng.integers(2**31))).fit(features, targets)
        return Result(np.append(model.coef_, model.intercept_), model.event_)

    pairs = []
    for extreme, far in (([1.0, 1.0, 1.0], 1e3), ([-1.0, 1.0, -1.0], 1), ([1e3, 1e3, 1e3], 1)):
        target = 1 if kind == "LogisticRegression" else far
        pairs.append(((np.vstack([x, extreme]), np.append(y, target)), (x, y)))
    return audit_algorithm(fit, pairs, part=name, rng=seed)


def audit_lots(seed):
    """Audit noisy sums over lots, as an algorithm that draws samples releases them."""
    rng, sampler = np.random.default_rng(seed), sampling.Poisson(0.5)
    mechanism = mechanisms.GaussianMechanism(4.0, l2_sensitivity=1.0)

    def mean(records):
        values, total = np.clip(records, -1, 1), 0.0
        for _ in range(20):
            lot = values[sampler.indices(len(values), rng)]
            total += mechanism.release(np.array([lot.sum()]), rng)[0]
        return Result(total, ev.Repeated(sampler.amplify(mechanism.event), 20))

    values = rng.uniform(-1, 1, 60)
    pairs = [(np.append(values, extreme), values) for extreme in (1.0, -1.0, 1e3)]
    return audit_algorithm(mean, pairs, part="lots", rng=seed)


def audit_gaussian(seed):
    return tacit.auditing.audit_mechanism(
        mechanisms.GaussianMechanism(1.5, l2_sensitivity=2.0), rng=seed
    )


def audit_laplace(seed):
    return tacit.auditing.audit_mechanism(
        mechanisms.LaplaceMechanism(1.5, l1_sensitivity=2.0), rng=seed
    )


def audit_exponential(seed):
    return tacit.auditing.audit_mechanism(
        mechanisms.ExponentialMechanism(1.0, sensitivity=1.0), rng=seed
    )


def audit_partition(seed):
    """Which records each teacher gets: every record once, and any teacher with equal chance."""
    return pate_partition(seed)


def pate_partition(seed):
    from tacit.auditing import audit_partition as audit

    return audit(pate.partition, n_records=200, n_teachers=10, rng=seed)


CORRECT: dict[str, Callable[[int], MechanismAudit]] = {
    "step": audit_step,
    "backward": audit_backward,
    "resumed": audit_resumed,
    "adaptive": audit_adaptive,
    "loss": audit_loss,
    "loss and adaptive": functools.partial(audit_loss, clip_norm=AdaptiveClip(0.7), how="resumed"),
    "loss of users": functools.partial(audit_loss, users=Users(ids=USERS, combine="sum")),
    "average": functools.partial(audit_average, how="resumed"),
    "Adam": functools.partial(audit_average, optimizer=torch.optim.Adam, how="backward"),
    "AdamBC": functools.partial(audit_loss, optimizer=AdamBC, how="resumed"),
    "plain SGD": functools.partial(audit_step, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    "Nesterov": functools.partial(
        audit_step, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
    ),
    "banded": functools.partial(audit_loss, noise=Banded(bands=4), optimizer=AdamBC),
    "banded backward": functools.partial(audit_step, noise=Banded(bands=4), how="backward"),
    "views": audit_views,
    "microbatches": functools.partial(audit_microbatches, how="backward"),
    "layers": audit_layers,
    "users": functools.partial(audit_step, users=Users(ids=USERS)),
    "users by records": functools.partial(
        audit_step, users=Users(ids=USERS, records_per_user=3, sampled="records")
    ),
    "GNMax": audit_gnmax,
    "ConfidentGNMax": audit_confident,
    "partition": audit_partition,
    "Gaussian": audit_gaussian,
    "Laplace": audit_laplace,
    "exponential": audit_exponential,
    "lots": audit_lots,
    **{name: functools.partial(audit_fit, name) for name in FITS},
}


class Fault(NamedTuple):
    kind: str
    audit: Callable[[int], MechanismAudit]
    plant: Callable[..., None]


FAULTS: dict[str, Fault] = {}


def fault(kind, audit=audit_step):
    def add(plant):
        FAULTS[plant.__name__] = Fault(kind, audit, plant)
        return plant

    return add


def _scaled_noise(patch, factor):
    honest = noise._known_grids  # a cache of grids by their noise multiplier
    patch.setattr(noise, "_known_grids", lambda m, *args: honest(m * factor, *args))


# Scale ---------------------------------------------------------------------------------------


@fault("scale")
def half_of_the_noise(patch):
    _scaled_noise(patch, 0.5)


@fault("scale")
def a_tenth_of_the_noise_is_missing(patch):
    _scaled_noise(patch, 0.9)


@fault("scale", audit_backward)
def no_noise_on_the_last_tensor(patch):
    honest = noise.NoisyMean.release

    def release(self, sums, scales, **options):
        exact = sums[-1].to_dense() / self._expected_batch
        return [*honest(self, sums, scales, **options)[:-1], exact]

    patch.setattr(noise.NoisyMean, "release", release)


@fault("scale", audit_gaussian)
def gaussian_noise_a_tenth_short(patch):
    honest = mechanisms.GaussianMechanism.noise_std_on
    kind = mechanisms.GaussianMechanism
    patch.setattr(kind, "noise_std_on", lambda self, size: 0.9 * honest(self, size))


@fault("scale", audit_laplace)
def laplace_noise_a_tenth_short(patch):
    honest = mechanisms.LaplaceMechanism.noise_scale_on
    kind = mechanisms.LaplaceMechanism
    patch.setattr(kind, "noise_scale_on", lambda self, size: 0.9 * honest(self, size))


@fault("scale", audit_exponential)
def exponential_mechanism_forgets_the_factor_of_two(patch):
    kind = mechanisms.ExponentialMechanism
    patch.setattr(kind, "noise_scale", property(lambda self: self.sensitivity / self.epsilon))


@fault("scale")
def noise_shrinks_from_step_to_step(patch):
    honest = noise.NoisyMean.release

    def release(self, sums, scales, *, step, noise_multiplier, **options):
        less = noise_multiplier * (0.2 if step % 16 == 7 else 1.0)
        return honest(self, sums, scales, step=step, noise_multiplier=less, **options)

    patch.setattr(noise.NoisyMean, "release", release)


# Law -----------------------------------------------------------------------------------------


def _changed_noise(patch, change):
    """Replace the noise of training steps by `change` of it, in standard deviations."""
    _changed_noises(patch, lambda parts: [change(z) for z in parts])


def _changed_noises(patch, change):
    """Replace the noise of all tensors of a step by `change` of their list."""
    honest = noise.NoisyMean.release

    def release(self, sums, scales, *, step, noise_multiplier, **options):
        exact = [total.clone().to_dense() / self._expected_batch for total in sums]
        options |= {"step": step, "noise_multiplier": noise_multiplier}
        noisy = honest(self, sums, scales, **options)
        stds = [noise_multiplier * scale / self._expected_batch for scale in scales]
        parts = [(n - e) / std for e, n, std in zip(exact, noisy, stds, strict=True)]
        return [e + std * z for e, z, std in zip(exact, change(parts), stds, strict=True)]

    patch.setattr(noise.NoisyMean, "release", release)


@fault("law")
def uniform_noise_of_the_same_variance(patch):
    _changed_noise(patch, lambda z: (torch.special.ndtr(z) - 0.5) * 12**0.5)


@fault("law")
def noise_cut_off_at_two_deviations(patch):
    _changed_noise(patch, lambda z: z.clamp(-2, 2) * 1.1)


@fault("law")
def signs_in_place_of_normal_noise(patch):
    _changed_noise(patch, lambda z: z.sign())


@fault("law", audit_gaussian)
def uniform_noise_in_the_gaussian_mechanism(patch):
    def release(self, value, rng=None):
        std = self.noise_std
        return np.asarray(value) + mechanisms.generator(rng).random(np.shape(value)) * std * 2

    patch.setattr(mechanisms.GaussianMechanism, "release", release)


# Reuse ---------------------------------------------------------------------------------------


@fault("reuse")
def the_same_noise_in_every_step(patch):
    kind = noise.NoisyMean
    patch.setattr(kind, "_source", lambda self, purpose, step: self._key.noise("noise", 0))


@fault("reuse")
def noise_repeats_every_ten_steps(patch):
    kind = noise.NoisyMean
    patch.setattr(kind, "_source", lambda self, purpose, step: self._key.noise("noise", step % 10))


@fault("reuse")
def half_of_the_coordinates_repeat_the_others(patch):
    def mirror(z):
        flat = z.reshape(-1).clone()
        half = len(flat) // 2
        flat[half : 2 * half] = -flat[:half]
        return flat.view_as(z)

    _changed_noise(patch, mirror)


@fault("reuse", audit_gnmax)
def every_query_has_the_same_noise(patch):
    honest = mechanisms.GaussianMechanism.release
    kind = mechanisms.GaussianMechanism
    patch.setattr(kind, "release", lambda self, value, rng=None: honest(self, value, 7))


# Draws ---------------------------------------------------------------------------------------


def _changed_draws(patch, change):
    honest = sampling.Poisson.indices

    def indices(self, n, rng):
        return change(honest, self, n, rng)

    patch.setattr(sampling.Poisson, "indices", indices)


@fault("draws")
def lots_of_a_fixed_size(patch):
    _changed_draws(
        patch,
        lambda honest, self, n, rng: np.sort(rng.choice(n, round(self.rate * n), replace=False)),
    )


@fault("draws")
def the_last_record_is_in_every_lot(patch):
    _changed_draws(patch, lambda honest, self, n, rng: np.union1d(honest(self, n, rng), [n - 1]))


@fault("draws")
def records_are_drawn_with_replacement(patch):
    _changed_draws(
        patch,
        lambda honest, self, n, rng: np.sort(rng.choice(n, rng.binomial(n, self.rate))),
    )


@fault("draws")
def neighbors_are_drawn_together(patch):
    def blocks(honest, self, n, rng):
        starts = np.flatnonzero(rng.random(-(-n // 4)) < self.rate)
        whole = (4 * starts[:, None] + np.arange(4)).ravel()
        return whole[whole < n]

    _changed_draws(patch, blocks)


@fault("draws")
def every_lot_is_used_twice(patch):
    honest = lots.Lots.indices
    patch.setattr(lots.Lots, "indices", lambda self, step: honest(self, step // 2 * 2))


@fault("draws")
def records_are_drawn_too_often(patch):
    _changed_draws(
        patch,
        lambda honest, self, n, rng: np.flatnonzero(rng.random(n) < min(1.0, 1.5 * self.rate)),
    )


# Clip ----------------------------------------------------------------------------------------


@fault("clip")
def gradients_are_not_clipped(patch):
    patch.setattr(
        clip_module.Flat, "factors", lambda self, norms, rounding=0.0: torch.ones_like(norms)
    )


@fault("clip")
def clipping_forgets_the_square_root(patch):
    patch.setattr(
        clip_module.Flat,
        "factors",
        lambda self, norms, rounding=0.0: (self.clip_norm / norms.sqrt().sqrt()).clamp(max=1.0),
    )


def _changed_sum(patch, change):
    honest = lot_sum.LotSum.__call__

    def total_of(self, lot, clip, **options):
        total, drawn = honest(self, lot, clip, **options)
        change(total, drawn)
        return total, drawn

    patch.setattr(lot_sum.LotSum, "__call__", total_of)


@fault("clip")
def biases_are_left_out_of_the_norm(patch):
    def change(total, drawn):
        for name, values in total.sums.items():
            if name.endswith("bias"):
                values.mul_(4.0)

    _changed_sum(patch, change)


@fault("clip", functools.partial(audit_fit, "adassp"))
def rows_are_not_shrunk_to_their_bound(patch):
    from tacit.regression import rows

    honest = rows.PrivateRows.__init__

    def init(self, *args, **options):
        honest(self, *args, **options)
        object.__setattr__(self, "factors", 3.0 * np.asarray(self.factors))

    patch.setattr(rows.PrivateRows, "__init__", init)


# Divisor -------------------------------------------------------------------------------------


@fault("divisor")
def divided_by_the_drawn_size(patch):
    honest = private.Private._pay_and_release

    def release(self, total, drawn, clip, **options):
        self._noise._factor = 1.0 / max(1.0, float(drawn))
        honest(self, total, drawn, clip, **options)

    patch.setattr(private.Private, "_pay_and_release", release)


@fault("divisor")
def the_mean_of_each_lot_is_noised(patch):
    """The sum is divided by the drawn size before noise for the expected size is added."""

    def change(total, drawn):
        for values in total.sums.values():
            values.mul_(24.0 / max(1, drawn))

    _changed_sum(patch, change)


@fault("divisor")
def noise_is_divided_once_more(patch):
    _changed_noise(patch, lambda z: z / 24.0)


@fault("divisor", functools.partial(audit_fit, "logistic"))
def sensitivity_of_a_mean_for_a_sum(patch):
    from tacit.regression import estimator

    honest = estimator.GaussianMechanism
    patch.setattr(
        estimator,
        "GaussianMechanism",
        lambda m, *, l2_sensitivity, **o: honest(m, l2_sensitivity=l2_sensitivity / 60, **o),
    )


# Key -----------------------------------------------------------------------------------------


@fault("key")
def every_run_has_the_same_key(patch):
    patch.setattr(key.Key, "fresh", classmethod(lambda cls: cls(b"0" * 32)))


@fault("key")
def the_key_comes_from_a_shared_generator(patch):
    patch.setattr(key.Key, "fresh", classmethod(lambda cls: cls(random.randbytes(32))))


@fault("key")
def the_key_comes_from_torch(patch):
    def fresh(cls):
        return cls(bytes(torch.randint(0, 256, (32,)).tolist()))

    patch.setattr(key.Key, "fresh", classmethod(fresh))


@fault("key")
def the_key_has_sixteen_bits(patch):
    import secrets

    patch.setattr(key.Key, "fresh", classmethod(lambda cls: cls(secrets.token_bytes(2) * 16)))


@fault("key")
def seeds_are_ignored(patch):
    patch.setattr(key.Key, "from_seed", classmethod(lambda cls, seed: cls(b"1" * 32)))


# Bill ----------------------------------------------------------------------------------------


@fault("bill")
def the_stated_epsilon_is_that_of_one_step(patch):
    honest = private.Private.epsilon_at
    patch.setattr(private.Private, "epsilon_at", lambda self, _, **o: honest(self, 1, **o))


@fault("bill")
def twice_the_noise_is_billed(patch):
    honest = plan.TrainingPlan.step_event
    patch.setattr(plan.TrainingPlan, "step_event", lambda self, m: honest(self, 2 * m))


@fault("bill")
def half_of_the_rate_is_billed(patch):
    patch.setattr(
        sampling.Poisson,
        "amplify",
        lambda self, event: tacit.events.PoissonSampled(self.rate / 2, event),
    )


@fault("bill")
def nothing_is_paid(patch):
    patch.setattr(private.Private, "_pay", lambda self: None)


@fault("bill", functools.partial(audit_fit, "adassp"))
def one_of_three_releases_is_not_billed(patch):
    from tacit.regression import adassp

    patch.setattr(adassp.AdaSSPPlan, "event", property(lambda self: self.gram.event))


# PATE and post-processing ----------------------------------------------------------------------


@fault("scale", audit_gnmax)
def labels_without_noise(patch):
    patch.setattr(pate.GNMax, "_release", _plurality)


@fault("scale", audit_confident)
def check_without_noise(patch):
    honest = pate.ConfidentGNMax._check

    def check(self):
        exact = honest.fget(self)
        return type("Exact", (), {"event": exact.event, "release": lambda _, v, rng: v})()

    patch.setattr(pate.ConfidentGNMax, "_check", property(check))


@fault("clip", audit_partition)
def records_teach_two_teachers(patch):
    honest = pate.partition

    def partition(n_records, n_teachers, rng=None):
        parts = honest(n_records, n_teachers, rng)
        return [np.union1d(part, parts[0][:3]) for part in parts]

    patch.setattr(pate, "partition", partition)


def _plurality(self, counts, pay, rng):
    pay(self._mechanism.event, len(counts))
    return counts.argmax(axis=1)


@fault("bill", audit_gnmax)
def answers_are_billed_with_twice_the_noise(patch):
    honest = pate.GNMax._mechanism.fget

    def quiet(self):
        mechanism = honest(self)
        return dataclasses.replace(mechanism, noise_multiplier=2 * mechanism.noise_multiplier)

    def release(self, counts, pay, rng):
        pay(quiet(self).event, len(counts))
        return honest(self).release(counts, rng).argmax(axis=1)

    patch.setattr(pate.GNMax, "_release", release)


# Faults that show only in long runs, near a bound, in counts, keys, prices or draws of fits ------


@fault("scale")
def empty_lots_get_no_noise(patch):
    honest = private.Private._pay_and_release

    def release(self, total, drawn, clip, **options):
        exact = {"release": lambda sums, scales, **_: [s / 24.0 for s in sums]}
        self._noise.__dict__.update({} if drawn else exact)
        try:
            honest(self, total, drawn, clip, **options)
        finally:
            self._noise.__dict__.pop("release", None)

    patch.setattr(private.Private, "_pay_and_release", release)


@fault("scale")
def noise_is_halved_after_a_hundred_steps(patch):
    honest = noise.NoisyMean.release

    def release(self, sums, scales, *, step, noise_multiplier, **options):
        less = noise_multiplier * (0.5 if step >= 100 else 1.0)
        return honest(self, sums, scales, step=step, noise_multiplier=less, **options)

    patch.setattr(noise.NoisyMean, "release", release)


@fault("scale", audit_adaptive)
def counts_are_a_tenth_short_of_noise(patch):
    honest = noise.NoisyMean.release_counts

    def release(self, counts, *, noise_multiplier, **options):
        return honest(self, counts, noise_multiplier=0.9 * noise_multiplier, **options)

    patch.setattr(noise.NoisyMean, "release_counts", release)


@fault("scale", audit_gnmax)
def clear_winners_without_noise(patch):
    honest = pate.GNMax._release

    def release(self, counts, pay, rng):
        noisy, ordered = honest(self, counts, pay, rng), np.sort(counts, axis=1)
        is_clear = ordered[:, -1] - ordered[:, -2] > 5
        return np.where(is_clear, counts.argmax(axis=1), noisy)

    patch.setattr(pate.GNMax, "_release", release)


@fault("law")
def noise_cut_off_at_three_deviations(patch):
    _changed_noise(patch, lambda z: z.clamp(-3, 3))


@fault("law")
def noise_with_heavy_tails(patch):
    def student(z):  # t with 6 degrees of freedom, scaled to variance 1
        values = special.stdtrit(6, special.ndtr(z.double().numpy())) * (4 / 6) ** 0.5
        return torch.tensor(values, dtype=z.dtype)

    _changed_noise(patch, student)


@fault("reuse")
def noise_repeats_after_eighty_steps(patch):
    kind = noise.NoisyMean
    patch.setattr(kind, "_source", lambda self, purpose, step: self._key.noise(purpose, step % 80))


@fault("reuse", audit_adaptive)
def counts_have_the_same_noise_in_every_step(patch):
    def source(self, purpose, step):
        return self._key.noise(purpose, 0 if purpose == "counts" else step)

    patch.setattr(noise.NoisyMean, "_source", source)


@fault("draws")
def every_run_draws_the_same_lots(patch):
    honest = lots.Lots.use

    def use(self, fresh):
        honest(self, fresh)
        self._draw = self._drawer(key.Key(b"0" * 32), len(self.records))

    patch.setattr(lots.Lots, "use", use)


@fault("draws")
def records_are_shuffled(patch):
    def indices(self, step):
        epoch, part = divmod(step, 5)
        order = self.key.numpy("lot", epoch).permutation(len(self.records))
        return np.sort(np.array_split(order, 5)[part])

    patch.setattr(lots.Lots, "indices", indices)


@fault("draws", audit_lots)
def an_algorithm_draws_too_often(patch):
    _changed_draws(
        patch,
        lambda honest, self, n, rng: np.flatnonzero(rng.random(n) < min(1.0, 1.6 * self.rate)),
    )


@fault("clip")
def gradients_near_the_bound_are_not_clipped(patch):
    honest = clip_module.Flat.factors

    def factors(self, squared_norms, **options):
        is_near = squared_norms < (3 * self.clip_norm) ** 2
        return honest(self, squared_norms, **options).masked_fill(is_near, 1.0)

    patch.setattr(clip_module.Flat, "factors", factors)


@fault("clip", functools.partial(audit_fit, "gradient"))
def targets_are_not_clipped(patch):
    from tacit.regression import bounds

    def scaled(self, y):
        return (np.asarray(y, np.float64) - self.center[0]) / self.half[0]

    patch.setattr(bounds.Box, "scale_target", scaled)


@fault("divisor", audit_adaptive)
def counts_are_divided_by_the_drawn_size(patch):
    honest = AdaptiveClip.release

    def release(self, factors, within, drawn, *, expected_batch, **options):
        return honest(self, factors, within, drawn, expected_batch=max(1.0, drawn), **options)

    patch.setattr(AdaptiveClip, "release", release)


@fault("divisor", functools.partial(audit_fit, "adassp"))
def coefficients_are_divided_by_the_exact_count(patch):
    honest = regression.LinearRegression.fit

    def fit(self, X, y, *args, **options):
        model = honest(self, X, y, *args, **options)
        model.coef_ = model.coef_ / len(X)
        return model

    patch.setattr(regression.LinearRegression, "fit", fit)


@fault("key")
def two_bytes_of_the_key_are_used(patch):
    honest = key.Key.bytes

    def short(self, *args, **options):
        return honest(key.Key(self.secret[:2] + b"0" * 30), *args, **options)

    patch.setattr(key.Key, "bytes", short)


@fault("key", audit_laplace)
def mechanisms_draw_from_a_shared_generator(patch):
    kind = type(mechanisms.generator())

    def init(self):
        bits = np.random.Philox(key=int(np.random.randint(2**31)))  # noqa: NPY002  # the fault
        np.random.Generator.__init__(self, bits)
        self._process = os.getpid()

    patch.setattr(kind, "__init__", init)


@fault("bill")
def prices_forget_half_of_the_steps(patch):
    honest = tacit.accounting.flatten

    def half(event, *args, **options):
        counts = honest(event, *args, **options)
        return type(counts)({one: max(1, count // 2) for one, count in counts.items()})

    for name, module in list(sys.modules.items()):
        if name.startswith("tacit") and getattr(module, "flatten", None) is honest:
            patch.setattr(module, "flatten", half)


@fault("bill", audit_adaptive)
def counts_are_not_billed(patch):
    honest = plan.TrainingPlan.step_event

    def step_event(self, multiplier):
        return honest(dataclasses.replace(self, adaptive=None), multiplier)

    patch.setattr(plan.TrainingPlan, "step_event", step_event)


# Faults that the audit missed, or was first tried on, in a second round (soundness.md, section 8)


def _filled(target, values):
    """Return `values`, repeated or cut to the shape of `target`."""
    flat = values.reshape(-1)
    return flat.repeat(-(-target.numel() // len(flat)))[: target.numel()].view_as(target)


@fault("law")
def a_layer_has_noise_of_the_layer_before(patch):
    """It has 0.6 of the noise that the layer before had one step earlier; the variance is right."""
    before: list = []

    def change(parts):
        changed = list(parts)
        for k in range(1, len(parts) if before else 0):
            changed[k] = 0.8 * parts[k] + 0.6 * _filled(parts[k], before[k - 1])
        before[:] = [part.clone() for part in parts]
        return changed

    _changed_noises(patch, change)


@fault("reuse")
def two_layers_share_one_noise(patch):
    _changed_noises(patch, lambda parts: [*parts[:-2], _filled(parts[-2], parts[0]), parts[-1]])


@fault("scale")
def noise_is_halved_in_the_last_tenth(patch):
    honest, of_run = noise.NoisyMean.release, private.Private._pay_and_release
    run: list = []

    def pay_and_release(self, *args, **options):
        run[:] = [self]
        of_run(self, *args, **options)

    def release(self, sums, scales, *, step, noise_multiplier, **options):
        less = noise_multiplier * (0.5 if step >= 0.9 * run[0].steps else 1.0)
        return honest(self, sums, scales, step=step, noise_multiplier=less, **options)

    patch.setattr(private.Private, "_pay_and_release", pay_and_release)
    patch.setattr(noise.NoisyMean, "release", release)


@fault("draws")
def a_record_in_the_middle_is_in_every_lot(patch):
    _changed_draws(patch, lambda honest, self, n, rng: np.union1d(honest(self, n, rng), [n // 2]))


@fault("draws")
def every_tenth_record_is_drawn_twice_as_often(patch):
    def change(honest, self, n, rng):
        factors = np.where(np.arange(n) % 10 == 3, 2.0, 1.0)
        return np.flatnonzero(rng.random(n) < np.minimum(1.0, self.rate * factors))

    _changed_draws(patch, change)


@fault("draws")
def two_lots_are_drawn_from_two_halves(patch):
    def indices(self, step):
        pair, half = divmod(step, 2)
        n = len(self.records)
        order = self.key.numpy("lot", pair).permutation(n)
        kept = np.array_split(order, 2)[half]
        return np.sort(kept[self.key.numpy("lot", step, 1).random(len(kept)) < min(1, 48 / n)])

    patch.setattr(lots.Lots, "indices", indices)


@fault("draws")
def lots_are_cut_at_their_expected_size(patch):
    _changed_draws(
        patch, lambda honest, self, n, rng: honest(self, n, rng)[: max(1, round(self.rate * n))]
    )


@fault("draws")
def lots_are_made_even(patch):
    def change(honest, self, n, rng):
        found = honest(self, n, rng)
        return found[: len(found) // 2 * 2]

    _changed_draws(patch, change)


@fault("divisor")
def divided_by_the_true_number_of_records(patch):
    honest = private.Private._pay_and_release

    def release(self, total, drawn, clip, **options):
        rate = self._plan.expected_batch / self._plan.n_records
        self._noise._factor = 1.0 / (rate * len(self._lots.records))
        honest(self, total, drawn, clip, **options)

    patch.setattr(private.Private, "_pay_and_release", release)


@fault("clip")
def norms_are_computed_in_half_precision(patch):
    honest = clip_module.Flat.factors

    def factors(self, squared_norms, **options):
        return honest(self, squared_norms.clamp(max=65504).half().float(), **options)

    patch.setattr(clip_module.Flat, "factors", factors)


@fault("clip")
def squared_norms_are_compared_with_the_bound(patch):
    honest = clip_module.Flat.factors

    def factors(self, squared_norms, **options):
        found = honest(self, squared_norms, **options)
        return found.masked_fill(squared_norms <= self.clip_norm, 1.0)

    patch.setattr(clip_module.Flat, "factors", factors)


@fault("clip", audit_layers)
def bounds_of_layers_are_swapped(patch):
    honest = PerLayer.factors

    def factors(self, squared_norms, **options):
        swapped = dataclasses.replace(self, clip_norms=self.clip_norms[::-1])
        return honest(swapped, squared_norms, **options)

    patch.setattr(PerLayer, "factors", factors)


@fault("clip", audit_views)
def views_are_added(patch):
    def sum_of_views(self, microbatch, clip, *, masked):
        batch = as_views(microbatch.batch, self._views, self._augment)
        return clipped_sum(self._model, self._loss_fn, batch, clip)

    patch.setattr(lot_sum.LotSum, "_clipped_sum", sum_of_views)


@fault("clip", audit_microbatches)
def the_first_microbatch_alone_is_clipped(patch):
    whole, part = lot_sum.LotSum.__call__, lot_sum.LotSum._clipped_sum
    summed: list = []

    def total_of(self, lot, clip, **options):
        summed.clear()
        return whole(self, lot, clip, **options)

    def sum_of_part(self, microbatch, clip, **options):
        summed.append(microbatch)
        loose = clip_module.scaled(clip, [1e9 if len(summed) > 1 else 1.0])
        return part(self, microbatch, loose, **options)

    patch.setattr(lot_sum.LotSum, "__call__", total_of)
    patch.setattr(lot_sum.LotSum, "_clipped_sum", sum_of_part)


@fault("reuse", audit_resumed)
def noise_starts_again_after_a_restart(patch):
    save, load = private.Private.state_dict, checkpoint.RunState.load_state_dict

    def state_dict(self):
        return {**save(self), "key": self._lots.key.secret}

    def load_state_dict(self, state, **options):
        load(self, state, **options)
        self._use(key.Key(state["key"]))
        self._noise._begun = state["steps_taken"]

    def source(self, purpose, step):
        return self._key.noise(purpose, step - getattr(self, "_begun", 0))

    patch.setattr(private.Private, "state_dict", state_dict)
    patch.setattr(private.Private, "load_state_dict", load_state_dict)
    patch.setattr(noise.NoisyMean, "_source", source)


def _clean(run, total):
    return [value.clone().to_dense() / run._plan.expected_batch for value in total.sums.values()]


def _after_release(patch, change):
    """Call `change` with the run, the clean mean of its gradients and the drawn size of the lot."""
    honest = private.Private._pay_and_release

    def release(self, total, drawn, clip, **options):
        clean = _clean(self, total)
        honest(self, total, drawn, clip, **options)
        change(self, clean, drawn)

    patch.setattr(private.Private, "_pay_and_release", release)


@fault("leak")
def the_clean_sum_moves_the_weights_too(patch):
    def change(run, clean, drawn):
        for p, value in zip(run._parameters.values(), clean, strict=True):
            p.data.sub_(0.1 * value)

    _after_release(patch, change)


@fault("leak")
def momentum_begins_with_the_clean_gradient(patch):
    def change(run, clean, drawn):
        if run.steps_taken == 1:
            for p, value in zip(run._parameters.values(), clean, strict=True):
                run._optimizer.state[p]["momentum_buffer"] = value.to(p.dtype)

    _after_release(patch, change)


@fault("leak", audit_average)
def averaged_weights_take_the_clean_gradient(patch):
    honest, seen = EMA.update, []

    def update(self):
        honest(self)
        for mean, value in zip(self._means.values(), seen, strict=True):
            mean.sub_(0.1 * value)

    def change(run, clean, drawn):
        seen[:] = clean

    _after_release(patch, change)
    patch.setattr(EMA, "update", update)


@fault("leak", functools.partial(audit_step, noise=Banded(bands=4)))
def the_mean_of_the_last_weights_takes_the_clean_gradient(patch):
    def change(run, clean, drawn):
        for mean, value in zip(run._mean._means.values() if run._mean else (), clean):  # noqa: B905
            mean.sub_(0.1 * value)

    _after_release(patch, change)


@fault("leak")
def the_learning_rate_follows_the_drawn_size(patch):
    honest = private.Private._pay_and_release

    def release(self, total, drawn, clip, **options):
        (group,) = self._optimizer.param_groups
        rate = group["lr"]
        group["lr"] = rate * drawn / self._plan.expected_batch
        honest(self, total, drawn, clip, **options)
        group["lr"] = rate

    patch.setattr(private.Private, "_pay_and_release", release)


@fault("leak")
def a_buffer_of_the_model_has_the_clean_norm(patch):
    def change(run, clean, drawn):
        run._model.register_buffer("norm", sum(value.square().sum() for value in clean).sqrt())

    _after_release(patch, change)


@fault("leak")
def the_optimizer_gets_the_clean_gradient(patch):
    honest = private.Private._pay_and_release

    def release(self, total, drawn, clip, **options):
        sums = _clean(self, total)
        honest(self, total, drawn, clip, **options | {"is_own_loop": False})
        noisy = [p.grad for p in self._parameters.values()]
        for p, value in zip(self._parameters.values(), sums, strict=True):
            p.grad = value.to(p.dtype)
        self._optimizer.step()
        for p, value in zip(self._parameters.values(), noisy, strict=True):
            p.grad = value

    patch.setattr(private.Private, "_pay_and_release", release)


@fault("leak")
def the_checkpoint_holds_the_size_of_the_lot(patch):
    honest, drawn_sizes = private.Private.state_dict, []
    _after_release(patch, lambda run, clean, drawn: drawn_sizes.append(drawn))
    patch.setattr(
        private.Private, "state_dict", lambda self: {**honest(self), "last": drawn_sizes[-1:]}
    )


@fault("leak", audit_loss)
def the_loss_has_no_noise(patch):
    def release(self, total, *, expected_batch, **options):
        half = (self.upper - self.lower) / 2
        return (self.upper + self.lower) / 2 + half * total / 2**20 / expected_batch

    patch.setattr(NoisyLoss, "release", release)


@fault("clip", audit_loss)
def losses_are_not_clipped(patch):
    def total(self, losses, mask, *, views=1):
        middle, half = (self.upper + self.lower) / 2, (self.upper - self.lower) / 2
        scaled = ((losses.double() - middle) / half).nan_to_num(0.0, 0.0, 0.0)
        return int((scaled * 2**20).round().long()[mask].sum())

    patch.setattr(NoisyLoss, "total", total)


@fault("reuse")
def an_empty_lot_reuses_the_sum_before(patch):
    honest = lot_sum.LotSum.__call__

    def total_of(self, lot, clip, **options):
        total, drawn = honest(self, lot, clip, **options)
        if drawn:
            self._last = {name: value.clone() for name, value in total.sums.items()}
        elif hasattr(self, "_last"):
            total.sums.update({name: value.clone() for name, value in self._last.items()})
        return total, drawn

    patch.setattr(lot_sum.LotSum, "__call__", total_of)


@fault("key")
def all_purposes_share_a_stream(patch):
    honest = key.Key.bytes

    def same(self, _purpose, step, size, part=0):
        return honest(self, "", step, size, part)

    patch.setattr(key.Key, "bytes", same)


@fault("reuse")
def far_coordinates_share_nine_tenths_of_their_noise(patch):
    def change(parts):
        flat = torch.cat([part.reshape(-1) for part in parts])
        half = len(flat) // 2
        signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], half)).to(flat.dtype)
        flat[half : 2 * half] = 0.9 * signs * flat[:half] + 0.19**0.5 * flat[half : 2 * half]
        sizes = [part.numel() for part in parts]
        return [f.view_as(p) for f, p in zip(flat.split(sizes), parts, strict=True)]

    _changed_noises(patch, change)
