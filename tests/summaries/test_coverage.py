"""Intervals of every statistic contain the truth as often as they say (1,000 tables each)."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(FOLDER))  # the script imports its neighbor _results
    try:
        spec = importlib.util.spec_from_file_location(
            "summaries_benchmark", FOLDER / "summaries.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_coverage_is_at_least_93_percent_and_widths_at_most_1_3(benchmark, epsilon):
    # At a true coverage of 95 %, one row falls below 93 % with probability 0.3 %.
    for case in benchmark.cases():
        coverage, width = benchmark.simulate(case, epsilon, 1000)
        assert coverage >= 0.93, case.name
        assert width <= 1.3 * case.width(epsilon), case.name


def test_coverage_on_fewer_tables(benchmark):
    # Twenty tables: fewer than 14 hits of 20 at 95 % have probability below 1e-5.
    for case in benchmark.cases(200_000):
        if case.name in ("mean", "variance", "quantile 0.5 of income", "R2", "AUC"):
            coverage, _ = benchmark.simulate(case, 1.0, 20)
            assert coverage >= 14 / 20, case.name
