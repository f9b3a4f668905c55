# %% [markdown]
# # From your own CSV to a prediction
#
# You have a table of people. You want a model that may leave the house. Nothing is learned from the
# table before it is paid for, so you declare what its columns may hold.

# %%
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import tacit
from tacit.datasets import Schema
from tacit.regression import LogisticRegression
from tacit.summaries import describe

folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
n = 20_000
age = rng.integers(18, 90, n)
hours = np.clip(rng.normal(38, 12, n), 0, 80).round()
degree = rng.choice(["none", "school", "college"], n, p=[0.2, 0.5, 0.3])
odds = -6 + 0.05 * age + 0.05 * hours + 1.5 * (degree == "college")
owner = np.where(rng.random(n) < 1 / (1 + np.exp(-odds)), "yes", "no")
people = pd.DataFrame({"age": age, "hours": hours, "degree": degree, "owner": owner})
people.to_csv(folder / "people.csv", index=False)
people.head()

# %% [markdown]
# **Declare.** Bounds and categories come from what everybody knows (a codebook, a law), not from
# the table. **Budget.** A ledger holds what may be spent on this table, ever.

# %%
schema = Schema({"age": [18, 95], "hours": [0, 80], "degree": ["none", "school", "college"]})
ledger = tacit.Ledger(folder / "people.ledger", budget=tacit.Budget(epsilon=3.0, delta=1e-6))

# %% [markdown]
# **Look.** Statistics with intervals, for half of an epsilon.

# %%
table = {"age": (18, 95), "hours": (0, 80), "degree": ["none", "school", "college"]}
found = describe(people, table, epsilon=0.5, ledger=ledger)
for statistic in found:
    print(statistic)

# %% [markdown]
# **Fit.** A logistic regression. `summary()` reads like that of statsmodels: its standard errors
# count the sampling and the noise.

# %%
X = schema.fit_transform(people)
model = LogisticRegression(epsilon=1.0, delta=1e-6, bounds=schema.bounds, ledger=ledger)
model.fit(X, people["owner"])
print(model.summary())

# %% [markdown]
# **Predict.** New rows, the same declarations.

# %%
new = pd.DataFrame({"age": [25, 60], "hours": [20, 45], "degree": ["school", "college"]})
print(model.predict(schema.transform(new)))

# %% [markdown]
# **What is left.**

# %%
print(ledger.remaining())
for entry in ledger.history():
    print(entry.note)
