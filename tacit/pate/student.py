"""A student that learns from few labels and many unlabeled public inputs; choice of its queries.

Everything here uses public inputs and released labels only. It is post-processing and costs no
privacy. The student learns in two stages: labels spread along a graph of nearest neighbors to all
public inputs, then a kernel ridge classifier is trained on the spread labels, so that it can
classify new inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve
from scipy.sparse import csr_matrix, diags_array

from tacit._arrays import Indices
from tacit._check import in_open_unit, positive, whole
from tacit.mechanisms import Seed, generator
from tacit.pate.teachers import Rows, as_rows, kernel, kernel_gamma, squared_distances
from tacit.pate.votes import check_finite

_CHUNK = 1000  # rows of a distance matrix held at once


@dataclass(kw_only=True, eq=False)
class SpreadStudent:
    """Classifier trained on inputs of which few have a label; -1 (`NO_ANSWER`) marks the rest.

    First, labels spread to similar inputs (Zhou et al. 2004) along a graph of `n_neighbors` nearest
    neighbors with local scaling (Zelnik-Manor & Perona 2004); the total weight of each class is
    made equal (Zhu et al. 2003). A label is dropped before if all other labels, spread to its
    input, favor another class, because it may come from noise. Then kernel ridge regression learns
    the spread labels, with `n_landmarks` random inputs as centers of a Gaussian kernel whose width
    is `width` times the median distance.

    `spread` in (0, 1) is the share of its weight that a label passes on at each step, so a label
    travels about 1 / (1 - spread) steps. By default this is the number of inputs / 90, at least 10
    and at most 100.

    Use features in which similar inputs are near each other: distances are not rescaled.
    """

    n_neighbors: int = 7
    spread: float | None = None
    n_landmarks: int = 2000
    width: float = 0.7
    ridge: float = 0.1
    seed: int = 0

    def fit(self, X: ArrayLike, y: ArrayLike) -> "SpreadStudent":
        """Train on all rows of `X`; `y` holds a class number for each row, -1 if unknown."""
        rows, labels = _public(X), np.asarray(y)
        if labels.shape != (len(rows),):
            raise ValueError(f"y must hold one label for each of {len(rows)} inputs.")
        known = np.flatnonzero(labels >= 0)
        if not len(known):
            raise ValueError("y holds no label: nothing was answered. Spend more, or ask more.")
        self.classes_ = np.unique(labels[known])
        onehot = (labels[known, None] == self.classes_).astype(np.float32)
        self.spread_labels_ = self._spread_labels(rows, known, onehot)
        reached = self.spread_labels_ >= 0
        self._fit_ridge(rows[reached], self.spread_labels_[reached])
        return self

    def decision_function(self, X: ArrayLike) -> Rows:
        """Return the score of each class for each input: (inputs, classes)."""
        rows = _public(X)
        parts = [
            kernel(rows[i : i + _CHUNK], self._landmarks, self._gamma) @ self._weights
            for i in range(0, len(rows), _CHUNK)
        ]
        return np.concatenate(parts) if parts else np.empty((0, len(self.classes_)), np.float32)

    def predict(self, X: ArrayLike) -> Indices:
        """Return the class of each input."""
        return self.classes_[self.decision_function(X).argmax(axis=1)]

    def predict_proba(self, X: ArrayLike) -> Rows:
        """Return scores clipped to [0, 1] and scaled to add up to 1: an uncalibrated confidence."""
        scores = np.clip(self.decision_function(X), 1e-3, 1.0)
        return scores / scores.sum(axis=1, keepdims=True)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `predict` needs, for saving; all are public."""
        return {
            "classes": self.classes_,
            "landmarks": self._landmarks,
            "weights": self._weights,
            "gamma": np.array(self._gamma),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "SpreadStudent":
        """Return a fitted student from the `arrays` that its `to_arrays` returned."""
        student = cls()
        student.classes_ = np.asarray(arrays["classes"])
        student._landmarks = arrays["landmarks"]
        student._weights = arrays["weights"]
        student._gamma = float(arrays["gamma"])
        return student

    def _spread_labels(self, rows: Rows, known: NDArray[Any], onehot: Rows) -> Indices:
        """Return a class index for every input of `rows`; -1 where no label arrives.

        `known` lists the labeled inputs, and `onehot` their classes as rows with a single 1.
        """
        spread = 1 - 1 / np.clip(len(rows) / 90, 10, 100) if self.spread is None else self.spread
        in_open_unit(spread=spread)
        graph = _neighbor_graph(rows, whole(n_neighbors=self.n_neighbors, least=1))
        reach = _diffuse(graph, len(rows), known, spread)  # (inputs, labels)
        # The weight of the other labels at a label's own input decides whether it is believed.
        others = reach[known].copy()
        np.fill_diagonal(others, 0.0)
        rival = (others @ onehot / np.maximum(onehot.sum(axis=0), 1)).argmax(axis=1)
        has_rival = others.sum(axis=1) > 0
        own = onehot.argmax(axis=1)
        is_last_of_class = onehot.sum(axis=0)[own] == 1
        believed = ~has_rival | (rival == own) | is_last_of_class
        scores = reach[:, believed] @ onehot[believed]
        chosen = (scores / np.maximum(scores.sum(axis=0), 1e-30)).argmax(axis=1)
        return np.where(scores.sum(axis=1) > 0, chosen, -1)

    def _fit_ridge(self, rows: Rows, index: Indices) -> None:
        positive(ridge=self.ridge)
        random = np.random.default_rng(self.seed)
        size = min(whole(n_landmarks=self.n_landmarks, least=1), len(rows))
        self._landmarks = rows[random.choice(len(rows), size, replace=False)]
        sample = rows[random.choice(len(rows), min(500, len(rows)), replace=False)]
        self._gamma = kernel_gamma(sample, self._landmarks, self.width)
        inner = self.ridge * kernel(self._landmarks, self._landmarks, self._gamma).astype(float)
        moment = np.zeros((size, len(self.classes_)))
        target = np.eye(len(self.classes_))[index]
        for start in range(0, len(rows), _CHUNK):
            part = kernel(rows[start : start + _CHUNK], self._landmarks, self._gamma).astype(float)
            inner += part.T @ part
            moment += part.T @ target[start : start + _CHUNK]
        inner.flat[:: size + 1] += 1e-6 * np.trace(inner) / size
        self._weights = solve(inner, moment, assume_a="pos").astype(np.float32)


def spread_queries(X_public: ArrayLike, n_queries: int, *, rng: Seed = None) -> Indices:
    """Return the numbers of `n_queries` public inputs that represent all public inputs well.

    They are the inputs nearest to the centers of k-means clusters: typical inputs, on which
    teachers agree and which are similar to many others. Only public inputs are read.
    """
    from sklearn.cluster import KMeans

    rows = _public(X_public)
    n_queries = checked_queries(n_queries, len(rows))
    seed = int(generator(rng).integers(0, 2**31))
    clusters = KMeans(n_queries, n_init="auto", random_state=seed).fit(rows)
    cluster = np.asarray(clusters.labels_)
    distance = ((rows - clusters.cluster_centers_[cluster]) ** 2).sum(axis=1)
    order = np.lexsort((distance, cluster))
    _, first = np.unique(cluster[order], return_index=True)
    chosen = order[first]
    missing = n_queries - len(chosen)  # some clusters are empty if inputs repeat
    rest = np.setdiff1d(np.arange(len(rows)), chosen)[:missing]
    return np.concatenate([chosen, rest])


def checked_queries(n_queries: int, n_public: int) -> int:
    """Return `n_queries`; raise unless it is a whole number from 1 to `n_public`."""
    if whole(n_queries=n_queries, least=1) > n_public:
        raise ValueError(
            f"n_queries must be <= the number of public inputs, got {n_queries} for {n_public}."
        )
    return n_queries


def _public(X: ArrayLike) -> Rows:
    check_finite(X, "X_public")
    return as_rows(X)


def _neighbor_graph(rows: Rows, n_neighbors: int) -> csr_matrix:
    """Return the weights of a symmetric graph that links each row to its nearest neighbors.

    Each weight is divided by the square roots of the total weights of both its rows.
    """
    size = len(rows)
    k = min(n_neighbors, size - 1)
    near, far = np.empty((size, k + 1), np.int64), np.empty((size, k + 1), np.float32)
    for start in range(0, size, _CHUNK):
        squares = squared_distances(rows[start : start + _CHUNK], rows)
        own = np.arange(len(squares))
        squares[own, start + own] = -1.0  # an input is nearest to itself, also if copies exist
        best = np.argpartition(squares, k, axis=1)[:, : k + 1]
        near[start : start + _CHUNK] = best
        far[start : start + _CHUNK] = np.take_along_axis(squares, best, axis=1)
    scale = np.maximum(far.max(axis=1), 1e-12)
    source = np.repeat(np.arange(size), k + 1)
    target, squares = near.reshape(-1), far.reshape(-1)
    weight = np.exp(-np.maximum(squares, 0) / np.sqrt(scale[source] * scale[target]))
    keep = source != target
    graph = csr_matrix((weight[keep], (source[keep], target[keep])), shape=(size, size))
    graph = graph.maximum(graph.T)
    root = 1 / np.sqrt(np.maximum(np.asarray(graph.sum(axis=1)).reshape(-1), 1e-12))
    return csr_matrix(diags_array(root) @ graph @ diags_array(root))


def _diffuse(graph: csr_matrix, size: int, sources: NDArray[Any], spread: float) -> Rows:
    """Return how much weight reaches each input if one unit spreads from each source input.

    `sources` are numbers of inputs. The result, (inputs, sources), holds the columns `sources` of
    (1 - spread) (I - spread * graph)^-1, found by fixed-point iteration.
    """
    start = np.zeros((size, len(sources)), np.float32)
    start[sources, np.arange(len(sources))] = 1 - spread
    weight = start.copy()
    for _ in range(int(np.ceil(4 / (1 - spread)))):  # the terms left out are below spread^n = e^-4
        weight = spread * (graph @ weight) + start
    return np.asarray(weight)
