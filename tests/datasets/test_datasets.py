"""Loaders: right shapes, clear errors, and nothing learned from the values."""

import gzip
import hashlib
import struct

import numpy as np
import pandas as pd
import pytest

from tacit import datasets
from tacit.datasets import Schema, images, read_chunks, read_idx, read_table
from tacit.datasets.images import _FILES

SCHEMA = """
target = "income"
[columns.age]
lower = 18
upper = 90
[columns.state]
categories = ["GA", "NY"]
[columns.income]
categories = ["low", "high"]
[[derived]]
name = "is_senior"
column = "age"
at_least = 65
"""


def write_idx(path, array):
    header = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_small_set(folder):
    for file in _FILES:
        shape = (4, 28, 28) if "images" in file else (4,)
        write_idx(folder / f"{file}-ubyte.gz", np.ones(shape))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(
        "age,state,income,secret\n10,GA,low,1\n200,NY,high,2\n54,TX,low,3\n,GA,odd,4\n70,NY,high,5\n"
    )
    return path


def test_digits_are_embedded_and_scaled_to_the_unit_interval():
    digits = datasets.load("digits")
    assert digits.x_train.shape == (1438, 8, 8)
    assert len(digits.x_test) == 359
    assert digits.x_train.min() == 0
    assert digits.x_train.max() == 1
    assert "x_train" not in repr(digits)


def test_mnist_reads_from_the_folder(shared_data):
    mnist = datasets.load("mnist", data=shared_data)
    assert mnist.x_train.shape == (60_000, 28, 28)
    assert np.bincount(mnist.y_test).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="digits, mnist, fashion-mnist"):
        datasets.load("cifar")


def test_a_folder_without_the_files_says_which_are_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="train-images-idx3"):
        datasets.load("mnist", data=tmp_path)


def test_small_idx_files_make_a_data_set(tmp_path):
    write_small_set(tmp_path)
    assert datasets.load("mnist", data=tmp_path).x_test.shape == (4, 28, 28)


@pytest.mark.parametrize("cut", [2, 6, -1])
def test_a_damaged_idx_file_is_named(tmp_path, cut):
    path = tmp_path / "train-labels-idx1-ubyte"
    content = b"\x00\x00\x08\x01" + struct.pack(">I", 3) + b"\x01\x02\x03"
    path.write_bytes(content[:cut])
    with pytest.raises(ValueError, match="train-labels"):
        read_idx(path)


def test_numbers_are_clipped_to_the_declared_bounds_and_scaled(table):
    x, y = next(read_chunks(table, Schema.parse(SCHEMA)))
    assert x[:, 0].tolist() == [-1.0, 1.0, 0.0, 0.0, pytest.approx(16 / 36)]
    assert x[:, 1:3].tolist() == [[1, 0], [0, 1], [0, 0], [1, 0], [0, 1]]
    assert x[:, 3].tolist() == [0, 1, 0, 0, 1]
    assert y.tolist() == [0, 1, 0, 0, 1]


def test_chunks_and_parquet_give_the_same_features(table, tmp_path):
    schema = Schema.parse(SCHEMA)
    whole = np.concatenate([x for x, _ in read_chunks(table, schema)])
    pieces = np.concatenate([x for x, _ in read_chunks(table, schema, rows=2)])
    pd.read_csv(table).to_parquet(tmp_path / "people.parquet")
    parquet = np.concatenate([x for x, _ in read_chunks(tmp_path / "people.parquet", schema)])
    assert np.array_equal(whole, pieces)
    assert np.array_equal(whole, parquet)


def test_the_split_does_not_depend_on_values(table):
    schema = Schema.parse(SCHEMA)
    first = read_table(table, schema, test_share=0.4)
    assert len(first.x_test) == 2
    assert first.feature_names == ("age", "state=GA", "state=NY", "is_senior")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = 'a'", "at least one"),
        ("target = 'a'\n[columns.b]\nlower=0\nupper=1", "declared columns"),
        ("target = 'b'\n[columns.b]\nlower=0", "lower and upper, or categories"),
        ("target = 'b'\n[columns.b]\nlower=1\nupper=1", "lower < upper"),
        ("target = 'b'\n[columns.b]\nlower=0\nupper=1\nscale=2", "cannot be read"),
        ("target = 'b'\nother=1\n[columns.b]\nlower=0\nupper=1", "no other"),
        (
            "target = 'b'\n[columns.b]\nlower=0\nupper=1\n[[derived]]\nname='c'",
            "'product'",
        ),
    ],
)
def test_a_wrong_schema_says_what_to_write(text, message):
    with pytest.raises(ValueError, match=message):
        Schema.parse(text)


def test_a_missing_column_is_an_error_that_shows_no_value(table):
    schema = Schema.parse("target='wealth'\n[columns.wealth]\nlower=0\nupper=1")
    with pytest.raises(ValueError, match="does not fit the schema"):
        list(read_chunks(table, schema))


def test_a_threshold_makes_two_classes_and_a_missing_number_is_below(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,income\n1,5\n2,\n3,9\n4,7\n")
    schema = datasets.Schema.parse(
        'target = "income"\n[columns.income]\nat_least = 7\n[columns.x]\nlower = 0\nupper = 4\n'
    )
    assert schema.n_classes == 2
    ((_, y),) = datasets.read_chunks(path, schema)
    assert y.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="one of the three"):
        datasets.Schema.parse('target = "a"\n[columns.a]\nat_least = 7\nlower = 0\nupper = 9\n')


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A web that serves tiny idx files under the addresses of MNIST; the list of what was asked."""
    monkeypatch.delenv("TACIT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = tmp_path / "served"
    served.mkdir()
    write_small_set(served)
    asked = []

    def urlopen(address, timeout):
        asked.append(address)
        return (served / address.rpartition("/")[2]).open("rb")

    monkeypatch.setattr(images.urllib.request, "urlopen", urlopen)
    sums = [hashlib.sha256((served / f"{file}-ubyte.gz").read_bytes()) for file in _FILES]
    monkeypatch.setitem(images._SHA256, "mnist", tuple(s.hexdigest() for s in sums))
    return asked


def test_a_set_is_downloaded_once(web):
    first, second = datasets.load("mnist"), datasets.load("mnist")
    assert len(web) == 4
    np.testing.assert_array_equal(first.x_train, second.x_train)


def test_a_download_with_another_checksum_is_not_kept(web, monkeypatch, tmp_path):
    monkeypatch.setitem(images._SHA256, "mnist", ("0" * 64,) * 4)
    with pytest.raises(ValueError, match="another checksum"):
        datasets.load("mnist")
    assert not list((tmp_path / "cache").rglob("*ubyte*"))


def test_without_a_network_the_way_out_is_named(web, monkeypatch):
    def refuse(address, timeout):
        raise OSError("no route to host")

    monkeypatch.setattr(images.urllib.request, "urlopen", refuse)
    with pytest.raises(FileNotFoundError, match="Set TACIT_DATA"):
        datasets.load("mnist")


ALONE = """
target = "married"
[columns.age]
lower = 0
upper = 100
[columns.zip]
categories = ["01", "02"]
[columns.veteran]
lower = 0
upper = 1
[columns.married]
categories = ["0", "1"]
"""
PEOPLE = "age,zip,veteran,married\n20,01,True,0\n30.5,02,False,1\n40,01,True,1\n"


@pytest.mark.parametrize(
    "added", ["50,02,True,", ",,,", "x,y,z,w", "1e3,1.5,2,1.0", "-1,01,true,01"]
)
def test_one_row_changes_nothing_about_how_the_others_are_read(tmp_path, added):
    schema, path = Schema.parse(ALONE), tmp_path / "people.csv"
    path.write_text(PEOPLE)
    ((x, y),) = read_chunks(path, schema)
    assert x[:, 1:3].tolist() == [[1, 0], [0, 1], [1, 0]]
    assert x[:, 3].tolist() == [1, -1, 1]
    assert y.tolist() == [0, 1, 1]
    path.write_text(PEOPLE + added + "\n")
    ((more_x, more_y),) = read_chunks(path, schema)
    np.testing.assert_array_equal(more_x[:3], x)
    np.testing.assert_array_equal(more_y[:3], y)


def test_a_missing_value_in_parquet_changes_no_other_row(tmp_path):
    schema = Schema.parse(ALONE.replace('["01", "02"]', '["1", "2"]'))
    rows = {"age": [20, 30], "zip": [1, 2], "veteran": [True, False], "married": [0, 1]}
    found = []
    for name, last in (("whole", 1), ("gap", None)):
        table = {
            column: pd.array([*values, None if last is None else type(values[0])(last)])
            for column, values in rows.items()
        }
        pd.DataFrame(table).to_parquet(tmp_path / f"{name}.parquet")
        ((x, y),) = read_chunks(tmp_path / f"{name}.parquet", schema)
        found.append((x[:2].tolist(), y[:2].tolist()))
    assert found[0] == found[1]
    assert found[0][1] == [0, 1]
