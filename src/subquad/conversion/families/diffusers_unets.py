"""diffusers' U-Nets and autoencoders: attention of maps.

Blocks of Stable Diffusion's U-Nets are handed tokens of the map that the transformer around them is handed: where these
stand a call shows (`tokens_origin.py`). Those of unconditional U-Nets and of autoencoders are handed the map itself.

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

from typing import Any, ClassVar

from torch import Tensor

from subquad.conversion.families.diffusers_attention import OF_IMAGE, DiffusersAttention, refuse_given
from subquad.conversion.families.map_attention import MapRecorder
from subquad.conversion.grid_recorder import GridRecorder
from subquad.diffusion.patchable_layers import REPLACEABLE
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

BESIDE = "encoder_hidden_states", "attention_mask"
"""What calls of diffusers' layers may hand over by place beside tokens."""


class DiffusersMapAttention(DiffusersAttention):
    """A map (b, c, y, x) behind a norm of groups, to another one, to which that one is added."""

    replaces: ClassVar[tuple[str, ...]] = ()
    listener: ClassVar[type[GridRecorder]] = MapRecorder
    is_handed_maps: ClassVar[bool] = True
    processors: ClassVar[tuple[str, ...]] = tuple(sorted(REPLACEABLE))
    extras: ClassVar[tuple[str, ...]] = ("spatial_norm",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.over = float(original.rescale_output_factor)

    @classmethod
    def fits(cls, original: Any) -> bool:
        return bool(getattr(original, "residual_connection", False)) and original.group_norm is not None

    @classmethod
    def map_under(cls, x: Tensor) -> TokenGrid:
        return TokenGrid(*x.shape[2:])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A map (b, c, y, x) to another one; of the time, `temb`, such layers make nothing."""
        refuse_given(dict(zip(BESIDE, args, strict=False)) | {**kwargs, "temb": None})
        if hidden_states.dim() != 4:
            raise SubquadError(
                f"a converted layer of maps takes maps (b, c, height, width), got {tuple(hidden_states.shape)}"
            )
        grid = self.map_under(hidden_states)
        tokens = self.through("group_norm", hidden_states.flatten(2)).mT
        q, k, v = self.heads_of(tokens, *OF_IMAGE)
        y = self.project_out(self.mix(q, k, v, tokens, grid=grid))
        return (grid.to_image(y) + hidden_states) / self.over
