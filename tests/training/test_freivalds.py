"""Checked products: an error that matters is found, and the sum is then computed in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tacit import sampling
from tacit.training import Flat, PerLayer
from tacit.training.arithmetic import arithmetic_of, sum_error
from tacit.training.gradients import freivalds
from tacit.training.gradients.freivalds import PROBES, SHARE, ProductCheck

WIDE = 160


def clipped_rows(n, *, width=WIDE, seed=0):
    """Two sides of rank-one gradients whose norms are at most 1."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, w, generator=generator) for w in (width, width + 30))
    return left / left.norm(dim=1, keepdim=True), right / right.norm(dim=1, keepdim=True)


def checked(left, right, *, error, seed=0):
    check = ProductCheck(np.random.default_rng(seed), error)
    return check, check.product("w", left, right)


def test_the_probability_of_a_miss_is_below_the_stated_one():
    assert (SHARE**2 * math.exp(1 - SHARE**2)) ** (PROBES / 2) < 2.0**-73


@pytest.mark.parametrize("rank", [1, 2, 20])
def test_probes_see_errors_of_every_rank_as_often_as_proved(rank):
    # The inequality of the module's docstring, where it can be seen: 4 probes, shares near 1.
    rng = np.random.default_rng(rank)
    error = rng.normal(size=(30, rank)) @ rng.normal(size=(rank, 25))
    error /= np.linalg.norm(error)
    found = np.linalg.norm(error @ rng.normal(size=(4_000, 25, 4)), axis=(1, 2)) / 2
    for share in (0.1, 0.3, 0.6, 0.9):
        bound = (share**2 * math.exp(1 - share**2)) ** 2
        assert np.mean(found <= share) <= bound + 4 * math.sqrt(bound / 4_000) + 1e-3


def planted(kind, shape, rng):
    error = np.zeros(shape)
    if kind == "one entry":
        error[rng.integers(shape[0]), rng.integers(shape[1])] = 1.0
    elif kind == "one row":
        error[rng.integers(shape[0])] = rng.normal(size=shape[1])
    elif kind == "rank one":
        error = np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1]))
    else:
        error = rng.normal(size=shape)
    return torch.from_numpy(error / np.linalg.norm(error))


@pytest.mark.parametrize("kind", ["one entry", "one row", "rank one", "everywhere"])
@pytest.mark.parametrize("is_flipped", [False, True])
def test_an_error_beyond_the_stated_one_is_found(kind, is_flipped):
    sides = clipped_rows(700)
    left, right = sides[::-1] if is_flipped else sides
    rng = np.random.default_rng(1)
    for number in range(20):
        check, total = checked(left, right, error=1e-4, seed=number)
        assert check.holds({"w": total}, Flat(1.0))
        error = planted(kind, total.shape, rng)
        assert not check.holds({"w": total + 1e-4 * error}, Flat(1.0))
        assert check.holds({"w": total + 5e-6 * error}, Flat(1.0))
        assert check.holds({"w": total + 1e-4 * error}, Flat(100.0))


def test_errors_are_held_against_the_clip_norm_of_their_group():
    left, right = clipped_rows(300)
    check = ProductCheck(np.random.default_rng(0), 1e-4)
    sums = {f"{i}.weight": check.product(f"{i}.weight", left, right) for i in range(2)}
    sums["1.weight"] = sums["1.weight"] + 1e-3 * planted("everywhere", sums["1.weight"].shape, _rng)
    assert check.holds(sums, PerLayer((1.0, 100.0)))
    assert not check.holds(sums, PerLayer((100.0, 1.0)))


_rng = np.random.default_rng(3)


def test_a_sum_that_is_not_a_number_fails():
    check, total = checked(*clipped_rows(20), error=1e-4)
    total[3, 5] = math.nan
    assert not check.holds({"w": total}, Flat(1.0))


def test_narrow_and_wider_products_stay_in_float64():
    assert ProductCheck.takes(torch.zeros(5, 128), torch.zeros(5, 128))
    assert not ProductCheck.takes(torch.zeros(5, 127), torch.zeros(5, 128))
    assert not ProductCheck.takes(torch.zeros(5, 128), torch.zeros(5, 128).bfloat16())
    assert not ProductCheck.takes(torch.zeros(5, 128).double(), torch.zeros(5, 128).double())


# Whole steps --------------------------------------------------------------------------------------


def outputs_times(model, batch):
    x, g = batch
    return (model(x) * g).flatten(1).sum(1)


def released(problem, x, g, *, n_records, microbatch=None, arithmetic="bounded"):
    """The sum of a step without noise, as it is released, and what is proved about it."""
    run = problem(
        model=nn.Linear(x.shape[1], g.shape[1], bias=False),
        data=(x, g),
        loss_fn=outputs_times,
        batch_size=n_records,
        n_records=n_records,
        sampler=sampling.Poisson(1.0),
        noise_multiplier=0,
        steps=1,
        arithmetic=arithmetic,
        max_microbatch=microbatch,
        check=False,
    ).private
    seen = []
    run._noise.release_into = lambda _, sums, __, **___: seen.extend(sums)
    run.step(next(iter(run)))
    return seen[0].double(), run.arithmetic


def test_sums_that_fail_the_check_are_computed_in_float64(problem, monkeypatch):
    x, g = (10 * t for t in clipped_rows(600))
    used, failures = [], []
    usual, holds = freivalds.ProductCheck.product, freivalds.ProductCheck.holds

    def careless(self, name, left, right):
        used.append(name)
        return usual(self, name, left, right).bfloat16().double()

    def recorded(self, *args):
        failures.append(not holds(self, *args))
        return not failures[-1]

    options = {"n_records": 600, "microbatch": 250}
    plain, arithmetic = released(problem, x, g, **options)
    monkeypatch.setattr(freivalds.ProductCheck, "product", careless)
    monkeypatch.setattr(freivalds.ProductCheck, "holds", recorded)
    again, _ = released(problem, x, g, **options)
    exact = (g / g.norm(dim=1, keepdim=True)).double().t() @ (
        x / x.norm(dim=1, keepdim=True)
    ).double()
    assert (used, failures) == (["weight"] * 3, [True])
    for found in (plain, again):
        assert float((found - exact).norm()) <= 1e-4 * float(exact.norm())  # of the clip factors
    assert float((plain - again).norm()) <= 2 * arithmetic.product_error


def doubling(size):
    """Rows just above half an ulp of a sum that one other record completes."""
    return torch.cat([torch.ones(size - 1), torch.full((size,), size * 2.0**-24 * (1 + 2.0**-10))])


def swallowing(size):
    return torch.cat([torch.ones(size), torch.full((size,), size * 2.0**-25)])


def canceling(size):
    signs = torch.ones(size)
    signs[1::2] = -1
    return torch.cat([signs, signs * 2.0**-20, torch.full((size,), 2.0**-24)])


@pytest.mark.parametrize("lot", [doubling, swallowing, canceling], ids=lambda f: f.__name__)
@pytest.mark.parametrize("microbatch", [None, 130])
def test_crafted_lots_of_wide_layers_move_by_one_clip_norm(lot, microbatch, problem):
    sizes = torch.cat([torch.ones(1), lot(512)])
    x = sizes.view(-1, 1).expand(-1, WIDE) / math.sqrt(WIDE)
    g = torch.full((len(x), WIDE), 1 / math.sqrt(WIDE))
    options = {"n_records": len(x), "microbatch": microbatch}
    more, arithmetic = released(problem, x, g, **options)
    less, _ = released(problem, x[1:], g[1:], **options)
    assert 0.99 < float((more - less).norm()) <= 1 + arithmetic.eta


@pytest.mark.slow  # 200 rounds for each of three starts
def test_a_search_over_lots_of_wide_layers_finds_no_violation():
    rng, worst, failed = np.random.default_rng(0), 0.0, 0
    arithmetic = arithmetic_of("bounded", largest_lot=4_096, ranks=1)
    assert arithmetic.eta <= 1e-3

    def computed(sizes):
        nonlocal failed
        left = torch.from_numpy(sizes).float().view(-1, 1).expand(-1, 128) / math.sqrt(128)
        right = torch.full((len(sizes), 130), 1 / math.sqrt(130))
        check = ProductCheck(np.random.default_rng(len(sizes)), arithmetic.product_error)
        total = check.product("w", left, right)
        if check.holds({"w": total}, Flat(1.0)):
            return total
        failed += 1
        return left.double().t() @ right.double()

    for lot in (doubling, swallowing, canceling):
        best, reach = lot(1_300).double().numpy(), 0.0
        for _ in range(200):
            tried = best.copy()
            some = rng.integers(0, len(tried), size=60)
            kind = rng.integers(4)
            if kind == 0:
                tried[some] = tried[rng.permutation(some)]
            elif kind == 1:
                tried[some] = np.clip(tried[some] * 2.0 ** rng.integers(-20, 4), -1, 1)
            elif kind == 2:
                tried[some] *= -1
            else:
                tried[some] = rng.uniform(-1, 1, size=60)
            found = float((computed(np.append(1.0, tried)) - computed(tried)).norm())
            if found >= reach:
                best, reach = tried, found
        worst = max(worst, reach)
    assert 0.99 < worst <= 1 + arithmetic.eta
    assert failed < 1_200  # some sums passed


def test_the_check_adds_as_much_to_eta_as_rounding_to_float32_does():
    for lot in (1, 300, 1_024, 4_944):
        eta = sum_error(lot, forms_gradients=False)
        product_error = arithmetic_of("bounded", largest_lot=lot, ranks=4).product_error
        assert 2 * 4 * product_error <= eta
