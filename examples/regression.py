"""Linear, logistic and transfer regression under differential privacy, with one ledger.

    python examples/regression.py

The first two models are fitted to a large town. The third is for a small town with one age group
only: two other towns show how wages continue with age, and a third has different wages. The bounds
are public knowledge: ages from 20 to 60, wages below 100.
"""

import numpy as np

import tacit
from tacit.accounting import GDP
from tacit.regression import Bounds, LinearRegression, LogisticRegression, TransferRegression

DELTA = 1e-6
BOUNDS = {"bounds": Bounds([20, 0], [60, 1]), "target_bounds": Bounds(0, 100)}


def town(
    people: int, ages: tuple[int, int], slope: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return age and diploma (0 or 1) of each person, and the wage."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.uniform(*ages, people), rng.integers(0, 2, people)])
    return X, 10 + slope * X[:, 0] + 15 * X[:, 1] + rng.normal(0, 5, people)


def main() -> None:
    X, wages = town(20_000, (20, 60), slope=1.0, seed=0)
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1.5, delta=2 * DELTA))
    budget = {"epsilon": 0.5, "delta": DELTA, "ledger": ledger}
    linear = LinearRegression(**budget, **BOUNDS).fit(X, wages)
    print(f"wage = {linear.intercept_:.1f} + {linear.coef_[0]:.2f} age + {linear.coef_[1]:.1f}"
          f" diploma  ({linear.method_})")  # fmt: skip
    logistic = LogisticRegression(**budget, bounds=BOUNDS["bounds"]).fit(X, wages > 60)
    young, old = logistic.predict_proba([[25, 1], [55, 1]])[:, 1]
    print(f"wage above 60, with a diploma: {young:.0%} at 25, {old:.0%} at 55")
    spent = ledger.epsilon(delta=DELTA, accountant=GDP())  # both fits were fixed in advance
    print(f"both cost epsilon {spent:.3f} at delta {DELTA:g}")

    small = town(2000, (20, 25), slope=1.0, seed=1)
    others = [town(20_000, (20, 60), slope, seed) for seed, slope in ((2, 1.0), (3, 1.0), (4, 0.2))]
    alone = TransferRegression(epsilon=1.0, delta=DELTA, **BOUNDS).fit(*small)
    helped = TransferRegression(epsilon=1.0, delta=DELTA, **BOUNDS).fit(*small, sources=others)
    without, with_help = (model.predict([[60, 1]])[0] for model in (alone, helped))
    print(f"at 60 with a diploma (85 in truth): {without:.0f} alone, {with_help:.0f} with towns "
          f"{helped.informative_}")  # fmt: skip


if __name__ == "__main__":
    main()
