"""Train a student on the noisy votes of teachers that share no record.

    python examples/pate_student.py

scikit-learn's digits: the training records are private, the test inputs public. Fifty teachers
learn from disjoint parts; forty public inputs are labeled by the winner of their noisy votes; the
student learns from those labels and from all public inputs. Few records allow few teachers, and few
teachers cannot outvote much noise, so epsilon is high on so little data.
"""

from tacit import Budget, Ledger, datasets
from tacit.pate import GNMax, KernelTeacher, PATEClassifier

DELTA = 1e-5


def main() -> None:
    data = datasets.load("digits")
    x, test = (part.reshape(len(part), -1) for part in (data.x_train, data.x_test))
    ledger = Ledger(budget=Budget(epsilon=6.0, delta=DELTA))
    model = PATEClassifier(
        KernelTeacher(),  # or any scikit-learn classifier
        n_teachers=50,
        aggregator=GNMax(10.0),  # noise on every count, in votes
        n_queries=40,
        classes=range(10),
        ledger=ledger,
    )
    public, held_out = test[:240], test[240:]  # the student may see the first, without labels
    model.fit(x, data.y_train, public)
    print(f"{model.n_answered_} of 40 queries answered")
    print(f"accuracy {model.score(held_out, data.y_test[240:]):.2f} on held-out inputs")
    print(f"epsilon {ledger.epsilon(delta=DELTA):.2f} at delta {DELTA:g}, for any data")


if __name__ == "__main__":
    main()
