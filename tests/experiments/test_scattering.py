"""The published invariances of the scattering transform, and its independence across images."""

import numpy as np
import pytest

from tacit.experiments.scattering import (
    Scattering,
    by_frequency,
    contrast_normalize,
    group_normalize,
)

rng = np.random.default_rng(0)
IMAGES = np.zeros((4, 32, 32), np.float32)
IMAGES[:, 8:24, 8:24] = rng.uniform(size=(4, 16, 16))


def relative_change(transform, images, changed):
    before = transform(images)
    return np.linalg.norm(transform(changed) - before) / np.linalg.norm(before)


def test_channels_are_those_of_two_orders():
    assert Scattering(scales=2, angles=8).channels == 81
    assert Scattering(scales=3, angles=4).channels == 1 + 12 + 16 * 3
    assert Scattering(scales=3, angles=4)(IMAGES).shape == (4, 61, 4, 4)


def test_a_constant_image_has_only_a_mean():
    features = Scattering()(np.full((1, 32, 32), 0.7))
    assert features[:, 0] == pytest.approx(0.7, rel=1e-4)
    assert np.abs(features[:, 1:]).max() < 1e-4


def test_distances_do_not_grow():
    # Non-expansive up to the frame bound of these filters (Mallat 2012, Prop. 2.5).
    other = IMAGES + 0.1 * rng.normal(size=IMAGES.shape).astype(np.float32)
    scatter = Scattering()
    pooled = 2**scatter.scales  # the output is subsampled, so its norm counts that many pixels less
    apart = np.linalg.norm(scatter(other) - scatter(IMAGES)) * pooled
    assert apart <= np.linalg.norm(other - IMAGES)


def test_small_shifts_change_features_much_less_than_pixels():
    shifted = np.roll(IMAGES, 1, axis=2)
    change = relative_change(Scattering(), IMAGES, shifted)
    assert change < 0.5 * relative_change(lambda x: x, IMAGES, shifted)


def test_a_longer_average_is_more_invariant():
    shifted = np.roll(IMAGES, 2, axis=1)
    changes = [relative_change(Scattering(scales=J), IMAGES, shifted) for J in (1, 2, 3)]
    assert changes[0] > changes[1] > changes[2]


def test_scaling_an_image_scales_its_features():
    scatter = Scattering()
    assert scatter(3 * IMAGES) == pytest.approx(3 * scatter(IMAGES), rel=1e-4, abs=1e-6)


def test_a_quarter_turn_rotates_the_orientations():
    scatter = Scattering(scales=1, angles=8)
    means = scatter(IMAGES)[:, 1:].mean(axis=(2, 3))
    turned = scatter(np.rot90(IMAGES, axes=(1, 2)))[:, 1:].mean(axis=(2, 3))
    assert turned == pytest.approx(np.roll(means, 4, axis=1), rel=0.02)


def test_one_image_never_changes_the_features_of_another():
    changed = IMAGES.copy()
    changed[0] = 5.0
    before, after = (group_normalize(Scattering()(x)) for x in (IMAGES, changed))
    assert np.array_equal(before[1:], after[1:])


def test_groups_are_standardized_per_image_and_blank_images_stay_finite():
    features = group_normalize(Scattering()(np.concatenate([IMAGES, np.zeros((1, 32, 32))])))
    grouped = features.reshape(5, 27, -1)
    assert np.abs(grouped.mean(axis=2)).max() < 1e-4
    assert np.isfinite(features).all()


@pytest.mark.parametrize("shape", [(32, 32), (2, 32, 30), (2, 30, 30)])
def test_wrong_shapes_are_explained(shape):
    with pytest.raises(ValueError, match="must be"):
        Scattering()(np.zeros(shape))


def test_no_images_give_no_features():
    assert Scattering()(np.zeros((0, 28, 28))).shape == (0, 81, 7, 7)


def test_contrast_is_relative_to_each_place_of_each_image_alone():
    rng = np.random.default_rng(0)
    scattering = Scattering(scales=2, angles=4)
    features = rng.normal(size=(5, scattering.channels, 3, 3)).astype(np.float32)
    zeroth, first, second = scattering.orders
    found = contrast_normalize(features, scattering.orders)
    np.testing.assert_array_equal(found[:, zeroth], features[:, zeroth])
    for channels in (first, second):
        centered = found[:, channels] - found[:, channels].mean(axis=1, keepdims=True)
        assert 0.5 < centered.std(axis=1).min() < centered.std(axis=1).max() < 1.0
        louder = features.copy()
        louder[:, channels] += 7.0
        moved = contrast_normalize(louder, scattering.orders) - found
        before = louder[:, channels] - features[:, channels]
        assert np.abs(moved[:, channels]).mean() < 0.5 * np.abs(before).mean()
    alone = contrast_normalize(features[2:3], scattering.orders)
    np.testing.assert_allclose(alone[0], found[2], rtol=1e-6)


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_frequencies_are_an_orthogonal_map_with_the_coarsest_first(scales):
    scattering = Scattering(scales=scales, angles=4)
    features = np.random.default_rng(0).normal(size=(3, scattering.channels, 2, 2))
    turned = by_frequency(features, scattering)
    before = features.reshape(3, -1)
    assert turned.shape == before.shape
    np.testing.assert_allclose(turned @ turned.T, before @ before.T, rtol=1e-4)
    smooth = by_frequency(np.ones((1, scattering.channels, 2, 2)), scattering)[0]
    orders = 1 + scales + scales * (scales - 1) // 2  # one constant for each pair of scales
    assert np.flatnonzero(np.abs(smooth) > 1e-5).tolist() == list(range(orders))
