"""The 80 kinds of objects in COCO, in the order of its categories, and by which other names networks know them."""

from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

COCO_CLASSES: tuple[str, ...] = tuple(
    # numbers without objects, and that of no object
    name
    for name in MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    if name not in ("N/A", "__background__")
)

OTHER_NAMES = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""What darknet calls some of them, and after it networks that were trained on COCO, as RT-DETR, by what COCO does."""


def same_name(name: str) -> str:
    """The name of a class, where it is another one of COCO's, that of COCO."""
    return OTHER_NAMES.get(name, name)
