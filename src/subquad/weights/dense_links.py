"""Where the authors' detectors and segmenters are: a row a file, by its backbone and its head.

The links and figures are those of LeapLabTHU/Agent-Attention, downstream/README.md; the links were not tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DenseLink:
    """A file of the authors': a whole network for detection or segmentation.

    Attributes:
        url: its link.
        label: the configuration that it was trained with, by the name that the page has for it.
        task: whose network it is, "detect" or "segment".
        network: the backbone, a row of NETWORKS.
        head: the detector or the decoder.
        figures: what the page prints, in per cent, by name.
        params: millions of parameters, as the page prints them.
        page: a name of PAGES.
        remark: what to know about the file, in words.
    """

    url: str
    label: str
    task: str
    network: str
    head: str
    figures: Mapping[str, float] = field(hash=False)
    params: int
    page: str = "agent"
    remark: str = ""


PVT, SWIN = "_12-16-28-28", "_9-12-14-7"
"""Agents of the four stages, on a side, as the names of configurations end."""

ITS_NAME = "the page names a configuration agent_swin_b_mrcnn_3x for it, which does not exist, in its table of cascades"


def _url(share: str) -> str:
    return f"https://cloud.tsinghua.edu.cn/f/{share}/?dl=1"


def masks(share: str, label: str, network: str, params: int, box: float, mask: float, **more: str) -> DenseLink:
    """Make a link of Mask R-CNN, or of the cascade of it."""
    head = "cascade_mask_rcnn" if "_crcnn_" in label else "mask_rcnn"
    return DenseLink(_url(share), label, "detect", network, head, {"box AP": box, "mask AP": mask}, params, **more)


def boxes(share: str, label: str, network: str, params: int, box: float) -> DenseLink:
    """Make a link of RetinaNet."""
    return DenseLink(_url(share), label, "detect", network, "retinanet", {"box AP": box}, params)


def scenes(share: str, label: str, network: str, params: int, miou: float, accuracy: float) -> DenseLink:
    """Make a link of Semantic FPN or UPerNet."""
    figures = {"mIoU": miou, "class accuracy": accuracy}
    return DenseLink(_url(share), label, "segment", network, label.partition("_")[0], figures, params)


DENSE_LINKS: dict[str, DenseLink] = {
    "agent_swin_tiny/mask_rcnn_1x": masks(
        "258e208469084e6abf26", f"agent_swin_t_mrcnn_1x{SWIN}", "agent_swin_tiny", 48, 44.6, 40.7
    ),
    "agent_swin_tiny/mask_rcnn_3x": masks(
        "e0ab821875704960a505", f"agent_swin_t_mrcnn_3x{SWIN}", "agent_swin_tiny", 48, 47.3, 42.7
    ),
    "agent_swin_small/mask_rcnn_1x": masks(
        "52714305c21a4104bbc5", f"agent_swin_s_mrcnn_1x{SWIN}", "agent_swin_small", 69, 47.2, 42.7
    ),
    "agent_swin_small/mask_rcnn_3x": masks(
        "b78f6ff837b84b61b122", f"agent_swin_s_mrcnn_3x{SWIN}", "agent_swin_small", 69, 48.9, 43.8
    ),
    "agent_pvt_tiny/mask_rcnn_1x": masks(
        "79cbc3a7b7a24a0b92c1", f"agent_pvt_t_mrcnn_1x{PVT}", "agent_pvt_tiny", 31, 41.4, 38.7
    ),
    "agent_pvt_small/mask_rcnn_1x": masks(
        "8e333aa6b55e45d4b76c", f"agent_pvt_s_mrcnn_1x{PVT}", "agent_pvt_small", 40, 44.5, 41.2
    ),
    "agent_pvt_medium/mask_rcnn_1x": masks(
        "6401bf2b227046a58fc3", f"agent_pvt_m_mrcnn_1x{PVT}", "agent_pvt_medium", 56, 45.9, 42.0
    ),
    "agent_pvt_large/mask_rcnn_1x": masks(
        "8fa3d506f1e24099b99f", f"agent_pvt_l_mrcnn_1x{PVT}", "agent_pvt_large", 68, 46.9, 42.8
    ),
    "agent_swin_tiny/cascade_mask_rcnn_1x": masks(
        "39d78fddf90241e58db0", f"agent_swin_t_crcnn_1x{SWIN}", "agent_swin_tiny", 86, 49.2, 42.7
    ),
    "agent_swin_tiny/cascade_mask_rcnn_3x": masks(
        "ed2af911d0e64d359aa3", f"agent_swin_t_crcnn_3x{SWIN}", "agent_swin_tiny", 86, 51.4, 44.5
    ),
    "agent_swin_small/cascade_mask_rcnn_3x": masks(
        "3d092a23b935458b98ed", f"agent_swin_s_crcnn_3x{SWIN}", "agent_swin_small", 107, 52.6, 45.5
    ),
    "agent_swin_base/cascade_mask_rcnn_3x": masks(
        "b3a628e668eb460ca532", f"agent_swin_b_crcnn_3x{SWIN}", "agent_swin_base", 145, 52.6, 45.3, remark=ITS_NAME
    ),
    "agent_pvt_tiny/retinanet_1x": boxes(
        "d3c1dbe0243d4775aafd", f"agent_pvt_t_rtn_1x{PVT}", "agent_pvt_tiny", 21, 40.3
    ),
    "agent_pvt_small/retinanet_1x": boxes(
        "d427a52511f64ab5a928", f"agent_pvt_s_rtn_1x{PVT}", "agent_pvt_small", 30, 44.1
    ),
    "agent_pvt_medium/retinanet_1x": boxes(
        "81d6c824d9f244a192a3", f"agent_pvt_m_rtn_1x{PVT}", "agent_pvt_medium", 46, 45.8
    ),
    "agent_pvt_large/retinanet_1x": boxes(
        "2dc5b1f685fd4ecf8db5", f"agent_pvt_l_rtn_1x{PVT}", "agent_pvt_large", 58, 46.8
    ),
    "agent_swin_tiny/upernet_160k": scenes(
        "280481ee38024bce8364", f"upernet_agent_swin_t{SWIN}", "agent_swin_tiny", 61, 46.68, 58.53
    ),
    "agent_pvt_tiny/fpn_40k": scenes(
        "5e7bf988b4b74efe8654", f"fpn_agent_pvt_t{PVT}", "agent_pvt_tiny", 15, 40.18, 51.76
    ),
    "agent_pvt_small/fpn_40k": scenes(
        "11332fa565e443678e4c", f"fpn_agent_pvt_s{PVT}", "agent_pvt_small", 24, 44.18, 56.17
    ),
    "agent_pvt_large/fpn_40k": scenes(
        "0da8b58581214f85974f", f"fpn_agent_pvt_l{PVT}", "agent_pvt_large", 52, 46.52, 58.50
    ),
}
"""By backbone, head and schedule."""


def dense_row(name: str) -> str | None:
    """The row of DENSE_LINKS of this name, which may lack the schedule where there is one only; None for none."""
    if name in DENSE_LINKS:
        return name
    several = [row for row in DENSE_LINKS if row.rpartition("_")[0] == name]
    return several[0] if len(several) == 1 else None
