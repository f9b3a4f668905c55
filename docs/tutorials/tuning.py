# %% [markdown]
# # Tune privately
#
# Keeping the best of several runs leaks through the choice. A private search pays for everything:
# all runs, their scores, and the choice.

# %%
import numpy as np

import tacit
from tacit.regression import Bounds, LogisticRegression
from tacit.tuning import PrivateSearch

rng = np.random.default_rng(0)
X = rng.uniform(-1, 1, (8_000, 6))
y = X @ [3, -2, 1, 0, 0, 0] + rng.normal(size=8_000) > 0

ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1.0, delta=1e-6))
search = PrivateSearch(
    LogisticRegression(bounds=Bounds(-1, 1)),
    {"method": ["gradient", "descent", "objective"]},
    epsilon=1.0,
    delta=1e-6,
    ledger=ledger,
)
search.fit(X, y)
print(search.plan_.describe())

# %%
print(search.best_params_, f"score {search.best_score_:.3f}")
print(f"{len(ledger.history())} entry in the ledger")
