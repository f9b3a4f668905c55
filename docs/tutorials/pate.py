# %% [markdown]
# # PATE: teachers vote, a student learns
#
# Each teacher learns from records that no other teacher has. One record changes one vote at most,
# so noise on the votes hides it. The student sees the winners for public inputs, and nothing
# else.

# %%
import numpy as np
from sklearn.naive_bayes import GaussianNB

import tacit
from tacit.pate import PATEClassifier

rng = np.random.default_rng(0)
centers = 4 * np.eye(3, 5)
y = rng.integers(0, 3, 9_000)
X = centers[y] + rng.normal(size=(9_000, 5))
public = centers[rng.integers(0, 3, 400)] + rng.normal(size=(400, 5))

# %%
ledger = tacit.Ledger(budget=tacit.Budget(epsilon=2.0, delta=1e-5))
model = PATEClassifier(
    GaussianNB(), epsilon=2.0, delta=1e-5, n_teachers=150, classes=range(3), ledger=ledger
)
model.fit(X, y, public)
print(f"{len(model.queries_)} public inputs were labeled; accuracy {model.score(X, y):.3f}")
print(f"paid: epsilon {ledger.epsilon(delta=1e-5):.2f}")
