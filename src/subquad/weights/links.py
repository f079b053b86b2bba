"""Where the authors' weights are: a row a file, by the network of ours that it fits.

The links are those that the authors' pages had when they were written down; they were not tried from where this was
written. What a page says of its licence is for whoever uses the weights to look up: `PAGES` has what could be seen.
"""

import difflib
from dataclasses import dataclass

from subquad.errors import SubquadError, shown
from subquad.weights.dense_links import DENSE_LINKS, DenseLink, dense_row


@dataclass(frozen=True)
class Page:
    """Whose page has the links, and what it says about who may use the weights."""

    url: str
    licence: str


PAGES: dict[str, Page] = {
    "agent": Page("https://github.com/LeapLabTHU/Agent-Attention", "no licence file"),
    "inline": Page("https://github.com/LeapLabTHU/InLine", "not known here"),
    "focused": Page("https://github.com/LeapLabTHU/FLatten-Transformer", "no licence file"),
    "soft": Page("https://github.com/fudan-zvg/SOFT", "not known here"),
    "circulant": Page("https://github.com/LeapLabTHU/Circulant-Attention", "MIT"),
    "pola": Page("https://huggingface.co/ZachMeng/PolaFormer", "not known here"),
    "mlla": Page("https://github.com/LeapLabTHU/MLLA", "MIT"),
    "mala": Page("https://huggingface.co/aldjalkdf/MAViT", "no licence file"),
    "rala": Page("https://huggingface.co/aldjalkdf/RAVLT", "MIT by its model card, no licence file"),
    "ttt": Page("https://github.com/LeapLabTHU/ViTTT", "MIT"),
    "polapp": Page("https://pan.baidu.com/s/1tjG-Qq2zFwN_HZswAzxarQ?pwd=atba", "no licence file"),
}
"""By mechanism: where the links stand."""


@dataclass(frozen=True)
class Link:
    """A file of the authors'.

    Attributes:
        url: its link; or that of a repository of the hub, whose files are listed when one is asked for; or that of a
            share, from which a person has to fetch it.
        page: a name of PAGES.
        label: what the page calls the file: the configuration, or the network.
        top1: ImageNet-1k accuracy in per cent as the page prints it, None where it prints none.
        px: side of the images of that figure.
        tag: how timm tells the file from others of a network: "r448" in "agent_deit_small.r448".
        key: under which key of the file the weights of that figure lie, where it is not the usual one.
        remark: what to know about the file, in words.
    """

    url: str
    page: str
    label: str
    top1: float | None
    px: int = 224
    tag: str = ""
    key: str | None = None
    remark: str = ""

    @property
    def is_repository(self) -> bool:
        """Whether the link is of a repository of the Hugging Face hub."""
        return self.url == PAGES[self.page].url and not self.is_share

    @property
    def is_share(self) -> bool:
        """Whether the link is of a folder that is opened by a browser alone: files are put in their place by hand."""
        return self.url.startswith("https://pan.baidu.com/")


def _tsinghua(page: str, share: str, label: str, top1: float, **more: object) -> Link:
    return Link(f"https://cloud.tsinghua.edu.cn/f/{share}/?dl=1", page, label, top1, **more)  # type: ignore[arg-type]


def agent(share: str, label: str, top1: float, **more: object) -> Link:
    """Make a link of Agent Attention, agent_transformer/README.md."""
    return _tsinghua("agent", share, label, top1, **more)


def inline(share: str, label: str, top1: float, **more: object) -> Link:
    """Make a link of InLine, README.md."""
    return _tsinghua("inline", share, label, top1, **more)


def focused(share: str, label: str, top1: float, **more: object) -> Link:
    """Make a link of FLatten, README.md."""
    return _tsinghua("focused", share, label, top1, **more)


def mlla(share: str, label: str, top1: float, **more: object) -> Link:
    """Of MLLA, README.md."""
    return _tsinghua("mlla", share, label, top1, **more)


def circulant(share: str, label: str, top1: float) -> Link:
    """Of circulant attention, README.md."""
    return _tsinghua("circulant", share, label, top1)


def ttt(share: str, label: str, top1: float, **more: object) -> Link:
    """Of ViT³ and H-ViT³, README.md."""
    return _tsinghua("ttt", share, label, top1, **more)


def soft(identity: str, label: str, top1: float, **more: object) -> Link:
    """Make a link of SOFT, README.md; the files lie on Google Drive."""
    url = f"https://drive.google.com/uc?export=download&id={identity}"
    return Link(url, "soft", label, top1, **more)  # type: ignore[arg-type]


def pola(label: str, top1: float | None = None, **more: object) -> Link:
    """Make a link of PolaFormer: a repository whose file names were not known when this was written."""
    return Link(PAGES["pola"].url, "pola", label, top1, **more)  # type: ignore[arg-type]


def mala(label: str, top1: float) -> Link:
    """Of MALA: a repository whose file names were not known when this was written."""
    return Link(PAGES["mala"].url, "mala", label, top1)


def rala(label: str, top1: float) -> Link:
    """Of RALA, README.md."""
    return Link(f"{PAGES['rala'].url}/resolve/main/{label}.pth", "rala", label, top1)


def polapp(label: str, top1: float) -> Link:
    """Of PolaFormer++, README.md: one share of all files, whose names were not known when this was written."""
    return Link(PAGES["polapp"].url, "polapp", label, top1)


WITHOUT_RIDGE = 'trained in 2021 without ridge: create_model("soft_tiny", inverse="plain", pretrained=True)'
WITH_MESA = "trained with MESA, a loss against the average of its own weights"
ITS_MODEL = "the published figure is that of the file's `model`, which is taken, not of its moving average"

LINKS: dict[str, Link] = {
    "agent_deit_tiny": agent("57e0904221824ee7b7af", "agent_deit_t", 74.9),
    "agent_deit_small": agent("fdd43304372541db8ea7", "agent_deit_s", 80.5),
    "agent_deit_small_448": agent("a228f86241c445f1969b", "agent_deit_s_448", 83.1, px=448, tag="r448"),
    "agent_deit_base": agent("5115f15fdd7e4ab58fbc", "agent_deit_b", 82.0),
    "agent_pvt_tiny": agent("13fdf0e0a7c5498c934f", "agent_pvt_t", 78.4),
    "agent_pvt_small": agent("36b8be9a8863456685a3", "agent_pvt_s", 82.2),
    "agent_pvt_medium": agent("4d00ecacf18b45f9b88c", "agent_pvt_m", 83.4),
    "agent_pvt_medium_256": agent("654df734121643b19c52", "agent_pvt_m_256", 83.8, px=256, tag="r256"),
    "agent_pvt_large": agent("040cfe0cfbbe4762ad09", "agent_pvt_b", 83.7),
    "agent_swin_tiny": agent("a2ddc1190c224f768a41", "agent_swin_t", 82.6),
    "agent_swin_small": agent("f607172c9fea4d6e99bb", "agent_swin_s", 83.7),
    "agent_swin_small_288": agent("09760394e93b4046a25e", "agent_swin_s_288", 84.1, px=288, tag="r288"),
    "agent_swin_base": agent("4fcd2d0114bb490483c3", "agent_swin_b", 84.0),
    "agent_swin_base_384": agent("bb84ee9058954706a557", "agent_swin_b_384", 84.9, px=384, tag="r384"),
    "agent_cswin_tiny": agent("8c562a74441e46d5902b", "agent_cswin_t", 83.1),
    "agent_cswin_small": agent("30eb8af675bc4b7a8747", "agent_cswin_s", 83.9),
    "agent_cswin_base": agent("c8035b0839b2410c8c9f", "agent_cswin_b", 84.7),
    "agent_cswin_base_384": agent("1239be0df44b47719432", "agent_cswin_b_384", 85.8, px=384, tag="r384"),
    "inline_deit_tiny": inline("1d6b8191ad6d4114b291", "inline_deit_t", 74.5),
    "inline_deit_small": inline("2f3898b07e9247f3beb3", "inline_deit_s", 80.2, px=288),
    "inline_deit_base": inline("10bdd726d4b0435eb34e", "inline_deit_b", 82.3, px=448),
    "inline_pvt_tiny": inline("90ac52b1555b401eb5e6", "inline_pvt_t", 78.2),
    "inline_pvt_small": inline("1ab953b2479d433080a3", "inline_pvt_s", 82.0),
    "inline_pvt_medium": inline("a72aec31e6084bc0a280", "inline_pvt_m", 83.2),
    "inline_pvt_large": inline("efd91318ba964f01b288", "inline_pvt_b", 83.6),
    "inline_swin_tiny": inline("32810869fcc34410966b", "inline_swin_t", 82.4),
    "inline_swin_small": inline("e9657fd247c04c7cb1a1", "inline_swin_s", 83.6),
    "inline_swin_base": inline("bf23564bb64c420aafe1", "inline_swin_b", 84.1),
    "inline_cswin_tiny": inline("49fa2ecc543647c4b970", "inline_cswin_t", 83.2),
    "inline_cswin_small": inline("59f4e65f776f4052b93c", "inline_cswin_s", 83.8),
    "inline_cswin_base": inline("91e17121df284ae38521", "inline_cswin_b", 84.5),
    "focused_pvt_tiny": focused("3ab1d773f19d45648690", "flatten_pvt_t", 77.8),
    "focused_swin_tiny": focused("e1518e76703e4e57a7f2", "flatten_swin_t", 82.1),
    "focused_swin_small": focused("94188e52af354bf4a88b", "flatten_swin_s", 83.5),
    "focused_swin_base": focused("7a9e5186bad04e7fb3a9", "flatten_swin_b", 83.8),
    "focused_swin_base_384": focused("0d0330cf2e5249f1abb6", "flatten_swin_b_384", 85.0, px=384, tag="r384"),
    "focused_cswin_tiny": focused("48ba765ba8b0451d9d5a", "flatten_cswin_t", 83.1, key="model", remark=ITS_MODEL),
    "focused_pvt_v2_b0": focused("5d1f01532b104da28e7b", "flatten_pvt_v2_b0", 71.1),
    "soft_tiny": soft("1S04DCotIOkP0DaBb8WStQ513z82qT9de", "SOFT_Tiny", 79.3, remark=WITHOUT_RIDGE),
    "soft_tiny.cuda": soft("1inDKh3Wz_2KQgGH_2ywU5H_gLKZpIz_u", "SOFT_Tiny_cuda", 79.3, tag="cuda"),
    "soft_norm_tiny": soft("1Isy5b9v_4pyIXDqhKPNRq3WKH0etDlfl", "SOFT_Tiny_norm", 79.4),
    "soft_norm_small": soft("1OBjn7FzVdNP1Urqxq7X0yDykyPhxAAW1", "SOFT_Small_norm", 82.4),
    "soft_norm_medium": soft("1K2C6daaJn3jwurWh38uvV7rexirWjuzh", "SOFT_Medium_norm", 83.1),
    "soft_norm_large": soft("1aRYuF_gbBGyiXUDKEcpHJmM04SdvTUdP", "SOFT_Large_norm", 83.3),
    "pola_pvt_tiny": pola("pola_pvt_t", 78.8),
    "pola_pvt_small": pola("pola_pvt_s", 81.9),
    "pola_pvt_medium": pola("pola_pvt_m"),
    "pola_pvt_large": pola("pola_pvt_b"),
    "pola_swin_tiny": pola("pola_swin_t", 82.6),
    "pola_swin_small": pola("pola_swin_s", 83.6),
    "pola_swin_base": pola("pola_swin_b", 83.8),
    "pola_swin_base_384": pola("pola_swin_b_384", px=384, tag="r384"),
    "mlla_tiny": mlla("7a19712877cb4242889c", "MLLA-T", 83.5),
    "mlla_small": mlla("0e5d0b1409d540aaa80c", "MLLA-S", 84.4),
    "mlla_base": mlla("91c85c5a1061496d8796", "MLLA-B", 85.3),
    "mala_tiny": mala("MALA_T", 82.9),
    "mala_small": mala("MALA_S", 84.7),
    "mala_base": mala("MALA_B", 85.7),
    "mala_large": mala("MALA_L", 86.0),
    "circulant_deit_tiny": circulant("51b342f641b440a9ad53", "CA-DeiT-T", 75.0),
    "circulant_deit_small": circulant("02d8767a0981445b9606", "CA-DeiT-S", 81.0),
    "circulant_deit_base": circulant("0dee573498554f11a6c7", "CA-DeiT-B", 82.3),
    "rala_tiny": rala("RAVLT_T", 82.8),
    "rala_small": rala("RAVLT_S", 84.4),
    "rala_base": rala("RAVLT_B", 85.5),
    "rala_large": rala("RAVLT_L", 86.1),
    "polapp_b0": polapp("PolaFormer++ b0", 76.9),
    "polapp_b1": polapp("PolaFormer++ b1", 79.1),
    "polapp_b2": polapp("PolaFormer++ b2", 82.8),
    "polapp_b3": polapp("PolaFormer++ b3", 84.3),
    "polapp_b4": polapp("PolaFormer++ b4", 85.4),
    "polapp_b5": polapp("PolaFormer++ b5", 85.6),
    "ttt_vit3_tiny": ttt("e12d1bd1c20c4e06a2da", "ViT³-T", 76.5),
    "ttt_vit3_small": ttt("4ab59ca54b474dff9b70", "ViT³-S", 81.6),
    "ttt_vit3_base": ttt("c9e9bb09f85d449ab8cf", "ViT³-B", 82.6),
    "ttt_hvit3_tiny": ttt("f0c7c73ceabe49b7b161", "H-ViT³-T", 84.0, remark=WITH_MESA),
    "ttt_hvit3_small": ttt("3eeab8621a7f43929a87", "H-ViT³-S", 84.9, remark=WITH_MESA),
    "ttt_hvit3_base": ttt("1d0d7fb840254275b29d", "H-ViT³-B", 85.5, remark=WITH_MESA),
}
"""By network, or by network and tag where several files are of one."""


def network_of(name: str) -> str:
    """The network that a row of LINKS is for."""
    return name.partition(".")[0]


def _tagged(name: str) -> str:
    """A row's name as timm writes it: the size without its pixels, and the tag."""
    network, tag = network_of(name), LINKS[name].tag
    return f"{network.removesuffix(f'_{tag[1:]}')}.{tag}" if tag else network


TAGS: dict[str, str] = {_tagged(name): name for name, link in LINKS.items() if link.tag}
"""Rows of LINKS by what timm calls them: "agent_deit_small.r448" is "agent_deit_small_448"."""


def row_of(name: str) -> str:
    """The row of LINKS of a network, also by its name with a tag.

    Raises:
        SubquadError: nobody released weights of it, as far as is known here.
    """
    row = TAGS.get(name, name)
    if dense_row(row):
        raise SubquadError(f"{row} is a whole network with a head: subquad.open_trained('pretrained/{row}') opens it")
    if row not in LINKS:
        # near enough for a slip; the same network with another mechanism is no advice
        near = difflib.get_close_matches(name, [*LINKS, *TAGS, *DENSE_LINKS], n=3, cutoff=0.85)
        asked = f"did you mean {' or '.join(near)}? See" if near else "see"
        raise SubquadError(
            f"no released weights of {shown(name)} are known here: {asked} `subquad list models --pretrained`"
        )
    return row


def any_row_of(name: str) -> str:
    """The row of LINKS or of DENSE_LINKS of this name, as `row_of`."""
    return dense_row(name) or row_of(name)


def link_of(row: str) -> Link | DenseLink:
    """The file of a row of either table."""
    return DENSE_LINKS[row] if row in DENSE_LINKS else LINKS[row]
