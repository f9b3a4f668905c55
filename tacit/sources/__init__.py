"""Statistics where the rows are: DuckDB, PostgreSQL, Dask, Spark, polars, and files in chunks.

`fit_linear`, `fit_logistic`, `moments`, `count_outside` and `count_votes` take the place of a table
(`open_table` lists the kinds), let its engine add up integers on a public grid, and add noise once,
here, after the ledger has been paid. Every engine gives exactly the same sums.
"""

from tacit._lazy import lazy

_HOMES = {
    "PartialMoments": "second_moments",
    "fit_linear": "second_moments",
    "fit_logistic": "second_moments",
    "moments": "second_moments",
    "open_table": "places",
}
__all__ = ["PartialMoments", "fit_linear", "fit_logistic", "moments", "open_table"]

__getattr__ = lazy(__name__, _HOMES)
