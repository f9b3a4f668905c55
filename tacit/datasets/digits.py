"""Handwritten digits, 8 x 8, embedded in scikit-learn: the data set that needs no network."""

import numpy as np

from tacit.datasets._types import Dataset

_TEST_SHARE = 0.2


def digits() -> Dataset:
    """1,797 digits of the UCI optical recognition set, scaled to [0, 1], split 80/20.

    The split is a fixed permutation of the row numbers, so it depends on no value.
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = (np.asarray(pixels) / 16.0).astype(np.float32).reshape(-1, 8, 8)  # values are 0..16
    labels = np.asarray(classes, np.int64)
    order = np.random.default_rng(20160701).permutation(len(images))
    n_test = round(_TEST_SHARE * len(images))
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
