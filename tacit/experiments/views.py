"""Views: random shifts and mirror images, of which one clipped gradient takes the mean.

The mean over the views of an example is taken before clipping, so views cost no privacy (De et al.
2022, arXiv:2204.13650, section 3: augmentation multiplicity). A view depends on its own image and
on random numbers only.
"""

import torch
from torch import Tensor

SHIFT = 4  # pixels, as De et al. 2022


def shift_and_mirror(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Move each image by at most `SHIFT` pixels on each axis, and mirror it with probability 1/2.

    Images have shape (rows, planes, height, width) or (rows, height, width). Pixels from beyond the
    border are those of the image reflected at its border. What comes after the images in `batch`,
    such as their classes, stays as it is.
    """
    images, *others = batch
    rows, (height, width) = len(images), images.shape[-2:]
    device = images.device
    shifts = torch.randint(-SHIFT, SHIFT + 1, (2, rows, 1), device=device)
    is_mirrored = torch.rand(rows, 1, device=device) < 0.5
    across = torch.arange(width, device=device)
    across = torch.where(is_mirrored, across.flip(0), across)
    down = torch.arange(height, device=device)
    columns, lines = _reflected(across + shifts[0], width), _reflected(down + shifts[1], height)
    index = (lines.unsqueeze(2) * width + columns.unsqueeze(1)).view(rows, 1, -1)
    planes = images.reshape(rows, -1, height * width)
    return planes.gather(2, index.expand_as(planes)).view_as(images), *others


def _reflected(place: Tensor, size: int) -> Tensor:
    """Return the pixel that is seen at `place`, which may be up to size - 1 beyond the border."""
    return size - 1 - (size - 1 - place.abs()).abs()
