"""Views: pieces of the reflected image, each made of its own image alone."""

import torch
from torch.nn.functional import pad

from tacit.experiments.views import SHIFT, shift_and_mirror


def test_every_view_is_a_piece_of_the_reflected_image_and_all_pieces_come():
    image = torch.rand(1, 2, 12, 11)
    wide = pad(image, [SHIFT] * 4, mode="reflect")[0]
    pieces = {
        tuple(part.flatten().tolist())
        for top in range(2 * SHIFT + 1)
        for left in range(2 * SHIFT + 1)
        for crop in [wide[:, top : top + 12, left : left + 11]]
        for part in (crop, crop.flip(2))
    }
    assert len(pieces) == 2 * 81
    torch.manual_seed(0)
    # 2,000 draws of 162: each is missed with probability 4e-6.
    views, classes = shift_and_mirror((image.expand(2000, -1, -1, -1), torch.arange(2000)))
    assert {tuple(view.flatten().tolist()) for view in views} == pieces
    assert torch.equal(classes, torch.arange(2000))


def test_a_view_depends_on_its_own_image_only():
    images = torch.rand(4, 8, 8)
    changed = images.clone()
    changed[1] = 5.0
    seen = []
    for given in (images, changed):
        torch.manual_seed(3)
        seen.append(shift_and_mirror((given, torch.zeros(4)))[0])
    assert torch.equal(seen[0][[0, 2, 3]], seen[1][[0, 2, 3]])
    assert (seen[1][1] == 5.0).all()
