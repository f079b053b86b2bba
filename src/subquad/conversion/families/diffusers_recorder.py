"""How transformers of diffusers without a patch embedding say where tokens stand: by what their rotary tables are of.

Their latents arrive as rows of tokens, behind those of a text or beside them.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.tracing import is_traced

TRANSFORMERS = "diffusers.models.transformers"


class PackedRecorder(GridRecorder):
    """Listens to a rotary embedding of a network whose latents are packed: four neighbours are one token.

    Attributes:
        embeddings: full names of the classes that it listens to.
    """

    # that of 1,024 px, which such networks do not say
    usual_size: ClassVar[tuple[int, int] | None] = (128, 128)
    embeddings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return any(is_called(module, name) for name in cls.embeddings)

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        return max(size[0] // 2, 1), max(size[1] // 2, 1)


class FluxRecorder(PackedRecorder):
    """Listens to Flux's embedding, whose argument says where tokens stand: (n, 3), rows and columns last."""

    embeddings: ClassVar[tuple[str, ...]] = (
        f"{TRANSFORMERS}.transformer_flux.FluxPosEmbed",
        # Chroma's
        "diffusers.models.embeddings.FluxPosEmbed",
        f"{TRANSFORMERS}.transformer_bria.BriaEmbedND",
        f"{TRANSFORMERS}.transformer_bria_fibo.BriaFiboEmbedND",
        f"{TRANSFORMERS}.transformer_longcat_image.LongCatImagePosEmbed",
        f"{TRANSFORMERS}.transformer_ovis_image.OvisImagePosEmbed",
        f"{TRANSFORMERS}.transformer_krea2.Krea2RotaryPosEmbed",
    )
    rows_and_columns: ClassVar[slice] = slice(-2, None)

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        if is_traced() and not torch.compiler.is_dynamo_compiling():
            # numbers can't be read where a network is exported: the grid is that of the call before
            return
        self.read(arguments[0])

    @torch.compiler.disable
    def read(self, ids: Tensor) -> None:
        """Find the map at the end of all places.

        Raises:
            SubquadError: what is in front of it is no text.
        """
        places = ids[:, self.rows_and_columns].round().long().tolist()
        grid = map_at_the_end(places)
        self.prefix = len(places) - int(grid.num_places)
        if any(row != column for row, column in places[: self.prefix]):
            raise SubquadError(
                f"img_ids and txt_ids of {len(places)} tokens are no text followed by one map, of "
                f"{grid.height}×{grid.width}: pictures beside the one that is made can't be converted"
            )
        self.record(grid)


class Flux2Recorder(FluxRecorder):
    """Listens to Flux 2's, which is called for the image and then for the text: (n, 4), a text's own place last."""

    embeddings: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux2.Flux2PosEmbed",)
    rows_and_columns: ClassVar[slice] = slice(1, 3)

    @torch.compiler.disable
    def read(self, ids: Tensor) -> None:
        if len(ids) == 1 or bool(ids[:, -1].any()):
            self.prefix = len(ids)
        else:
            super().read(ids)
            if self.prefix:
                raise SubquadError(
                    f"img_ids of {len(ids)} tokens are no one map: pictures beside it can't be converted"
                )


class Flux3Recorder(FluxRecorder):
    """Listens to Flux 3's, called for a text and then for the image: (n, 4), rows and columns in steps of any size."""

    embeddings: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_flux3.Flux3PosEmbed",)

    @torch.compiler.disable
    def read(self, ids: Tensor) -> None:
        """Find the map, in whose tokens the last place, a text's own, is 0.

        Raises:
            SubquadError: these are places of other pictures, or of no map.
        """
        last = ids[:, -1]
        if bool((last > 0).any()):
            return
        rows, columns = (len(ids[:, axis].unique()) for axis in (1, 2))
        if bool((last < 0).any()) or rows * columns != len(ids):
            raise SubquadError(
                f"ids of {len(ids)} tokens are no text and no one map: pictures beside the one that is made can't be "
                "converted"
            )
        self.record(TokenGrid(rows, columns))


class QwenRecorder(PackedRecorder):
    """Listens to Qwen-Image's, which is called with the frames, rows and columns of each image's pictures."""

    embeddings: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_qwenimage.QwenEmbedRope",)

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        """Record the map of all images.

        Raises:
            SubquadError: there are several pictures or frames of an image, or maps of several sizes.
        """
        shapes = arguments[0]
        images = [[one] if isinstance(one[0], int) else list(one) for one in shapes]
        if any(len(pictures) != 1 or pictures[0] != (1, *images[0][0][1:]) for pictures in images):
            raise SubquadError(
                f"img_shapes={shapes} are no single map, the same for all images: pictures beside the one that is made "
                "can't be converted, and neither can frames"
            )
        self.record(TokenGrid(*images[0][0][1:]))


class LatentRecorder(GridRecorder):
    """Listens to what is called with latents (b, c, y, x), and knows a patch: of AuraFlow, CogView4 and Lumina 2."""

    embeddings: ClassVar[tuple[str, ...]] = (
        f"{TRANSFORMERS}.auraflow_transformer_2d.AuraFlowPatchEmbed",
        f"{TRANSFORMERS}.transformer_cogview4.CogView4PatchEmbed",
        f"{TRANSFORMERS}.transformer_lumina2.Lumina2RotaryPosEmbed",
    )

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return any(is_called(module, name) for name in cls.embeddings)

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        height, width = size
        return height // embedding.patch_size, width // embedding.patch_size

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        self.record(TokenGrid(*self.map_from(module, arguments[0].shape[-2:])))


class ZRecorder(PackedRecorder):
    """Listens to Z-Image as a whole, whose latents are the first thing that it is called with."""

    embeddings: ClassVar[tuple[str, ...]] = (f"{TRANSFORMERS}.transformer_z_image.ZImageTransformer2DModel",)
    in_front: ClassVar[bool] = True

    def __call__(self, module: Any, arguments: Any, named: Any) -> None:
        """Record the map of all latents (c, frames, y, x), from what the network is called with, in part by name.

        Raises:
            SubquadError: there are several pictures or frames of an image, or latents of several sizes.
        """
        latents = arguments[0] if arguments else named["x"]
        patch = named.get("patch_size", module.all_patch_size[0])
        if any(isinstance(one, list) for one in latents):
            raise SubquadError("pictures beside the one that is made can't be converted: give a list of latents")
        shapes = {tuple(one.shape[1:]) for one in latents}
        if len(shapes) != 1 or any(frames != 1 for frames, *_ in shapes):
            raise SubquadError(
                f"latents of {sorted(shapes)} (frames, rows, columns) in a batch: a converted network takes those of "
                "one size, and single frames"
            )
        ((_, height, width),) = shapes
        self.record(TokenGrid(height // patch, width // patch))


def map_at_the_end(places: list[list[int]]) -> TokenGrid:
    """The largest map whose rows are the last of these places (row, column), from its upper left one on."""
    last_row, last_column = places[-1]
    width = 1
    while width < len(places) and places[-width - 1] == [last_row, last_column - width]:
        width += 1
    row = [[last_row, last_column - width + 1 + column] for column in range(width)]
    height = 1
    while places[-(height + 1) * width : -height * width] == [[last - height, column] for last, column in row]:
        height += 1
    return TokenGrid(height, width)
