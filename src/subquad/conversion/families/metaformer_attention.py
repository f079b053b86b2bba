"""CAFormer's attention, in the last stages of timm's MetaFormers: Yu et al. 2022, arXiv 2210.13452."""

from typing import ClassVar

from torch import Tensor

from subquad.conversion.families.timm_attention import TimmAttention
from subquad.conversion.grid_recorder import GridRecorder, OverlappingRecorder


class MetaFormerAttention(TimmAttention):
    """A fused projection; tokens are told where they stand by the convolution in front of their stage."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.metaformer.Attention",)
    host: ClassVar[str] = "pvt"
    listener: ClassVar[type[GridRecorder]] = OverlappingRecorder
    in_pyramid: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, None, None, False)
