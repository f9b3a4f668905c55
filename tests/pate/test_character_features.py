"""Features of one image depend on that image alone, and not on its slant or place."""

import numpy as np
import pytest

from tacit.pate.character_features import character_features, straighten


def strokes(slant=0.0, shift=0):
    """A vertical bar, sheared and moved."""
    image = np.zeros((28, 28), np.float32)
    for y in range(6, 22):
        x = round(14 + shift + slant * (y - 14))
        image[y, x - 1 : x + 2] = 1.0
    return image


def test_each_image_is_treated_alone():
    images = np.random.default_rng(0).random((4, 28, 28))
    together = character_features(images)
    apart = np.concatenate([character_features(images[i : i + 1]) for i in range(4)])
    assert together == pytest.approx(apart, abs=1e-5)


def test_slant_and_place_hardly_matter():
    plain, slanted, moved, other = (
        character_features(image[None])[0]
        for image in (strokes(), strokes(slant=0.4), strokes(shift=4), np.rot90(strokes()))
    )
    far = np.linalg.norm(plain - other)
    assert np.linalg.norm(plain - moved) < 0.1 * far
    assert np.linalg.norm(plain - slanted) < 0.5 * far


def test_an_empty_image_has_finite_features():
    assert np.all(np.isfinite(character_features(np.zeros((2, 28, 28)))))
    assert np.all(straighten(np.zeros((1, 8, 8), np.float32)) == 0)


@pytest.mark.parametrize("images", [np.zeros((28, 28)), np.full((1, 8, 8), np.nan)])
def test_wrong_images_are_refused(images):
    with pytest.raises(ValueError, match="images must"):
        character_features(images)
