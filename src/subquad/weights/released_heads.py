"""The layouts of released detectors and segmenters, as mmdetection and mmsegmentation write them: a table a head.

`backbone.` is in front of what classifiers of the host have, see `released`; the rest is of the head. A rule is a
pattern and what it becomes; the first that matches is taken.
"""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from subquad.weights.released import family_of, to_our_layout

NECK = [
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"{fpn}inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"{fpn}layer_blocks.\1.0."),
]
"""A feature pyramid network, at the place `{fpn}`."""

RPN = [
    (r"^rpn_head\.rpn_conv\.", "network.rpn.head.conv.0.0."),
    (r"^rpn_head\.rpn_cls\.", "network.rpn.head.cls_logits."),
    (r"^rpn_head\.rpn_reg\.", "network.rpn.head.bbox_pred."),
]

HEADS: dict[str, list[tuple[str, str]]] = {
    "retinanet": [
        (r"^neck\.fpn_convs\.3\.conv\.", "{fpn}extra_blocks.p6."),
        (r"^neck\.fpn_convs\.4\.conv\.", "{fpn}extra_blocks.p7."),
        *NECK,
        (r"^bbox_head\.cls_convs\.(\d)\.conv\.", r"network.head.classification_head.conv.\1.0."),
        (r"^bbox_head\.reg_convs\.(\d)\.conv\.", r"network.head.regression_head.conv.\1.0."),
        (r"^bbox_head\.retina_cls\.", "network.head.classification_head.cls_logits."),
        (r"^bbox_head\.retina_reg\.", "network.head.regression_head.bbox_reg."),
    ],
    "mask_rcnn": [
        *NECK,
        *RPN,
        (r"^roi_head\.bbox_head\.shared_fcs\.0\.", "network.roi_heads.box_head.fc6."),
        (r"^roi_head\.bbox_head\.shared_fcs\.1\.", "network.roi_heads.box_head.fc7."),
        (r"^roi_head\.bbox_head\.fc_cls\.", "network.roi_heads.box_predictor.cls_score."),
        (r"^roi_head\.bbox_head\.fc_reg\.", "network.roi_heads.box_predictor.bbox_pred."),
        (r"^roi_head\.mask_head\.convs\.(\d)\.conv\.", r"network.roi_heads.mask_head.\1.0."),
        (r"^roi_head\.mask_head\.upsample\.", "network.roi_heads.mask_predictor.conv5_mask."),
        (r"^roi_head\.mask_head\.conv_logits\.", "network.roi_heads.mask_predictor.mask_fcn_logits."),
    ],
    "cascade_mask_rcnn": [
        *NECK,
        *RPN,
        (
            r"^roi_head\.bbox_head\.(\d)\.shared_convs\.(\d)\.conv\.",
            r"network.roi_heads.stages.\1.box_head.\2.0.",
        ),
        (r"^roi_head\.bbox_head\.(\d)\.shared_convs\.(\d)\.bn\.", r"network.roi_heads.stages.\1.box_head.\2.1."),
        (r"^roi_head\.bbox_head\.(\d)\.shared_fcs\.0\.", r"network.roi_heads.stages.\1.box_head.5."),
        (r"^roi_head\.bbox_head\.(\d)\.fc_cls\.", r"network.roi_heads.stages.\1.box_predictor.cls_score."),
        (r"^roi_head\.bbox_head\.(\d)\.fc_reg\.", r"network.roi_heads.stages.\1.box_predictor.bbox_pred."),
        (r"^roi_head\.mask_head\.(\d)\.convs\.(\d)\.conv\.", r"network.roi_heads.stages.\1.mask_head.\2.0."),
        (r"^roi_head\.mask_head\.(\d)\.upsample\.", r"network.roi_heads.stages.\1.mask_predictor.conv5_mask."),
        (
            r"^roi_head\.mask_head\.(\d)\.conv_logits\.",
            r"network.roi_heads.stages.\1.mask_predictor.mask_fcn_logits.",
        ),
    ],
    "fpn": [
        *NECK,
        # doublings without weights stand between
        (r"^decode_head\.scale_heads\.(\d)\.0\.conv\.", r"decoder.scale_heads.\1.0.0."),
        (r"^decode_head\.scale_heads\.(\d)\.0\.bn\.", r"decoder.scale_heads.\1.0.1."),
        (r"^decode_head\.scale_heads\.(\d)\.2\.conv\.", r"decoder.scale_heads.\1.1.0."),
        (r"^decode_head\.scale_heads\.(\d)\.2\.bn\.", r"decoder.scale_heads.\1.1.1."),
        (r"^decode_head\.scale_heads\.(\d)\.4\.conv\.", r"decoder.scale_heads.\1.2.0."),
        (r"^decode_head\.scale_heads\.(\d)\.4\.bn\.", r"decoder.scale_heads.\1.2.1."),
        (r"^decode_head\.conv_seg\.", "head.1."),
    ],
    "upernet": [
        (r"^decode_head\.psp_modules\.(\d)\.1\.conv\.", r"decoder.psp.blocks.\1.1.0."),
        (r"^decode_head\.psp_modules\.(\d)\.1\.bn\.", r"decoder.psp.blocks.\1.1.1."),
        (r"^decode_head\.bottleneck\.conv\.", "decoder.psp.out_conv.0."),
        (r"^decode_head\.bottleneck\.bn\.", "decoder.psp.out_conv.1."),
        (r"^decode_head\.fpn_bottleneck\.conv\.", "decoder.fusion_block.0."),
        (r"^decode_head\.fpn_bottleneck\.bn\.", "decoder.fusion_block.1."),
        # the decoder counts from the coarsest of the three
        (r"^decode_head\.lateral_convs\.0\.conv\.", "decoder.fpn_lateral_blocks.2.conv_norm_relu.0."),
        (r"^decode_head\.lateral_convs\.0\.bn\.", "decoder.fpn_lateral_blocks.2.conv_norm_relu.1."),
        (r"^decode_head\.lateral_convs\.1\.conv\.", "decoder.fpn_lateral_blocks.1.conv_norm_relu.0."),
        (r"^decode_head\.lateral_convs\.1\.bn\.", "decoder.fpn_lateral_blocks.1.conv_norm_relu.1."),
        (r"^decode_head\.lateral_convs\.2\.conv\.", "decoder.fpn_lateral_blocks.0.conv_norm_relu.0."),
        (r"^decode_head\.lateral_convs\.2\.bn\.", "decoder.fpn_lateral_blocks.0.conv_norm_relu.1."),
        (r"^decode_head\.fpn_convs\.0\.conv\.", "decoder.fpn_conv_blocks.2.0."),
        (r"^decode_head\.fpn_convs\.0\.bn\.", "decoder.fpn_conv_blocks.2.1."),
        (r"^decode_head\.fpn_convs\.1\.conv\.", "decoder.fpn_conv_blocks.1.0."),
        (r"^decode_head\.fpn_convs\.1\.bn\.", "decoder.fpn_conv_blocks.1.1."),
        (r"^decode_head\.fpn_convs\.2\.conv\.", "decoder.fpn_conv_blocks.0.0."),
        (r"^decode_head\.fpn_convs\.2\.bn\.", "decoder.fpn_conv_blocks.0.1."),
        (r"^decode_head\.conv_seg\.", "head.1."),
        (r"^auxiliary_head\.convs\.0\.conv\.", "auxiliary.0."),
        (r"^auxiliary_head\.convs\.0\.bn\.", "auxiliary.1."),
        (r"^auxiliary_head\.conv_seg\.", "auxiliary.4."),
    ],
}
"""Rename rules by head."""

PLACES: dict[str, dict[str, str]] = {
    head: {"pyramid": "pyramid.", "fpn": "decoder.fpn."}
    if head in ("fpn", "upernet")
    else {"pyramid": "network.backbone.pyramid.", "fpn": "network.backbone.fpn."}
    for head in HEADS
}
"""Where the maps and the feature pyramid are, in segmenters and in detectors."""

MARKS: dict[str, str] = {
    r"^bbox_head\.retina_cls\.weight$": "retinanet",
    r"^roi_head\.bbox_head\.fc_cls\.weight$": "mask_rcnn",
    r"^roi_head\.bbox_head\.0\.fc_cls\.weight$": "cascade_mask_rcnn",
    r"^decode_head\.scale_heads\.0\.0\.conv\.weight$": "fpn",
    r"^decode_head\.psp_modules\.0\.1\.conv\.weight$": "upernet",
}
"""By which entry a head is recognised."""

ANCHORS = 9
"""Of RetinaNet, at every place of a map."""

NEVER = -1e4
"""The logit of a class that no box has."""


def _background_first(rows: Tensor) -> Tensor:
    """Logits whose last row is that of no object."""
    return rows.roll(1, 0)


def _background_added(rows: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Rows of the classes, `count` for each, behind as many for no object, which the released head has not."""
    return torch.cat([rows.new_full((count, *rows.shape[1:]), value), rows])


def _background_in_anchors(rows: Tensor) -> Tensor:
    """RetinaNet's logits: the classes of one anchor after those of another, each behind one that no box has."""
    by_anchor = rows.unflatten(0, (ANCHORS, -1))
    value = NEVER if rows.dim() == 1 else 0.0
    return torch.cat([by_anchor.new_full((ANCHORS, 1, *rows.shape[1:]), value), by_anchor], dim=1).flatten(0, 1)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    r"\.box_predictor\.cls_score\.(weight|bias)$": _background_first,
    r"\.box_predictor\.bbox_pred\.(weight|bias)$": lambda rows: _background_added(rows, 4),
    r"\.mask_predictor\.mask_fcn_logits\.(weight|bias)$": lambda rows: _background_added(rows, 1),
    r"\.classification_head\.cls_logits\.(weight|bias)$": _background_in_anchors,
}
"""What is done to rows of our entries: label 0 is that of no object here, and the first object's there."""


def head_of(names: Iterable[str]) -> str | None:
    """The head whose released layout these entry names have, or None."""
    names = list(names)
    return next((head for mark, head in MARKS.items() if any(re.search(mark, name) for name in names)), None)


def to_our_network(state: dict[str, Tensor], head: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """A released detector or segmenter under our names and in our shapes.

    Args:
        state: the authors' entries; what no rule knows keeps its name.
        head: whose layout it is.
        shapes: of our network's entries.
    """
    ours, inside = {}, {}
    pyramid = PLACES[head]["pyramid"]
    for name, tensor in state.items():
        if name.startswith("backbone."):
            inside[name.removeprefix("backbone.")] = tensor
            continue
        target = name_in_network(name, head)
        for pattern, change in ROWS.items():
            if re.search(pattern, target):
                tensor = change(tensor)
        ours[target] = tensor
    family = family_of(inside)
    if family == "swin":
        # the norms of the maps, which stand beside the backbone here
        for name in [name for name in inside if re.match(r"norm\d\.", name)]:
            ours[f"{pyramid}norms.{name.removeprefix('norm')}"] = inside.pop(name)
    if family is not None:
        within = f"{pyramid}backbone."
        own = {name.removeprefix(within): shape for name, shape in shapes.items() if name.startswith(within)}
        inside = to_our_layout(inside, family, own)
    return ours | {f"{pyramid}backbone.{name}": tensor for name, tensor in inside.items()}


def name_in_network(name: str, head: str) -> str:
    """Where an entry that is not the backbone's goes, under the name of ours."""
    for pattern, replacement in HEADS[head]:
        if re.search(pattern, name):
            return re.sub(pattern, replacement.replace("{fpn}", PLACES[head]["fpn"]), name)
    return name
