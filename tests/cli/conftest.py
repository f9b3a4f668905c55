"""A recipe that trains within a second, and a table of people."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

RECIPE = """
name = "quick"
[training]
batch_size = 360
epochs = 1
[run]
seed = 1
baseline_steps = 20
"""


SCHEMA = """
target = "wage"
[columns.age]
lower = 20
upper = 60
[columns.region]
categories = ["north", "south", "west"]
[columns.wage]
lower = 0
upper = 100
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "quick.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def people():
    """A function that makes a table of people: wage = 10 + age, plus 15 in the south."""
    return _people


def _people(rows: int, low: float = 20, high: float = 60, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.uniform(low, high, rows)
    region = rng.choice(["north", "south", "west"], rows)
    wage = 10 + age + 15 * (region == "south") + rng.normal(0, 1, rows)
    return pd.DataFrame({"age": age, "region": region, "wage": wage, "id": np.arange(rows)})


@pytest.fixture
def folder(tmp_path: Path, people) -> Path:
    """A folder with a table of people, and a schema for their wages as numbers or classes."""
    (tmp_path / "wage.toml").write_text(SCHEMA)
    categories = SCHEMA.replace("lower = 0\nupper = 100", 'categories = ["low", "high"]')
    (tmp_path / "class.toml").write_text(categories)
    frame = people(30_000)
    frame.to_csv(tmp_path / "people.csv", index=False)
    frame.assign(wage=np.where(frame.wage > 50, "high", "low")).to_csv(
        tmp_path / "classes.csv", index=False
    )
    return tmp_path
