"""The 80 kinds of objects in COCO, in the order of its categories."""

from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

COCO_CLASSES: tuple[str, ...] = tuple(
    # numbers without objects, and that of no object
    name
    for name in MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    if name not in ("N/A", "__background__")
)
