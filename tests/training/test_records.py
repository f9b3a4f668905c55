"""Access to the private records."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from tacit.training.lots.records import Records

CPU = torch.device("cpu")


class Squares(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return {"x": torch.tensor(float(i)), "y": i**2}


def test_fast_paths_equal_collating_record_by_record():
    x, y = torch.randn(20, 3), torch.arange(20)
    rows = np.array([3, 5, 19])
    data = TensorDataset(x, y)
    slow = Records(data, collate_fn=torch.utils.data.default_collate, device=CPU).fetch(rows)
    for fast in (data, (x, y), Subset(data, range(20))):
        found = Records(fast, collate_fn=None, device=CPU).fetch(rows)
        assert all(map(torch.equal, found, slow))
    subset = Subset(Squares(), [9, 8, 7])
    assert Records(subset, collate_fn=None, device=CPU).fetch(np.array([2]))["x"].tolist() == [7.0]


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (DataLoader(TensorDataset(torch.zeros(3)), shuffle=True), "loader.dataset"),
        (
            type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(())})(),
            "random access",
        ),
        (7, "__getitem__"),
    ],
)
def test_data_without_random_access_is_refused(data, advice):
    with pytest.raises(TypeError, match=advice):
        Records(data, collate_fn=None, device=CPU)


def test_arrays_and_tables_are_data_sets():
    pandas = pytest.importorskip("pandas")
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20, dtype=np.uint16)
    table = pandas.DataFrame(x, columns=["a", "b", "c"]).assign(y=y)
    rows = np.array([3, 19])

    def fetch(dataset):
        return Records(dataset, collate_fn=None, device=CPU).fetch(rows)

    for pair in (
        (x[::-1][::-1], y),
        (table[["a", "b", "c"]], table["y"]),
        (torch.tensor(x).float(), y),
    ):
        found = fetch(pair)
        assert found[0].dtype == torch.float32
        assert torch.allclose(found[0], torch.tensor(x[rows]).float())
        assert found[1].tolist() == [3, 19]
    batch = fetch(table)
    assert batch["y"].tolist() == [3, 19]
    assert batch["a"].dtype == torch.float32
    with pytest.raises(TypeError, match=r"column name .* must hold numbers"):
        fetch(table.assign(name="x"))
    with pytest.raises(ValueError, match="lengths differ"):
        fetch((x, y[:-1]))
