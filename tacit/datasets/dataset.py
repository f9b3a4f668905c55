"""The type that every loader of a data set returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, repr=False)
class PersonRows:
    """Whose record each training row is, where persons may have several rows. Private.

    `most` is the largest number of rows of one person: others were left out. `sampled` says what
    training samples independently, "persons" or "records".
    """

    ids: tuple[str, ...]
    most: int
    sampled: str


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
    n_records: int = -1
    """Public number of training records; default the number of rows of `x_train`."""
    n_held_out: int = -1
    """Public number of test records; default the number of rows of `x_test`."""
    is_test_public: bool = True
    """Whether the test records are public, so that exact scores on them may be released."""
    flags: Mapping[str, np.ndarray] = field(default_factory=dict)
    """For a private table: which of its records have a value that the schema does not describe, by
    column. Private."""
    unit: str = "record"
    """What one record stands for: the unit of privacy."""
    persons: PersonRows | None = None
    """Whose record each training row is, if `unit` is a person who may have several rows; then
    `n_records` and `n_held_out` count what `persons.sampled` says."""

    def __post_init__(self) -> None:
        if self.n_records < 0:
            object.__setattr__(self, "n_records", len(self.x_train))
        if self.n_held_out < 0:
            object.__setattr__(self, "n_held_out", len(self.x_test))
        for part, x, y in (
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ):
            if len(x) != len(y):
                raise ValueError(f"{part} x and y must have equal lengths, got {len(x)}, {len(y)}.")

    @property
    def counted(self) -> str:
        """What `n_records` counts, as a word."""
        is_by_record = self.persons is not None and self.persons.sampled == "records"
        return "record" if is_by_record else self.unit

    @property
    def records_per_person(self) -> int:
        """Most records of one unit of privacy in this data set."""
        return 1 if self.persons is None else self.persons.most

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, train {(self.n_records, *self.x_train.shape[1:])}, "
            f"test {(self.n_held_out, *self.x_test.shape[1:])}, classes {self.n_classes})"
        )
