"""Statistics where the rows are: DuckDB, PostgreSQL, Dask, Spark, polars, and files in chunks.

`fit_linear`, `fit_logistic`, `describe`, `count_outside` and `count_votes` take the place of a
table (`open_table` lists the kinds), let its engine add up integers on a public grid, and add noise
once, here, after the ledger has been paid. Every engine gives exactly the same sums.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy

if TYPE_CHECKING:
    from tacit.sources.addresses import as_place, is_database, name_of, require_rows
    from tacit.sources.grid_encoding import require_bound
    from tacit.sources.places import open_table
    from tacit.sources.second_moments import PartialMoments, fit_linear, fit_logistic, moments
    from tacit.sources.table_counts import (
        count_outside,
        count_votes,
        describe,
        flag_counts,
        tallies,
    )

_COUNTS = ("count_outside", "count_votes", "describe")
_HOMES = {
    "PartialMoments": "second_moments",
    "as_place": "addresses",
    "fit_linear": "second_moments",
    "fit_logistic": "second_moments",
    "flag_counts": "table_counts",
    "is_database": "addresses",
    "moments": "second_moments",
    "name_of": "addresses",
    "open_table": "places",
    "require_bound": "grid_encoding",
    "require_rows": "addresses",
    "tallies": "table_counts",
    **dict.fromkeys(_COUNTS, "table_counts"),
}
__all__ = [
    "PartialMoments",
    "as_place",
    "count_outside",
    "count_votes",
    "describe",
    "fit_linear",
    "fit_logistic",
    "flag_counts",
    "is_database",
    "moments",
    "name_of",
    "open_table",
    "require_bound",
    "require_rows",
    "tallies",
]

__getattr__ = lazy(__name__, _HOMES)
