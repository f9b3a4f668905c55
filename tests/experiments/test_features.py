"""Features: what is free is free, what is released is paid for and noisy as billed."""

from dataclasses import replace

import numpy as np
import pytest

from tacit.datasets import Dataset
from tacit.events import Gaussian
from tacit.experiments.features import (
    PrivateEvening,
    PrivateMean,
    PrivatePCA,
    _bounded_sum,
    _gram,
    _gram_mechanism,
    prepare,
    project,
    random_directions,
    summaries_of,
)
from tacit.experiments.recipe import FeatureSettings as Features


def noisy_vector(x: np.ndarray) -> np.ndarray:
    """What the mechanism of PrivatePCA is given: diagonal and sqrt(2) times the upper triangle."""
    gram = _gram(x)
    rows, columns = np.triu_indices(len(gram))
    return gram[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))


def test_one_record_moves_the_release_by_at_most_one_and_a_replacement_by_root_two():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6)) * rng.lognormal(0, 3, size=(50, 1))
    whole = noisy_vector(x)
    for i in range(len(x)):
        assert np.linalg.norm(whole - noisy_vector(np.delete(x, i, 0))) <= 1.0
        swapped = x.copy()
        swapped[i] = rng.normal(size=6)
        assert np.linalg.norm(whole - noisy_vector(swapped)) <= np.sqrt(2.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308])
def test_a_record_that_is_not_finite_contributes_at_most_one(bad):
    x = np.random.default_rng(0).normal(size=(20, 4))
    spoiled = np.vstack([x, [bad, 1.0, 1.0, 1.0]])
    assert np.linalg.norm(noisy_vector(spoiled) - noisy_vector(x)) <= 1.0


def test_the_noise_of_the_private_components_is_as_billed():
    pca = PrivatePCA(2, noise_multiplier=3.0)
    assert pca.event == Gaussian(3.0, replace_factor=np.sqrt(2.0))
    assert _gram_mechanism(pca.noise_multiplier).noise_std == 3.0  # sensitivity 1


def test_private_directions_approach_the_exact_ones_as_noise_falls():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4000, 8)) * np.array([8, 4, 2, 1, 1, 1, 1, 1])
    exact = PrivatePCA(3, 1.0).exact(x)
    near = PrivatePCA(3, noise_multiplier=0.01).release(x, rng)
    far = PrivatePCA(3, noise_multiplier=1e4).release(x, rng)
    overlap = lambda a: np.linalg.norm(exact.T @ a) ** 2 / 3  # noqa: E731  # a formula
    assert overlap(near) > 0.999 > overlap(far)
    np.testing.assert_allclose(near.T @ near, np.eye(3), atol=1e-9)


def test_one_record_moves_the_mean_by_what_its_noise_is_scaled_to():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2, 3)) * rng.lognormal(0, 3, size=(40, 1, 1))
    x[7, 0, 0] = np.nan
    bound = np.sqrt(6.0)
    whole = _bounded_sum(x, bound)
    for i in range(len(x)):
        assert np.linalg.norm(whole - _bounded_sum(np.delete(x, i, 0), bound)) <= bound + 1e-9
    many = PrivateMean(40, noise_multiplier=2.0)
    draws = [many.release(x, np.random.default_rng(seed)) for seed in range(300)]
    spread = np.std(draws, axis=0)
    # 1,800 normal draws: the relative error of each std has sd 1 / sqrt(600); 6 sd is 1e-9 a draw
    np.testing.assert_allclose(spread, 2.0 * bound / 40, rtol=6 / np.sqrt(600))


def tiny() -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.random((12, 8, 8), dtype=np.float32)
    labels = np.arange(12) % 3
    return Dataset("tiny", images[:9], labels[:9], images[9:], labels[9:], 3)


def refuse(name, summary, x):
    raise AssertionError("nothing has to be released")


def test_features_without_a_price_look_at_one_record_at_a_time(tmp_path):
    data = tiny()
    for settings in (
        Features(kind="none"),
        Features(kind="scattering", scales=1, groups=9),
        Features(kind="projection", components=5),
    ):
        whole = prepare(data, settings, release=refuse)
        alone = Dataset("one", data.x_train[3:4], data.y_train[3:4], data.x_test, data.y_test, 3)
        one = prepare(alone, settings, release=refuse)
        np.testing.assert_allclose(whole.x_train[3], one.x_train[0], rtol=1e-5, atol=1e-6)


def test_scattering_is_cached_and_the_cache_gives_the_same(tmp_path):
    data, settings = tiny(), Features(kind="scattering", scales=1, groups=9)
    plain = prepare(data, settings, release=refuse)
    first = prepare(data, settings, release=refuse, cache=tmp_path / "cache")
    again = prepare(data, settings, release=refuse, cache=tmp_path / "cache")
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in files), "private values"
    for prepared in (first, again):
        np.testing.assert_array_equal(prepared.x_train, plain.x_train)
        np.testing.assert_array_equal(prepared.x_test, plain.x_test)


@pytest.mark.parametrize("kind", ["none", "scattering", "projection"])
def test_centering_leaves_the_records_of_the_data_set_alone(kind, tmp_path):
    data = tiny()
    before = data.x_train.copy(), data.x_test.copy()
    settings = Features(kind=kind, scales=1, groups=9, components=5, mean_noise_multiplier=1.0)
    mean = lambda name, summary, x: summary.exact(x)  # noqa: E731
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # the last reads what was kept
        found = prepare(data, settings, release=mean, cache=cache)
        if kind != "projection":  # which scales the centered records
            np.testing.assert_allclose(found.x_train.mean(0), 0, atol=1e-5)
        np.testing.assert_array_equal(data.x_train, before[0])
        np.testing.assert_array_equal(data.x_test, before[1])


def test_projected_records_keep_their_scale():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 40)).astype(np.float32)
    directions = random_directions(40, 40)
    norms = np.linalg.norm(project(x, directions), axis=1)
    np.testing.assert_allclose(norms, np.sqrt(40), rtol=1e-4)


def test_wrong_sizes_are_refused_in_words():
    with pytest.raises(ValueError, match=r"features.components must be <= 64"):
        prepare(tiny(), Features(kind="pca", components=65), release=refuse)
    with pytest.raises(ValueError, match=r"features.pool must divide the 4 positions"):
        prepare(tiny(), Features(kind="scattering", scales=1, groups=9, pool=3), release=refuse)
    with pytest.raises(ValueError, match=r"features.groups must divide the 9 channels"):
        prepare(tiny(), Features(kind="scattering", scales=1, groups=27), release=refuse)


def test_scattering_of_color_images_is_pooled_and_compressed_plane_by_plane():
    rng = np.random.default_rng(0)
    images, labels = rng.random((4, 3, 8, 8), dtype=np.float32), np.zeros(4, int)
    settings = Features(kind="scattering", scales=1, pool=2, log_scale=0.01, groups=0)
    found = prepare(
        Dataset("", images, labels, images[:0], labels[:0], 2), settings, release=refuse
    )
    assert found.shape == (27, 2, 2)
    assert found.x_test.shape == (0, 27, 2, 2)
    plain = Features(kind="scattering", scales=1, groups=0)
    gray = Dataset("", images[:, 1], labels, images[:0, 1], labels[:0], 2)
    of_plane = prepare(gray, plain, release=refuse).x_train
    pooled = of_plane.reshape(4, 9, 2, 2, 2, 2).mean(axis=(3, 5))
    np.testing.assert_allclose(
        found.x_train[:, 9:18], np.log1p(pooled / 0.01) / np.log1p(100), rtol=1e-4
    )
    flat = Features(
        kind="scattering", scales=1, groups=27, contrast=True, even_noise_multiplier=1.0
    )
    exact = prepare(
        Dataset("", images, labels, images, labels, 2),
        replace(flat, even=6),
        release=lambda _, summary, x: np.eye(6, dtype=np.float32),
    )
    coarsest = exact.x_train[:, :3]  # the mean of order 0, of each plane
    np.testing.assert_allclose(exact.x_test[:, :3], coarsest)
    by_plane = [
        np.abs(np.corrcoef(images[:, p].mean((1, 2)), coarsest[:, p])[0, 1]) for p in range(3)
    ]
    assert min(by_plane) > 0.5


def test_what_is_centered_has_mean_zero_up_to_noise():
    def exact(name, summary, x):
        return summary.exact(x)

    for kind in ("none", "projection", "pca"):
        settings = Features(kind=kind, components=5, mean_noise_multiplier=1.0)
        prepared = prepare(tiny(), settings, release=exact)
        assert prepared.summaries["mean"].shape in ((8, 8), (64,))
        if kind == "none":
            np.testing.assert_allclose(prepared.x_train.mean(axis=0), 0.0, atol=1e-6)


def test_with_little_noise_the_private_directions_are_the_exact_ones():
    rng = np.random.default_rng(0)
    turned = np.linalg.qr(rng.normal(size=(6, 6)))[0]  # no direction is a coordinate
    x = rng.normal(size=(4000, 6)) * [5.0, 4.0, 3.0, 2.0, 1.0, 0.5] @ turned
    private = PrivatePCA(4, noise_multiplier=0.01)
    np.testing.assert_allclose(private.release(x, rng), private.exact(x), atol=1e-3)


def test_evening_shortens_what_varies_most_and_nothing_else():
    rng = np.random.default_rng(0)
    turned = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    x = rng.normal(size=(4000, 6)) * [9.0, 5.0, 1.0, 0.3, 0.3, 0.3] @ turned
    evening = PrivateEvening(6, noise_multiplier=2.0)
    for found in (evening.exact(x), evening.release(x, rng)):
        after = np.linalg.svd(x @ found, compute_uv=False)
        before = np.linalg.svd(x, compute_uv=False)
        assert after[0] < 0.5 * before[0]
        np.testing.assert_allclose(after[3:], before[3:], rtol=0.05)
        np.testing.assert_allclose(found, found.T, atol=1e-6)
    assert evening.event.replace_factor == pytest.approx(2**0.5)


def test_an_evened_run_keeps_its_map_and_pays_for_it():
    settings = Features(
        kind="scattering", scales=1, groups=9, contrast=True, mean_noise_multiplier=5.0,
        even_noise_multiplier=5.0, even=20,
    )  # fmt: skip
    names = []

    def release(name, summary, x):
        names.append(name)
        return summary.exact(x)

    prepared = prepare(tiny(), settings, release=release)
    assert names == list(summaries_of(settings, 9)) == ["mean", "evening"]
    assert prepared.summaries["evening"].shape == (20, 20)
    assert prepared.x_train.shape == (9, 9 * 16)
    with pytest.raises(ValueError, match="goes with kind"):
        summaries_of(Features(kind="pca", even_noise_multiplier=1.0), 9)


def test_whitening_gives_components_one_scale_and_keeps_their_length():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 6)) * [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    plain, white = (project(x, PrivatePCA(4, 1.0, whiten=w).exact(x)) for w in (0.0, 1.0))
    moments = (white**2).mean(axis=0)
    np.testing.assert_allclose(moments, moments.mean(), rtol=1e-3)
    assert (white**2).sum() == pytest.approx((plain**2).sum(), rel=1e-3)
