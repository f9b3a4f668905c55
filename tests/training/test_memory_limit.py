"""The rows that are on a device at once follow from its memory."""

import torch

from tacit.training import memory_limit
from tacit.training.memory_limit import starting_limit, usual_lot

CPU = torch.device("cpu")


def test_the_starting_limit_follows_memory_and_lot():
    assert starting_limit(1, CPU, largest_lot=300) == 300
    assert starting_limit(2**34, CPU, largest_lot=300) == 1
    few = starting_limit(2**22, CPU, largest_lot=10**6)
    assert 1 <= few <= 64


def test_lots_above_the_usual_are_rare():
    assert usual_lot(600, deviations=6.0) == 752
    assert usual_lot(256, deviations=2.0) == 288
    assert usual_lot(0.01, deviations=6.0) == 8


def test_the_measured_limit_follows_what_the_tests_needed(monkeypatch):
    gigabyte = 2**30
    found = memory_limit.GPUBytes(used=2 * gigabyte, kept=12 * gigabyte, free=30 * gigabyte)
    monkeypatch.setattr(memory_limit, "gpu_bytes", lambda _: found)
    # 10 rows needed 10 GB, and 40 GB can be had, of which a fifth stays free.
    assert memory_limit.measured_limit(10, 2 * gigabyte, CPU, largest_lot=100) == 32
    assert memory_limit.measured_limit(10, 2 * gigabyte, CPU, largest_lot=20) == 20
    assert memory_limit.measured_limit(1, 12 * gigabyte, CPU, largest_lot=20) == 20
