"""Many ranks give the release of one: same law, same steps, noise once."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from tacit.training.clipping.clip import ClippedSum
from tacit.training.distributed import Ranks

SCRIPT = Path(__file__).with_name("ranks.py")
QUICK = [
    "trained:plain",
    "trained:ddp",
    "trained:fsdp",
    "noise:plain",
    "tiny:plain",
    "refused:plain",
    "foreign:ddp",
    "foreign:fsdp",
    "cut:ddp",
    "uneven:ddp",
    "accumulated:ddp",
    "accumulated:fsdp",
    "users:plain",
    "users_cut:ddp",
    "users_cut:fsdp",
    "other_users:plain",
    "sparse:ddp",
    "shuffled:plain",
    "mixing:plain",
    "restarted:fsdp",
    "banded:plain",
    "banded:fsdp",
]


def launch(folder, size, *jobs):
    """Results of each rank, by job."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={size}", str(SCRIPT), str(folder), *jobs],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:3000] + done.stderr[-1500:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), 2, *QUICK)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same jobs in one process without torch.distributed."""
    modes = runpy.run_path(str(SCRIPT))["MODES"]
    chosen = ("trained", "adaptive", "foreign", "cut", "sparse", "banded", "users", "users_cut")
    return {f"{mode}:plain": modes[mode]("plain", None) for mode in chosen}


def agree(one, other):
    """Same key, so same lots and same noise: equal up to the order of addition."""
    for name in ("gradients", "weights"):
        assert np.allclose(one[name], other[name], rtol=1e-4, atol=1e-6)


def test_two_processes_release_what_one_does(alone, two):
    assert two[0]["trained:plain"] == two[1]["trained:plain"]
    agree(alone["trained:plain"], two[0]["trained:plain"])


@pytest.mark.parametrize("job", ["trained:plain", "trained:ddp", "trained:fsdp", "banded:plain"])
def test_ranks_release_one_noisy_loss(alone, two, job):
    expected = alone[f"{job.partition(':')[0]}:plain"]["losses"]
    assert len(expected) in (5, 12)
    for rank in two:
        assert rank[job]["losses"] == pytest.approx(expected, rel=1e-5)
        assert rank[job]["is_reported"]


def test_data_parallel_and_sharded_models_get_the_same_release(two):
    agree(two[0]["trained:plain"], two[0]["trained:ddp"])
    agree(two[0]["trained:ddp"], two[1]["trained:fsdp"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_rank_refuses_to_accumulate_releases(two, kind):
    for rank in two:
        found = rank[f"accumulated:{kind}"]
        assert "no optimizer step has used the last release" in found["words"]
        assert (found["warnings"], found["steps"]) == (1, 2)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("foreign", "ddp"), ("foreign", "fsdp"), ("cut", "ddp"), ("sparse", "ddp")],
)
def test_a_foreign_loop_releases_the_sum_of_all_ranks(alone, two, mode, kind):
    """Noiseless, so that p.grad is the sum: whole lots, lots cut in batches, and empty shares."""
    found = [rank[f"{mode}:{kind}"] for rank in two]
    assert found[0] == found[1]  # every gradient, and the weights
    agree(alone[f"{mode}:plain"], found[0])
    lots_with_records = np.any(found[0]["gradients"], axis=1)
    assert lots_with_records.any()
    assert lots_with_records.all() == (mode != "sparse")


def test_each_user_is_on_one_rank(alone, two):
    """One clipped gradient of each user, not one on each rank; noise in the first of the jobs."""
    agree(alone["users:plain"], two[0]["users:plain"])
    for kind in ("ddp", "fsdp"):
        found = [rank[f"users_cut:{kind}"] for rank in two]
        assert found[0] == found[1]
        agree(alone["users_cut:plain"], found[0])
    assert all("data set" in rank["other_users:plain"]["error"] for rank in two)


def test_ranks_that_could_take_batches_of_different_size_take_the_smallest(two):
    assert [rank["uneven:ddp"] for rank in two] == [rank["cut:ddp"] for rank in two]


def test_sums_are_laid_out_alike_on_every_rank(problem, monkeypatch):
    # On a GPU noise is drawn by place in memory: another order of axes would get other noise.
    private = problem().private
    ranks = Ranks(rank=0, size=2)
    monkeypatch.setattr(Ranks, "add", lambda *_: None)
    total = ClippedSum.zeros(private._model)
    for name, value in total.sums.items():
        total.sums[name] = torch.randn(value.t().shape).t()
    before = {name: value.clone() for name, value in total.sums.items()}
    assert ranks.pay_and_add(total, 3, lambda: private._bill.pay(0))[1] == 3
    for name, value in total.sums.items():
        assert value.is_contiguous()
        assert torch.equal(value, before[name])


def test_noise_is_there_once_and_the_same_on_every_rank(two):
    """Peers, entry 20. Sum of squares against chi-squared; false-alarm probability 2e-6."""
    assert two[0]["noise:plain"]["gradients"] == two[1]["noise:plain"]["gradients"]
    noise = np.array(two[0]["noise:plain"]["gradients"]) / 0.5  # nothing is drawn: noise alone
    assert chi2.ppf(5e-7, noise.size) < (noise**2).sum() < chi2.isf(5e-7, noise.size)
    tail = 5e-7 / noise.shape[1]
    per_coordinate = (noise**2).sum(0)
    assert (per_coordinate > chi2.ppf(tail, len(noise))).all()
    assert (per_coordinate < chi2.isf(tail, len(noise))).all()


def test_every_rank_hears_that_the_budget_is_spent(two):
    assert [rank["refused:plain"] for rank in two] == [{"refused": True, "unchanged": True}] * 2


def test_ranks_with_other_records_are_refused_though_there_are_as_many(two):
    for rank in two:
        assert "data set must be the same on every rank" in rank["shuffled:plain"]["error"]


def test_mixing_that_one_rank_finds_ends_all_of_them(two):
    first, last = (rank["mixing:plain"]["error"] for rank in two)
    assert "another rank refused the program" in first
    assert "at mean" in last


def test_lost_steps_of_a_sharded_run_are_paid_once_with_one_fresh_key(two):
    one, other = (rank["restarted:fsdp"] for rank in two)
    assert "They are paid" in one["reasons"][0]
    assert (one.pop("entries"), other.pop("entries"), other.pop("reasons")) == (2, 0, [])
    assert one.pop("reasons")
    assert one == other
    assert one["is_fresh"]
    assert one["repaid"]


def test_ranks_take_equal_steps_though_some_draw_nothing(two):
    """Peers, entry 9: a rank that skips an empty batch leaves the others waiting."""
    assert [rank["tiny:plain"]["steps"] for rank in two] == [40, 40]
    assert two[0]["tiny:plain"] == two[1]["tiny:plain"]


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_correlated_noise_is_one_stream_over_two_ranks(alone, two, kind):
    assert two[0][f"banded:{kind}"] == two[1][f"banded:{kind}"]
    agree(alone["banded:plain"], two[0][f"banded:{kind}"])


@pytest.mark.slow
def test_correlated_noise_and_users_agree_over_three_ranks(tmp_path, alone):
    jobs = ("banded:plain", "banded:ddp", "users:plain", "users_cut:ddp")
    ranks = launch(tmp_path, 3, *jobs)
    for job in jobs:
        assert all(rank[job] == ranks[0][job] for rank in ranks)
        agree(alone[job.split(":")[0] + ":plain"], ranks[0][job])


@pytest.mark.slow
def test_four_ranks_take_equal_steps_though_most_draw_nothing(tmp_path):
    """Peers, entry 9."""
    results = launch(tmp_path, 4, "tiny:plain")  # a draw in ten steps, by one of four ranks
    assert [result["tiny:plain"]["steps"] for result in results] == [40] * 4
    assert all(result == results[0] for result in results)


@pytest.mark.slow
def test_the_rest_agrees_over_ranks(tmp_path, alone):
    jobs = [
        "noise:fsdp",
        "adaptive:plain",
        "fresh:plain",
        "fresh:ddp",
        "ledger:plain",
        "different:plain",
    ]
    ranks = launch(tmp_path, 2, *jobs)
    noise = np.array(ranks[0]["noise:fsdp"]["gradients"]) / 0.5
    assert chi2.ppf(5e-7, noise.size) < (noise**2).sum() < chi2.isf(5e-7, noise.size)
    half = noise.shape[1] // 2
    correlation = (noise[:, :half] * noise[:, half : 2 * half]).mean() * np.sqrt(half * len(noise))
    assert abs(correlation) < 5.0  # shards are independent; false-alarm probability 6e-7
    agree(alone["adaptive:plain"], ranks[1]["adaptive:plain"])
    assert ranks[0]["fresh:plain"] == ranks[1]["fresh:plain"]  # a fresh key is shared
    assert ranks[0]["fresh:plain"]["gradients"] != ranks[0]["fresh:ddp"]["gradients"]
    assert [rank["ledger:plain"] for rank in ranks] == [{"entries": 1}] * 2
    for rank in ranks:
        assert "model at the start must be the same" in rank["different:plain"]["error"]
