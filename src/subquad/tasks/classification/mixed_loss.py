"""The loss that classifiers are trained by, from timm's parts: labels smoothed, images of a batch mixed."""

from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor

from subquad.tasks.classification.classification_recipe import Recipe


class Objective:
    """The training loss: mixes the images of a batch if asked to, and smooths the labels."""

    def __init__(self, recipe: Recipe, num_classes: int):
        self._mixup = None
        if recipe.mixup or recipe.cutmix:
            self._mixup = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                prob=recipe.mixup_prob,
                switch_prob=recipe.mixup_switch_prob,
                label_smoothing=recipe.smoothing,
                num_classes=num_classes,
            )
        self._loss = SoftTargetCrossEntropy() if self._mixup else LabelSmoothingCrossEntropy(recipe.smoothing)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The batch as it is trained on."""
        if self._mixup is None:
            return images, labels
        # images are mixed in pairs: where a broken one left a gap, its partner sits out
        even = len(images) // 2 * 2
        return self._mixup(images[:even], labels[:even])

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        # in fp32 whatever the autocast: half precision loses the small logits
        return self._loss(logits.float(), target)
