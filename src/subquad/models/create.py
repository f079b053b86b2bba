"""`create_model`: a network of the tables, with the authors' weights where they are asked for."""

from collections.abc import Sequence
from typing import Any

import torch

from subquad.errors import SubquadError
from subquad.models.assembling import assemble
from subquad.models.attention_names import Names
from subquad.models.backbone import Backbone
from subquad.models.pretrained import load_pretrained
from subquad.models.timm_settings import default_cfg
from subquad.ranges import Count, Positive, checks_arguments
from subquad.weights.links import network_of, row_of


@checks_arguments
def create_model(
    name: str,
    *,
    pretrained: bool = False,
    attention: Names | None = None,
    img_size: Positive | tuple[Positive, Positive] | None = None,
    built_for: Positive | tuple[Positive, Positive] | None = None,
    in_chans: Positive = 3,
    num_classes: Count = 1000,
    depth: Positive | None = None,
    depths: Sequence[Positive] | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> Backbone:
    """A network of the tables, as it is or with other mechanisms, sizes and settings.

        create_model("agent_swin_tiny", img_size=(800, 1216))
        create_model("deit_tiny", attention="pola", img_size=32, patch_size=2, num_classes=10)
        create_model("deit_micro", attention="agent+agent+softmax")
        create_model("swin_small", attention=("agent", "agent", (("agent", 2), ("softmax", 16)), "softmax"))

    Args:
        name: a row of `NETWORKS`, which names its mechanisms, or of `VARIANTS`, the sizes alone; or a row with a tag,
            as timm writes it: "agent_deit_small.r448".
        pretrained: load the authors' weights, which are fetched at the first call, see docs/weights.md. A head of
            other than 1000 classes stays as it is; tables of another image size are resampled, and the first
            convolution is made one of `in_chans` channels, as in timm.
        attention: mechanisms by name, one for all blocks, or one for each stage or block; "linear:feature_map=elu"
            gives one its own settings, see `attention_names`. By default the row's, and softmax where it names none.
        img_size: pixels, one number or (height, width), that position parameters are made for; other sizes work too.
        built_for: the size that it is made for first, before `set_input_size` moves it to `img_size`: windows, stripes,
            agents, landmarks and blocks of the map follow from it where no setting says them.
        in_chans: channels of the images.
        num_classes: classes of the head; 0 for none.
        depth: blocks of a network of one stage, as timm has it, instead of the row's.
        depths: blocks of each stage, instead of the row's.
        device: where to make it; PyTorch's default device if left out.
        dtype: of its parameters.
        settings: arguments of the host (`patch_size`, `embed_dim`, `num_heads`, `drop_path_rate`, …) and of the
            mechanisms (`num_agents`, …); a mechanism's can be a list with an entry for each stage or block. How far a
            block reaches (`sr_ratio`, `window_size`, `split_size`) is one number for the blocks whose mechanism is
            quadratic, the others see the whole grid; or a list for each stage or block, None for the whole grid.
            A setting of None is the default.

    Returns:
        The model; `model.creation` holds the arguments of this call, as JSON can hold them, and with the authors'
        weights `model.pretrained_cfg` how they take images: mean, std, crop, as timm's networks have it.

    Raises:
        SubquadError: for a name, a setting or a number that does not fit, in one line.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise SubquadError(f"dtype must be one of floating-point numbers, as torch.bfloat16 is, got {dtype}")
    weights = row_of(name) if pretrained else ""
    sizes: dict[str, Any] = {"img_size": img_size, "built_for": built_for, "in_chans": in_chans}
    sizes |= {"num_classes": num_classes, "depth": depth, "depths": depths}
    model = assemble(name, attention=attention, **sizes, device=device, **settings)
    if pretrained:
        load_pretrained(model, weights)
        # as timm's have it: what pixels are normalised with, and how images are cut
        about: Any = model
        about.pretrained_cfg = default_cfg(network_of(weights)) | {"num_classes": model.num_classes}
    return model if dtype is None else model.to(dtype)
