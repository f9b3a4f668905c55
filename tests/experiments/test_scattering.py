"""The published invariances of the scattering transform, and its independence across images."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from tacit.experiments.recipe import FeatureSettings
from tacit.experiments.scattering import (
    Scattering,
    ScatteringFeatures,
    _filters,
    by_frequency,
    contrast_normalize,
    group_normalize,
)

rng = np.random.default_rng(0)
IMAGES = torch.zeros(4, 32, 32)
IMAGES[:, 8:24, 8:24] = torch.from_numpy(rng.uniform(size=(4, 16, 16)).astype(np.float32))


def by_definition(image: np.ndarray, scales: int, angles: int) -> np.ndarray:
    """Scatter one image in float64 at full resolution, keeping every 2^j-th pixel afterwards."""
    margin = 2**scales
    x = np.pad(image.astype(float), margin, mode="reflect")

    def convolved(u, filter_):
        step = len(x) // len(u)  # a filter on a coarser grid adds the frequencies that coincide
        size = len(u)
        folded = filter_.reshape(step, size, step, size).sum(axis=(0, 2))
        return np.fft.ifft2(np.fft.fft2(u) * folded)

    def averaged(u):
        step = margin * len(u) // len(x)
        return np.real(convolved(u, low_pass))[::step, ::step][1:-1, 1:-1]

    low_pass, wavelets = _filters(len(x), scales, angles)
    paths = [averaged(x)], [], []
    for j1 in range(scales):
        for first in wavelets[j1]:
            u1 = np.abs(convolved(x, first))[:: 2**j1, :: 2**j1]
            paths[1].append(averaged(u1))
            for j2 in range(j1 + 1, scales):
                step = 2 ** (j2 - j1)
                for second in wavelets[j2]:
                    paths[2].append(averaged(np.abs(convolved(u1, second))[::step, ::step]))
    return np.stack([*paths[0], *paths[1], *paths[2]])


@pytest.mark.parametrize(("scales", "angles", "size"), [(2, 8, 28), (1, 8, 8), (3, 3, 16)])
def test_the_transform_is_its_definition(scales, angles, size):
    images = rng.random((2, 3, size, size), dtype=np.float32)
    found = Scattering(scales, angles)(torch.from_numpy(images))
    planes = [[by_definition(plane, scales, angles) for plane in image] for image in images]
    expected = np.array(planes).reshape(found.shape)  # the paths of each plane in turn
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_the_number_of_images_changes_nothing():
    images = torch.from_numpy(rng.random((40, 2, 8, 8), dtype=np.float32))
    scatter = Scattering(scales=1, angles=4)
    alone = torch.cat([scatter(image[None]) for image in images])
    np.testing.assert_allclose(scatter(images), alone, atol=1e-6)


def relative_change(transform, images, changed):
    before = transform(images)
    return float((transform(changed) - before).norm() / before.norm())


def test_channels_are_those_of_two_orders():
    assert Scattering(scales=2, angles=8).paths == 81
    assert Scattering(scales=3, angles=4).paths == 1 + 12 + 16 * 3
    assert Scattering(scales=3, angles=4)(IMAGES).shape == (4, 61, 4, 4)
    assert Scattering()(torch.zeros(2, 3, 32, 32)).shape == (2, 243, 8, 8)


def test_a_constant_image_has_only_a_mean():
    features = Scattering()(torch.full((1, 32, 32), 0.7))
    assert features[:, 0].numpy() == pytest.approx(0.7, rel=1e-4)
    assert features[:, 1:].abs().max() < 1e-4


def test_distances_do_not_grow():
    # Non-expansive up to the frame bound of these filters (Mallat 2012, Prop. 2.5).
    other = IMAGES + 0.1 * torch.from_numpy(rng.normal(size=IMAGES.shape).astype(np.float32))
    scatter = Scattering()
    pooled = 2**scatter.scales  # the output is subsampled, so its norm counts that many pixels less
    apart = (scatter(other) - scatter(IMAGES)).norm() * pooled
    assert apart <= (other - IMAGES).norm()


def test_small_shifts_change_features_much_less_than_pixels():
    shifted = IMAGES.roll(1, 2)
    change = relative_change(Scattering(), IMAGES, shifted)
    assert change < 0.5 * relative_change(lambda x: x, IMAGES, shifted)


def test_a_longer_average_is_more_invariant():
    shifted = IMAGES.roll(2, 1)
    changes = [relative_change(Scattering(scales=J), IMAGES, shifted) for J in (1, 2, 3)]
    assert changes[0] > changes[1] > changes[2]


def test_scaling_an_image_scales_its_features():
    scatter = Scattering()
    torch.testing.assert_close(scatter(3 * IMAGES), 3 * scatter(IMAGES), rtol=1e-4, atol=1e-6)


def test_a_quarter_turn_rotates_the_orientations():
    scatter = Scattering(scales=1, angles=8)
    means = scatter(IMAGES)[:, 1:].mean((2, 3))
    turned = scatter(IMAGES.rot90(1, (1, 2)))[:, 1:].mean((2, 3))
    torch.testing.assert_close(turned, means.roll(4, 1), rtol=0.02, atol=0)


def test_one_image_never_changes_the_features_of_another():
    changed = IMAGES.clone()
    changed[0] = 5.0
    before, after = (group_normalize(Scattering()(x)) for x in (IMAGES, changed))
    assert torch.equal(before[1:], after[1:])


def test_groups_are_standardized_per_image_and_blank_images_stay_finite():
    features = group_normalize(Scattering()(torch.cat([IMAGES, torch.zeros(1, 32, 32)])))
    grouped = features.reshape(5, 27, -1)
    assert grouped.mean(2).abs().max() < 1e-4
    assert features.isfinite().all()


@pytest.mark.parametrize("shape", [(32, 32), (2, 32, 30), (2, 30, 30), (2, 3, 32, 28)])
def test_wrong_shapes_are_explained(shape):
    with pytest.raises(ValueError, match="must be"):
        Scattering()(torch.zeros(shape))


def test_no_images_give_no_features():
    assert Scattering()(torch.zeros(0, 28, 28)).shape == (0, 81, 7, 7)
    assert Scattering()(torch.zeros(0, 3, 32, 32)).shape == (0, 243, 8, 8)


def test_contrast_is_relative_to_each_place_of_each_image_alone():
    scattering = Scattering(scales=2, angles=4)
    features = torch.randn(5, scattering.paths, 3, 3, generator=torch.Generator().manual_seed(0))
    zeroth, first, second = scattering.orders
    found = contrast_normalize(features, scattering.orders)
    assert torch.equal(found[:, zeroth], features[:, zeroth])
    for channels in (first, second):
        spread = found[:, channels].std(1, unbiased=False)
        assert 0.5 < spread.min() < spread.max() < 1.0
        louder = features.clone()
        louder[:, channels] += 7.0
        moved = contrast_normalize(louder, scattering.orders) - found
        before = louder[:, channels] - features[:, channels]
        assert moved[:, channels].abs().mean() < 0.5 * before.abs().mean()
    alone = contrast_normalize(features[2:3], scattering.orders)
    torch.testing.assert_close(alone[0], found[2])


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_frequencies_are_an_orthogonal_map_with_the_coarsest_first(scales):
    scattering = Scattering(scales=scales, angles=4)
    features = torch.randn(3, scattering.paths, 2, 2, generator=torch.Generator().manual_seed(0))
    turned = by_frequency(features, scattering)
    before = features.flatten(1)
    assert turned.shape == before.shape
    torch.testing.assert_close(turned @ turned.T, before @ before.T, rtol=1e-4, atol=1e-4)
    smooth = by_frequency(torch.ones(1, scattering.paths, 2, 2), scattering)[0]
    orders = 1 + scales + scales * (scales - 1) // 2  # one constant for each pair of scales
    assert (smooth.abs() > 1e-5).nonzero().flatten().tolist() == list(range(orders))


@pytest.mark.parametrize(("shape", "pool"), [((32, 32), 2), ((3, 32, 32), 4), ((2, 24, 24), 3)])
def test_pooling_averages_squares_of_positions(shape, pool):
    images = torch.from_numpy(rng.random((3, *shape), dtype=np.float32))
    plain, pooled = Scattering()(images), Scattering(pool=pool)(images)
    torch.testing.assert_close(pooled, avg_pool2d(plain, pool), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="pool must divide"):
        Scattering(pool=5)(images)


def test_threads_change_no_bit_of_the_features_and_are_left_as_they_were():
    images = rng.random((200, 3, 8, 8), dtype=np.float32)
    settings = FeatureSettings(kind="scattering", scales=1, pool=2, log_scale=0.01, groups=0)
    transform, before = ScatteringFeatures(settings, (3, 8, 8)), torch.get_num_threads()
    found, counts = [], []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            features = np.empty((200, *transform.shape), np.float32)
            transform.fill(features, images, counts.append)
            found.append(features)
            assert torch.get_num_threads() == threads
            with ThreadPoolExecutor(1) as pool:  # threads to come have as many, too
                assert pool.submit(torch.get_num_threads).result() == threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[0][:64], transform(images[:64]))
    assert counts == 3 * [64, 64, 64, 8]


def test_an_interrupt_waits_for_the_images_at_hand_only():
    images = np.zeros((64 * 40, 8, 8), np.float32)
    transform = ScatteringFeatures(FeatureSettings(kind="scattering", scales=1, groups=9), (8, 8))
    features = np.full((len(images), *transform.shape), np.nan, np.float32)

    def interrupt(_count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transform.fill(features, images, interrupt)
    assert np.isnan(features).any()
