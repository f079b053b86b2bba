"""What a plain network begins with, in one step: its patches, projected and placed, behind its prefix tokens.

    [prefix; W patch + b] + positions

The image is filled up with zeros to whole patches; where positions are of patches alone, those of prefix tokens are
zero. Letters: b batch, i channels of the image, y x its rows and columns, p the side of a patch, n patches, m prefix
tokens, c channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.errors import SubquadError
from subquad.kernels.layer_operators import patch_count

SHAPES = kernels.patch_tokens.shapes


def patch_tokens(
    image: Tensor, weight: Tensor, bias: Tensor | None, prefix: Tensor | None, positions: Tensor | None
) -> Tensor:
    """Tokens (b, m + n, c) of an image (b, i, y, x).

    `weight` (c, i, p, p) and `bias` (c,) are a convolution's, `prefix` is (1, m, c), `positions` (1, m + n, c) or
    (1, n, c). Raises SubquadError where these do not fit each other.
    """
    tensors = image, weight, bias, prefix, positions
    SHAPES.check(*tensors)
    count, before = patch_count(image.shape, weight.shape), 0 if prefix is None else prefix.shape[1]
    if positions is not None and positions.shape[1] not in (count, before + count):
        raise SubquadError(
            f"{positions.shape[1]} positions are not those of {count} patches behind {before} prefix tokens"
        )
    # a kernel has the image's dtype for all of these
    lowered = image.device.type != "meta" and torch.is_autocast_enabled(image.device.type)
    cannot = "autocast decides on dtypes step by step" if lowered else None
    return kernels.compute(kernels.patch_tokens, _patch_tokens, tensors, cannot=cannot)


def _patch_tokens(
    image: Tensor, weight: Tensor, bias: Tensor | None, prefix: Tensor | None, positions: Tensor | None
) -> Tensor:
    side = weight.shape[2]
    below, right = (-size % side for size in image.shape[2:])
    tokens = F.conv2d(F.pad(image, (0, right, 0, below)), weight, bias, stride=side).flatten(2).mT
    if positions is not None and positions.shape[1] == tokens.shape[1]:
        tokens, positions = tokens + positions, None
    if prefix is not None:
        tokens = torch.cat([prefix.expand(tokens.shape[0], -1, -1), tokens], dim=1)
    return tokens if positions is None else tokens + positions
