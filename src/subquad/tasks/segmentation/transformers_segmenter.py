"""transformers' semantic segmenters, called as ours are."""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.tasks.transformers_network import DenseOfTransformers


class SegmenterOfTransformers(DenseOfTransformers):
    """One whose answers are classes of every pixel, as those of our segmenters."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores (b, classes, height, width) of the pixels of images (b, c, height, width)."""
        logits = self._answered(x)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.interpolate(wide, size=x.shape[-2:], mode="bilinear", align_corners=False)
