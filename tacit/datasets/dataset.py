"""The type that every loader of a data set returns."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Dataset:
    """Training and test arrays, with the facts about them that are assumed public.

    Rows are records, the unit of privacy. `public` lists in words what is assumed public, such as
    sizes, bounds and categories. The arrays are private; the `repr` shows only their shapes.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    n_classes: int | None
    feature_names: tuple[str, ...] = ()
    public: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for part, x, y in (
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ):
            if len(x) != len(y):
                raise ValueError(f"{part} x and y must have equal lengths, got {len(x)}, {len(y)}.")

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, train {self.x_train.shape}, test {self.x_test.shape}, "
            f"classes {self.n_classes})"
        )
