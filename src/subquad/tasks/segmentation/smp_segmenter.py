"""Segmenters of segmentation_models_pytorch, called as ours are: with images of any size, scores of each pixel."""

from typing import Any

import torch
from torch import Tensor, nn

from subquad.models.pyramid import cropped
from subquad.models.stages import fill_up
from subquad.tasks.transformers_network import heard_from


class SegmenterOfSmp(nn.Module):
    """One whose answers are classes of every pixel, as those of our segmenters.

    Images are filled up to the multiples of pixels that its decoder takes, and the answer is cut. A network of a single
    class, whose score is that of the foreground, has two here: a background of zeros in front, so that the softmax of
    both is the sigmoid of the one.

    Attributes:
        network: the package's own.
        num_classes: of the answers.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        scores = network.segmentation_head[0].out_channels
        self.is_binary, self.num_classes = scores == 1, max(scores, 2)
        self.stride = network.encoder.output_stride if network.requires_divisible_input_shape else 1

    def forward(self, x: Tensor) -> Tensor:
        """Scores (b, classes, height, width) of the pixels of images (b, 3, height, width)."""
        answer = self.network(fill_up(x, self.stride))
        # a classifier of the whole image may stand beside
        scores = cropped(answer[0] if isinstance(answer, tuple) else answer, *x.shape[-2:])
        return torch.cat([torch.zeros_like(scores), scores], dim=1) if self.is_binary else scores

    def features_and_logits(self, x: Tensor) -> dict[str, Tensor]:
        """What is compared with another network's: the encoder's last map, and the scores."""
        with heard_from(self.network.encoder) as heard:
            logits = self(x)
        return {"features": heard[0][-1], "logits": logits}

    @property
    def pyramid(self) -> nn.Module:
        """What there is to look into: its encoder, which answers with its last map."""
        return EncoderOfSmp(self.network.encoder, self.stride)


def is_of_smp(network: Any) -> bool:
    """Whether this is a network of the package, by what its networks are made of."""
    return all(hasattr(network, name) for name in ("encoder", "decoder", "segmentation_head"))


class EncoderOfSmp(nn.Module):
    """An encoder alone, of images of any size."""

    def __init__(self, encoder: Any, stride: int) -> None:
        super().__init__()
        self.encoder, self.stride = encoder, stride

    def forward(self, x: Tensor) -> Tensor:
        """The last map (b, c, y, x) of images (b, 3, height, width)."""
        y: Tensor = self.encoder(fill_up(x, self.stride))[-1]
        return y
