"""Correlated noise: prices and noise against known numbers, releases, draws, restarts, averages."""

import copy
import itertools
import math
import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from tacit import accounting, sampling
from tacit.events import BandedGaussian, Gaussian, PoissonSampled, Repeated
from tacit.events import Sequence as EventSequence
from tacit.mechanisms import optimal_bands, running_error, step_deviations
from tacit.training import AdamBC, AdaptiveClip, Banded, Flat, PerLayer, ScheduledClip, Stairs
from tacit.training.banded_noise import BandedNoise, price_bands
from tacit.training.ema import TailMean
from tacit.training.grid_noise import make_grids
from tacit.training.key import Key
from tacit.training.noise import NoisyMean

FASHION = {"batch_size": 256, "n_records": 60_000, "steps": 2048, "delta": 1e-5}
MILLION = {"batch_size": 1000, "n_records": 10**6, "steps": 1000, "delta": 1e-5}
NOISE_AND_PRICE = {  # by epsilon: 'multiplier / noise' for 1, 4, 8, 16, 32 and 64 bands
    0.5: "1.5574/49.85 2.8757/46.64 4.0028/46.88 5.6106/48.40 7.8881/51.64 11.0922/57.35",
    1.0: "1.0139/32.45 1.6685/27.06 2.2517/26.37 3.0985/26.73 4.3082/28.21 6.0093/31.07",
    3.0: "0.6841/21.90 0.9002/14.60 1.0927/12.80 1.3831/11.93 1.8125/11.87 2.4248/12.54",
    8.0: "0.5167/16.54 0.6257/10.15 0.7084/8.30 0.8234/7.10 0.9868/6.46 1.2164/6.29",
}
ENTRIES = [
    (epsilon, bands, *map(float, entry.split("/")))
    for epsilon, row in NOISE_AND_PRICE.items()
    for bands, entry in zip((1, 4, 8, 16, 32, 64), row.split(), strict=True)
]


def check_entry(epsilon, bands, multiplier, noise, setting):
    found = price_bands(bands, epsilon=epsilon, **setting)
    assert found.noise_multiplier == pytest.approx(multiplier, abs=6e-5)
    assert found.noise == pytest.approx(noise, abs=6e-3)


@pytest.mark.parametrize("entry", [ENTRIES[8], ENTRIES[-1]], ids=str)
def test_noise_and_price(entry):
    check_entry(*entry, FASHION)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_all_of_the_table_of_noise_and_price(entry):
    check_entry(*entry, FASHION)


@pytest.mark.slow
def test_one_epoch_of_a_million_records():
    check_entry(1.0, 1, 0.6409, 14.34, MILLION)
    check_entry(1.0, 32, 1.1944, 5.865, MILLION)
    check_entry(8.0, 128, 0.6358, 2.227, MILLION)
    best = price_bands("auto", epsilon=1.0, **MILLION)
    assert best.bands == 32
    assert price_bands(1, epsilon=1.0, **MILLION).noise / best.noise >= 2.4


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "bands"), [(0.5, 4), (1.0, 8), (3.0, 32), (8.0, 64)])
def test_the_best_number_of_bands(epsilon, bands):
    assert price_bands("auto", epsilon=epsilon, **FASHION).bands == bands


def test_large_batches_take_one_band():
    found = price_bands(
        "auto", batch_size=8192, n_records=60_000, steps=280, epsilon=1.0, delta=1e-5
    )
    assert found.bands == 1


@pytest.mark.slow
def test_the_choice_is_never_worse_than_independent_noise():
    rng = np.random.default_rng(30)
    for _ in range(30):
        n_records = int(10 ** rng.uniform(2, 6))
        setting = {
            "n_records": n_records,
            "batch_size": int(n_records ** rng.uniform(0.1, 1.0)),
            "steps": int(10 ** rng.uniform(0, 3.5)),
            "epsilon": 10 ** rng.uniform(-1, 1),
            "delta": 1e-6,
        }
        found = price_bands("auto", most=16, **setting)
        assert found.noise <= price_bands(1, **setting).noise * (1 + 1e-12)
        rate = min(1.0, found.bands * setting["batch_size"] / n_records)
        turn = PoissonSampled(rate, Gaussian(found.noise_multiplier))
        event = Repeated(turn, -(-setting["steps"] // found.bands))
        assert accounting.epsilon(event, delta=1e-6) <= setting["epsilon"] * (1 + 1e-9)


# Runs ---------------------------------------------------------------------------------------------


def zero(model, batch):
    return model(batch[0]).sum(1) * 0.0


def gradients(made, stop=None):
    """Take the steps up to `stop`; return what each released, one row for each step."""
    found = []
    for lot in made.private:
        made.private.step(lot)
        parts = [p.grad.double().flatten() for p in made.model.parameters()]
        found.append(torch.cat(parts).numpy().copy())
        if made.private.steps_taken == stop:
            break
    return np.array(found)


def mixed(values, column):
    """Return C applied to the rows of `values`."""
    found = np.zeros_like(values)
    for lag, weight in enumerate(column[: len(values)]):
        found[lag:] += weight * values[: len(values) - lag]
    return found


def small(problem, **options):
    settings = {"n": 200, "batch_size": 8, "steps": 24, "seed": 5, "check": False}
    return problem(**(settings | {"noise": Banded(bands=8)} | options))


def test_the_bill_counts_the_turns_of_a_group(problem):
    private = small(problem, steps=21).private
    turn = PoissonSampled(8 * 8 / 200, Gaussian(1.0))
    assert isinstance(private.event, BandedGaussian)
    exact = accounting.epsilon(Repeated(turn, 3), delta=1e-5)
    assert private.epsilon(delta=1e-5) == pytest.approx(exact, rel=1e-6)
    assert private.epsilon(delta=1e-5) >= exact


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 16])
def test_a_run_that_stops_early_costs_the_turns_begun(problem, steps):
    plan = small(problem).private._plan
    turns = plan.event_of(plan.noise_multipliers[:steps]).equivalent
    assert turns.count == math.ceil(steps / 8)


def test_releases_are_white_after_mixing_and_have_the_billed_noise(problem):
    made = small(problem, loss_fn=zero, steps=160, n=64, batch_size=1)  # many lots are empty
    values = gradients(made) * made.private.info["expected_batch"]
    z = mixed(values, made.private.event.column)  # (160, 37)
    assert chi2.ppf(5e-7, z.size) < (z**2).sum() < chi2.isf(5e-7, z.size)
    for lag in range(1, 17):  # false-alarm probability 16 * 6e-7
        assert abs((z[lag:] * z[:-lag]).sum()) < 5.0 * np.sqrt(z[lag:].size)
    # The noise of each step is larger than that of z, and that of running sums much smaller.
    step_noise = np.sqrt((values[64:] ** 2).mean())
    expected = step_deviations(np.array(made.private.event.column), 160)[-1]
    assert step_noise == pytest.approx(expected, rel=0.1)
    error = np.sqrt((values.cumsum(0) ** 2).mean())
    assert error == pytest.approx(running_error(optimal_bands(160, 8), 160), rel=0.25)


def test_the_sums_are_those_that_were_drawn(problem):
    made = small(problem, noise_multiplier=1e-6, clip_norm=0.5)
    plain = small(problem, noise_multiplier=0.0, clip_norm=0.5)
    assert np.abs(gradients(made) - gradients(plain)).max() < 1e-5


def test_one_band_is_ordinary_training_bit_for_bit(problem):
    given, chosen = {"noise_multiplier": 1.0}, {"epsilon": 9.0, "delta": 1e-2, "batch_size": 150}
    for noise, options in ((Banded(bands=1), given), (Banded(), chosen)):
        made = small(problem, noise=noise, steps=3, **options)
        plain = small(problem, noise=None, steps=3, **options)
        assert made.private.event == plain.private.event
        assert (gradients(made) == gradients(plain)).all()
        assert all(map(torch.equal, made.model.parameters(), plain.model.parameters()))


def test_bands_are_chosen_from_public_facts(problem):
    made = small(problem, noise=Banded(), epsilon=8.0, delta=1e-3, n=400, batch_size=100, steps=48)
    setting = {"batch_size": 100, "n_records": 400, "steps": 48, "epsilon": 8.0, "delta": 1e-3}
    best = price_bands("auto", **setting)
    assert made.private.info["bands"] == best.bands > 1
    assert made.private.noise_multiplier == pytest.approx(best.noise_multiplier)
    assert 0.99 * 8.0 < made.private.epsilon(delta=1e-3) <= 8.0


def test_a_record_is_drawn_at_the_turns_of_its_group_only(problem):
    lots = small(problem, steps=64, batch_size=20).private._lots
    steps = {}
    for step in range(64):
        for index in lots.indices(step).tolist():
            steps.setdefault(index, set()).add(step % 8)
    assert max(map(len, steps.values())) == 1
    assert len(set.union(*steps.values())) == 8


@pytest.mark.parametrize("clip", [Flat(1.0), PerLayer((0.5, 2.0))])
def test_microbatches_release_the_same(problem, clip):
    rule = {"clip_norm": clip}
    one = gradients(small(problem, **rule))
    other = gradients(small(problem, max_microbatch=3, **rule))
    assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("taken", [16, 9])
def test_a_resumed_run_begins_a_mechanism_of_its_own(problem, taken):
    """Mixed by the column, its steps are white: no residual of the steps before is in them."""
    made = small(problem)
    gradients(made, stop=taken)
    state = made.private.state_dict()
    ledger = made.private.ledger
    again = small(problem, ledger=ledger, loss_fn=zero)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is paid is tested elsewhere
        again.private.load_state_dict(state, lost_steps="pay")
    z = mixed(gradients(again), made.private.event.column) * 8
    assert chi2.ppf(5e-7, z.size) < (z**2).sum() < chi2.isf(5e-7, z.size)


def test_residuals_are_secret_and_in_no_checkpoint(problem):
    made = small(problem)
    gradients(made, stop=9)
    assert "residuals" not in repr(made.private) + repr(made.private._noise)
    assert "residuals" not in repr(made.private.state_dict())
    with pytest.raises(TypeError, match="copied or pickled"):
        copy.deepcopy(made.private._noise)


def test_the_model_ends_with_the_mean_of_its_last_weights(problem):
    made, seen = small(problem), []
    for lot in made.private:
        made.private.step(lot)
        if made.private.steps_taken < 24:
            seen.append(made.model[0].weight.detach().clone())
    last = small(problem, noise=Banded(bands=8, average=0.0))
    gradients(last)
    seen.append(last.model[0].weight.detach())
    mean = torch.stack(seen[18:]).mean(0)  # after 19 to 24 of 24 steps: a quarter
    assert torch.allclose(made.model[0].weight, mean, atol=1e-6)
    with last.private.averaged() as model:
        assert torch.equal(model[0].weight, seen[-1])


@pytest.mark.parametrize("end", ["exhausted", "left", "averaged", "held"])
def test_a_loop_of_the_users_own_gets_the_same(problem, end):
    made, other = small(problem), small(problem)
    gradients(made)
    lots = iter(other.private)
    for _ in lots:
        other.private.backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
        if end != "exhausted" and other.private.steps_taken == 24:
            break
    if end == "left":
        del lots
    elif end == "averaged":
        with other.private.averaged():
            pass
    for one, two in zip(made.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-4)


@pytest.mark.parametrize("stop", [18, 19, 20, 22, 23])
def test_the_mean_so_far_can_be_used_during_the_run(problem, stop):
    """It holds the newest weights as well; asking for it changes nothing."""
    made, seen = small(problem), []
    for lot in made.private:
        made.private.step(lot)
        weight = made.model[0].weight
        seen.append(weight.detach().clone())
        if made.private.steps_taken == stop:
            with made.private.averaged() as model:
                mean = torch.stack(seen[18:] or seen[-1:]).mean(0)
                assert torch.allclose(model[0].weight, mean, atol=1e-6)
            assert torch.equal(weight, seen[-1])
    expected = small(problem)
    gradients(expected)
    assert torch.equal(made.model[0].weight, expected.model[0].weight)


def test_an_optimizer_that_corrects_for_noise_is_told_its_size(problem, monkeypatch):
    told = []
    monkeypatch.setattr(AdamBC, "state_noise", lambda _, stds: told.append(next(iter(stds))[1]))
    model = torch.nn.Linear(4, 2)
    made = small(problem, model=model, optimizer=AdamBC(model.parameters(), lr=0.1))
    gradients(made)
    column = np.array(made.private.event.column)
    assert told == pytest.approx(step_deviations(column, 24) / 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": ScheduledClip(1.0, Stairs((1.0, 0.5)))}, "clip_norm must not change"),
        ({"schedule": Stairs((1.0, 0.5))}, "noise.schedule must not change"),
        ({"clip_norm": AdaptiveClip(1.0)}, "clip_norm must not change"),
        ({"batch_size": sampling.Poisson(8 / 200)}, "batch_size must be .* FixedOrder or Str"),
        ({"noise": Banded()}, "needs epsilon and delta"),
        ({"noise": Banded(bands=2, restart=4)}, "restart is for a FixedOrder"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_has_no_proof_is_refused(problem, options, message):
    with pytest.raises(ValueError, match=message):
        small(problem, **options)


@pytest.mark.parametrize("bad", [{"bands": 0}, {"bands": 2000}, {"average": 2.0}, {"restart": 0}])
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Banded(**bad)


def test_a_run_does_not_go_on_past_its_plan(problem):
    """Its last lot cannot be used again, and no further one is drawn."""
    made = small(problem, steps=10)
    for lot in made.private:
        made.private.step(lot)
    with pytest.raises(ValueError, match="another step or run"):
        made.private.step(lot)
    with pytest.warns(RuntimeWarning, match="this run is over"):
        assert list(made.private) == []
    state = made.private.state_dict()
    longer = small(problem, steps=20, ledger=made.private.ledger)
    with pytest.raises(ValueError, match="another plan"):
        longer.private.load_state_dict(state)


@pytest.mark.parametrize("declared", [150, 200, 400])
def test_a_wrong_number_of_records_changes_lots_and_not_the_bill(problem, declared):
    """The rate that is billed is the one by which every record is drawn, however many there are."""
    private = small(problem, n_records=declared, steps=400).private
    assert private.event.rate == pytest.approx(8 * 8 / declared)
    drawn = [private._lots.indices(step) for step in range(400)]
    counts = np.bincount(np.concatenate(drawn), minlength=200)
    expected = 50 * private.event.rate  # of 50 turns of each group
    deviation = np.sqrt(200 * expected * (1 - private.event.rate))
    assert abs(counts.sum() - 200 * expected) < 5 * deviation


@pytest.mark.parametrize("bands", [2, 8])
def test_groups_smaller_than_the_batch_divide_by_their_own_size(problem, bands):
    """A whole group is drawn in each turn: its expected size is public, and below batch_size."""
    made = small(problem, batch_size=150, steps=16, noise=Banded(bands=bands))
    assert made.private.event.rate == 1.0
    assert made.private.info["expected_batch"] == 200 / bands
    sizes = [len(made.private._lots.indices(step)) for step in range(bands)]
    assert sum(sizes) == 200


# Fixed orders -------------------------------------------------------------------------------------


def test_a_fixed_order_is_one_gaussian_release(problem):
    made = small(problem, noise=Banded(bands=6), batch_size=sampling.FixedOrder(6))
    equivalent = made.private.event.equivalent
    assert isinstance(equivalent, Gaussian)
    assert equivalent.noise_multiplier == pytest.approx(1.0 / math.sqrt(4))
    assert made.private.info["expected_batch"] == pytest.approx(200 / 6)
    gradients(made)


def test_bands_beyond_the_pass_are_priced_with_their_overlap(problem):
    made = small(problem, noise=Banded(bands=12), batch_size=sampling.FixedOrder(6))
    column = np.array(made.private.event.column)
    total = np.zeros(24)
    for start in range(0, 24, 6):
        part = column[: 24 - start]
        total[start : start + len(part)] += part
    norm = np.linalg.norm(total)
    assert made.private.event.equivalent.noise_multiplier == pytest.approx(1 / norm)


def test_the_best_bands_of_a_fixed_order_are_as_long_as_its_pass():
    """Of 1,024 steps with 4 passes of 256: known noise 6.44414 for 256 bands at unit price."""
    setting = {"batch_size": sampling.FixedOrder(256), "n_records": 2560, "steps": 1024}
    setting |= {"epsilon": 1.0, "delta": 1e-5}
    plain, best = (price_bands(bands, **setting) for bands in (1, 256))
    assert best.noise / plain.noise == pytest.approx(6.44414 / 45.2769, rel=2e-4)


def test_restarts_cut_the_noise_into_independent_passes(problem):
    options = {"loss_fn": zero, "steps": 96, "noise": Banded(bands=8, restart=8)}
    made = small(problem, batch_size=sampling.FixedOrder(8), **options)
    values = gradients(made) * made.private.info["expected_batch"]
    passes = values.reshape(12, 8, -1)
    z = np.concatenate([mixed(one, made.private.event.column) for one in passes])
    assert chi2.ppf(5e-7, z.size) < (z**2).sum() < chi2.isf(5e-7, z.size)
    first, second = passes[:-1].sum(1), passes[1:].sum(1)
    assert abs((first * second).sum()) < 5.0 * np.sqrt((first**2).sum() * (second**2).mean())


def test_a_stream_uses_no_record_more_often_than_billed(problem):
    order = [[0, 1, 2]] * 24  # far too often
    sampler = sampling.Stream(order, separation=5, participations=3, expected_batch=8)
    made = small(problem, batch_size=sampler)
    used = [made.private._lots.indices(step).tolist() for step in range(24)]
    assert used == [[0, 1, 2] if step in (0, 5, 10) else [] for step in range(24)]
    assert made.private.event.participations == 3
    assert isinstance(made.private.event.equivalent, Gaussian)


# The noise alone ----------------------------------------------------------------------------------


def test_neighbors_move_the_mixed_releases_by_the_norm_of_the_column():
    """The same key, and a record of norm 1 in one step: C u moves by 1 and the billed rounding."""
    rng, column = np.random.default_rng(0), optimal_bands(32, 8)
    size, at = 5000, 11
    sums = [torch.from_numpy(rng.normal(size=size) * 40) for _ in range(32)]
    moved = rng.normal(size=size)
    moved = torch.from_numpy(moved / np.linalg.norm(moved))
    seen = []
    for is_in in (True, False):
        noise = BandedNoise(Key.from_seed(1), expected_batch=1.0, column=column)
        rows = []
        for step, total in enumerate(sums):
            total = total + moved * (is_in and step == at)
            rows.append(noise.release([total], [1.0], step=step, noise_multiplier=0.8)[0].clone())
        seen.append(mixed(torch.stack(rows).numpy(), column))
    # A step of the residuals is 5e-8: what is left in later steps.
    steps = np.flatnonzero(np.abs(seen[0] - seen[1]).max(1) > 1e-6)
    assert steps.tolist() == list(range(at, at + 8))
    assert np.linalg.norm(seen[0] - seen[1]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("group", range(3))
def test_every_pattern_of_turns_moves_the_releases_as_billed(group):
    """Each turn moves C u by its column, at most 1, and the columns of one record do not overlap.

    All subsets of the turns that the sampler allows, with another gradient of norm 1 in each turn.
    """
    rng, column, steps = np.random.default_rng(group), optimal_bands(10, 3), 10
    sums = torch.from_numpy(rng.normal(size=(steps, 60)) * 5)
    turns = list(range(group, steps, 3))
    moved = torch.from_numpy(rng.normal(size=(steps, 60)))
    moved /= moved.norm(dim=1, keepdim=True)

    def released(pattern):
        noise = BandedNoise(Key.from_seed(1), expected_batch=1.0, column=column)
        rows = [
            noise.release(
                [total + moved[step] * (step in pattern)], [1.0], step=step, noise_multiplier=0.8
            )[0].clone()
            for step, total in enumerate(sums)
        ]
        return mixed(torch.stack(rows).numpy(), column)

    without = released(())
    norms = {step: np.linalg.norm(column[: steps - step]) for step in turns}
    for size in range(1, len(turns) + 1):
        for pattern in itertools.combinations(turns, size):
            found = np.linalg.norm(released(pattern) - without)
            billed = math.sqrt(sum(norms[step] ** 2 for step in pattern))
            assert found == pytest.approx(billed, abs=1e-4)
            assert billed <= math.sqrt(len(pattern)) + 1e-12
    assert len(turns) <= math.ceil(steps / 3)


def test_rounding_is_billed_in_the_noise():
    plain, banded = (make_grids(1.0, [1.0], 10**6, bands=bands)[0] for bands in (1, 64))
    ratio = banded.step * banded.noise_steps / (plain.step * plain.noise_steps)
    charge = 1e3 * (2.0**-23 + 8 * 2.0**-28)
    assert 1 < ratio < 1 + 1.1 * charge


def test_events_of_also_are_part_of_the_price(problem):
    also = Gaussian(1.5)
    options = {"epsilon": 3.0, "delta": 1e-3, "noise": Banded(bands=4)}
    made, alone = small(problem, also=also, **options), small(problem, **options)
    assert made.private.noise_multiplier > alone.private.noise_multiplier
    assert made.private.event == EventSequence((also, made.private.training_event))
    assert made.private.epsilon(delta=1e-3) <= 3.0


@pytest.mark.slow
def test_the_page_says_what_happens(capsys):
    page = (Path(__file__).parents[2] / "docs" / "correlated-noise.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # the page's own examples
    printed = re.findall(r"^# (.+)$", "\n".join(blocks), re.MULTILINE)
    assert capsys.readouterr().out.split("\n")[:-1] == printed


PLACES = np.arange(200) % 8
ORDER = [[0, 1, 2, 3]] + [[4, 5, 6]] * 11 + [[10, 11]] * 12


def test_an_order_that_is_edited_later_does_not_change():
    places, order = PLACES.copy(), [list(lot) for lot in ORDER]
    fixed = sampling.FixedOrder(8, places=places)
    stream = sampling.Stream(order, separation=8, expected_batch=3)
    before = fixed.digest(), stream.digest()
    places[:], order[0][0] = 0, 9
    order.reverse()
    assert (fixed.digest(), stream.digest()) == before
    assert stream.lots(200)(0, np.random.default_rng()).tolist() == [0, 1, 2, 3]


def test_a_launch_that_fails_leaves_no_stale_residual(monkeypatch):
    """The noise starts anew at the next step, whichever way the launch was made."""

    class Failing:
        def set_step(self, step):
            pass

        def launch(self):
            raise RuntimeError("launch")

    noise = BandedNoise(Key.from_seed(1), expected_batch=1.0, column=optimal_bands(32, 8))
    step = partial(noise.release, scales=[1.0], noise_multiplier=1.0)
    for number in range(3):
        step([torch.zeros(4, dtype=torch.float64)], step=number)
    with monkeypatch.context() as patch:
        patch.setattr(NoisyMean, "in_place", lambda *_, **__: Failing())
        with pytest.raises(RuntimeError, match="launch"):
            step([torch.zeros(4, dtype=torch.float64)], step=3)
    noise._begin_step(4)
    assert not noise._residuals.any()


def test_a_mean_of_short_floats_keeps_moving():
    model = torch.nn.Linear(50, 50, bias=False).bfloat16()
    mean, total = TailMean(model, steps=1024, share=0.5), torch.zeros(50, 50, dtype=torch.float64)
    for step in range(1, 1025):
        with torch.no_grad():
            model.weight.copy_(step / 1024 + 0.3 * torch.randn(50, 50))
        mean.observe(step)
        total += model.weight.double() * (step > 512)
    assert mean.updates == 512
    assert (mean._means["weight"] - total / 512).abs().max() < 1e-4
    mean.load_state(mean.state())
    assert mean._means["weight"].dtype == torch.float32


def test_a_cyclic_sampler_needs_no_correlated_noise(problem):
    for rate, expected in ((2 * 8 / 200, 8.0), (1.0, 100.0)):
        made = small(problem, noise=None, batch_size=sampling.CyclicPoisson(rate, 2)).private
        assert made.event.separation == 2
        assert made.info["expected_batch"] == expected


@pytest.mark.parametrize("multiplier", [0.0, 1.0])
def test_a_stream_that_is_too_short_is_refused(problem, multiplier):
    short = sampling.Stream([[0]] * 5, separation=2, expected_batch=1)
    with pytest.raises(ValueError, match="a lot for each"):
        small(problem, batch_size=short, noise_multiplier=multiplier)
    with pytest.raises(ValueError, match="a lot for each"):
        short.lots(3)(5, np.random.default_rng())


@pytest.mark.parametrize("column", [(), (1e-200,), (0.0, 1.0), (1.0, 1e200), (1.0, math.nan)])
def test_a_column_without_a_price_is_refused(column):
    with pytest.raises(ValueError, match="column"):
        BandedGaussian(1.0, column, 7, 3)


def mixed_in(run, step):
    """What earlier steps add to the sum of a step."""
    run._begin_step(step)
    if run._residuals is None or run._begin == step:
        return torch.zeros(15, dtype=torch.float64)
    older, recent = run._past(run._residuals, step)
    return sum((weight * run._residuals[row] for row, weight in recent), older.clone())


@pytest.mark.parametrize("bands", [2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("restart", [None, 7])
def test_residuals_are_mixed_as_written_and_a_replay_from_anywhere_repeats_them(bands, restart):
    column, steps = np.linspace(1.0, 0.3, bands), 2 * bands + 6
    column /= np.linalg.norm(column)
    generator = torch.Generator().manual_seed(0)
    sums = torch.rand(steps, 3, 5, dtype=torch.float64, generator=generator)

    def noise():
        return BandedNoise(
            Key.from_seed(1), expected_batch=4.0, column=column.tolist(), restart=restart
        )

    def released(run, step):
        parts = [sums[step, 0].clone(), sums[step, 1:].clone()]
        found = run.release(parts, [1.0, 2.0], step=step, noise_multiplier=1.0)
        return torch.cat([f.flatten() for f in found]).clone()

    run, gradients, residuals, states = noise(), [], [], []
    grids = make_grids(1.0, [1.0, 2.0], 15, bands=bands)
    units = torch.tensor([grids[0].step] * 5 + [grids[1].step] * 10, dtype=torch.float64)
    for step in range(steps):
        states.append(run.state())
        begin = 0 if restart is None else step - step % restart
        lags = range(1, min(bands - 1, step - begin) + 1)
        past = mixed_in(run, step)
        expected = sum((column[k] * residuals[step - k] for k in lags), torch.zeros_like(past))
        torch.testing.assert_close(past, expected)
        gradients.append(released(run, step))
        residuals.append((sums[step].flatten() - 4.0 * gradients[-1]) / units)
    for begin, state in enumerate(states):
        again = noise()
        again.load_state(state)
        for step in range(begin, min(begin + 6, steps)):
            assert torch.equal(released(again, step), gradients[step])


def test_residuals_in_whole_units_are_mixed_on_the_cpu_as_well(monkeypatch):
    """As those of a GPU are, in a step for which it has no kernel."""
    sums = torch.rand(9, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = []
    for kind in (torch.float64, torch.int32):
        run = BandedNoise(Key.from_seed(1), expected_batch=4.0, column=optimal_bands(9, 4))
        run._residuals = torch.zeros(3, 40, dtype=kind)
        with monkeypatch.context() as patch:
            patch.setattr(run, "_kept", lambda *_, run=run: run._residuals)
            options = {"scales": [1.0], "noise_multiplier": 1.0}
            found = [
                run.release([total.clone()], step=t, **options) for t, total in enumerate(sums)
            ]
        assert run._residuals.dtype == kind
        seen.append(torch.stack([gradient for (gradient,) in found]))
    assert 0 < (seen[0] - seen[1]).abs().max() < 1e-6  # units are 6e-8


def test_bands_that_leave_smaller_lots_are_charged_for_it():
    """Lots of n / b records are divided by n / b, so their noise counts for more."""
    setting = {"batch_size": 180, "n_records": 1438, "steps": 24, "epsilon": 3.0, "delta": 1e-5}
    one, many = (price_bands(bands, **setting) for bands in (1, 24))
    lot = 1438 / 24
    error = running_error(optimal_bands(24, 24), 24)
    assert many.noise == pytest.approx(many.noise_multiplier * error * 180 / lot)
    assert many.noise > one.noise
