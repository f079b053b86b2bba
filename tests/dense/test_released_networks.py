"""The authors' detectors and segmenters by name: every row, from a server on the loopback with files as theirs are."""

import io
import json
import re
from dataclasses import replace

import pytest
import torch
import worlds
from PIL import Image
from released_files import golden_entries, pickled, released_network
from serving import Answer, serving

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.models import NETWORKS, VARIANTS, pretrained
from subquad.tasks import TASKS, released_networks
from subquad.tasks.backbone_arguments import backbone_arguments, build_backbone
from subquad.tasks.segmentation import SegmentRecipe
from subquad.weights import downloading
from subquad.weights.dense_links import DENSE_LINKS, dense_row
from subquad.weights.files import fitted
from subquad.weights.fitting import misfits
from subquad.weights.links import PAGES, any_row_of

ROWS = sorted(DENSE_LINKS)
# the smallest of each head in the fast tests
FAST = {
    "agent_pvt_tiny/mask_rcnn_1x",
    "agent_pvt_tiny/retinanet_1x",
    "agent_swin_tiny/cascade_mask_rcnn_3x",
    "agent_pvt_tiny/fpn_40k",
    "agent_swin_tiny/upernet_160k",
}
FAST_AND_SLOW = [row if row in FAST else pytest.param(row, marks=pytest.mark.slow) for row in ROWS]
PARAMETERS = {
    ("agent_pvt_tiny", "mask_rcnn"): 31_224_760,
    ("agent_pvt_small", "mask_rcnn"): 40_289_474,
    ("agent_pvt_medium", "mask_rcnn"): 55_576_154,
    ("agent_pvt_large", "mask_rcnn"): 68_392_588,
    ("agent_pvt_tiny", "retinanet"): 21_307_324,
    ("agent_pvt_small", "retinanet"): 30_372_038,
    ("agent_pvt_medium", "retinanet"): 45_658_718,
    ("agent_pvt_large", "retinanet"): 58_475_152,
    ("agent_swin_tiny", "mask_rcnn"): 48_409_212,
    ("agent_swin_small", "mask_rcnn"): 69_172_932,
    ("agent_swin_tiny", "cascade_mask_rcnn"): 86_244_414,
    ("agent_swin_small", "cascade_mask_rcnn"): 107_008_134,
    ("agent_swin_base", "cascade_mask_rcnn"): 145_303_874,
    ("agent_pvt_tiny", "fpn"): 15_323_998,
    ("agent_pvt_small", "fpn"): 24_388_712,
    ("agent_pvt_large", "fpn"): 52_491_826,
    ("agent_swin_tiny", "upernet"): 60_556_472,
}
"""Of the released networks, without buffers."""

GOLDENS = {
    "agent_pvt_tiny/mask_rcnn_1x",
    "agent_pvt_tiny/retinanet_1x",
    "agent_swin_tiny/cascade_mask_rcnn_1x",
    "agent_pvt_tiny/fpn_40k",
    "agent_swin_tiny/upernet_160k",
}


def meta_network(link):
    with torch.device("meta"):
        return pretrained.MAKERS[link.task](link)[0]


@pytest.mark.parametrize("row", FAST_AND_SLOW)
def test_a_file_of_every_link_fits_its_network_entry_by_entry(row):
    link = DENSE_LINKS[row]
    network = meta_network(link)
    state = released_network(link, network.state_dict())
    if row in GOLDENS:
        assert {name: list(tensor.shape) for name, tensor in state.items()} == golden_entries(link.head)
    buffers = ("relative_position_index", "running_mean", "running_var", "num_batches_tracked")
    count = sum(tensor.numel() for name, tensor in state.items() if not name.endswith(buffers))
    assert count == PARAMETERS[link.network, link.head]
    adapted = fitted(state, network, row)
    assert adapted.family == link.head and not adapted.resized
    assert not misfits(adapted.state, network.state_dict())
    assert round(count / 1e6) == link.params


def test_links_are_whole():
    assert len(DENSE_LINKS) == 20 and len({link.url for link in DENSE_LINKS.values()}) == 20
    for row, link in DENSE_LINKS.items():
        network, _, head = row.partition("/")
        assert network == link.network and network in NETWORKS and head.rpartition("_")[0] == link.head
        assert re.fullmatch(r"https://cloud\.tsinghua\.edu\.cn/f/[0-9a-f]{20}/\?dl=1", link.url)
        assert link.page in PAGES and link.task in TASKS and link.head in TASKS[link.task].heads
        assert all(0 < value < 100 for value in link.figures.values())
    assert dense_row("agent_pvt_tiny/mask_rcnn") == "agent_pvt_tiny/mask_rcnn_1x"
    # two schedules
    assert dense_row("agent_swin_tiny/mask_rcnn") is None
    with pytest.raises(SubquadError, match=r"did you mean agent_swin_tiny/mask_rcnn_\dx or .*mask_rcnn_\dx\? See"):
        any_row_of("agent_swin_tiny/mask_rcnn")
    with pytest.raises(SubquadError, match=r"is a whole network with a head: subquad\.open_trained"):
        subquad.create_model("agent_pvt_tiny/mask_rcnn_1x", pretrained=True)


def test_classes_are_those_of_the_data_that_the_networks_were_trained_on():
    coco, ade20k = released_networks.COCO_CLASSES, released_networks.ADE20K_CLASSES
    assert len(set(coco)) == 80 and coco[:2] == ("person", "bicycle") and coco[-1] == "toothbrush"
    assert len(set(ade20k)) == 150 and ade20k[:3] == ("wall", "building", "sky") and ade20k[-1] == "flag"
    assert (ade20k.index("person"), ade20k.index("car"), ade20k.index("stove")) == (12, 20, 71)


TINY = {
    "pvt": {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2)},
    "swin": {"embed_dim": 8, "num_heads": (1,) * 4},
}
"""What stands for the backbones' sizes."""


def made_state(network):
    """A state dict of ours with numbers that differ from entry to entry; nothing of no object, as in released files."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, tensor in network.state_dict().items():
        kept = not tensor.is_floating_point() or name.endswith(("running_mean", "running_var"))
        state[name] = tensor if kept else 0.1 * torch.randn(tensor.shape, generator=generator)
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
            state[name] = state[name] + 1
        if ".bbox_pred." in name and ".rpn." not in name:
            state[name][:4] = 0
        if ".mask_fcn_logits." in name:
            state[name][:1] = 0
        if ".classification_head.cls_logits." in name:
            state[name].unflatten(0, (9, -1))[:, 0] = -1e4 if state[name].dim() == 1 else 0
    return state


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    """A server for the links, whose networks are made tiny; nothing is kept outside of the test's folder."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("SUBQUAD_WEIGHTS", raising=False)
    monkeypatch.setattr(downloading, "PAUSE", 0.001)
    # no kernels: they would be compiled into this test's folder
    monkeypatch.setattr("subquad.kernels.backends._asked", "eager")
    own = released_networks.arguments_of_link

    def tiny(link):
        arguments = own(link)
        sides = {"short_side": [64], "long_side": 96} if link.task == "detect" else {}
        return arguments | sides | {"head_channels": 8, "backbone": arguments["backbone"] | {"pooled_agents": [4] * 4}}

    monkeypatch.setattr(released_networks, "arguments_of_link", tiny)
    monkeypatch.setitem(released_networks.SCENE_INPUT, "short_side", 64)

    def put(row):
        link = DENSE_LINKS[row]
        network = NETWORKS[link.network]
        variant = VARIANTS[network.variant]
        attention = [stage if isinstance(stage, str) else stage[0] for stage in _stages(network.attention)]
        settings = {**network.settings, **TINY[variant.host]}
        monkeypatch.setitem(VARIANTS, network.variant, replace(variant, depths=(1, 1, 1, 1)))
        monkeypatch.setitem(NETWORKS, link.network, replace(network, attention=attention, settings=settings))
        state = made_state(pretrained.MAKERS[link.task](link)[0])
        server.answers[f"/{row}"] = [Answer(pickled(link, released_network(link, state)))]
        served = replace(link, url=f"{server.url}/{row}")
        monkeypatch.setitem(DENSE_LINKS, row, served)
        return state

    with serving() as server:
        server.put = put
        yield server


def _stages(attention):
    """A mechanism for each of four stages, the first of those that take turns in one."""
    if isinstance(attention, str):
        return [attention] * 4
    return ["agent" if not isinstance(stage, str) else stage for stage in attention]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("row", FAST_AND_SLOW)
def test_every_link_opens_by_name(row, shelf, tmp_path):
    state, link = shelf.put(row), DENSE_LINKS[row]
    trained = subquad.open_trained(f"pretrained/{row}", device="cpu")
    assert trained.task == link.task and len(trained.classes) in (80, 150) and not trained.model.training
    own = trained.model.state_dict()
    assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)
    assert trained.released["figures"] == link.figures and trained.released["url"] == link.url
    # a second time without asking
    again = subquad.open_trained(f"pretrained/{row}", task=link.task, device="cpu")
    assert again.fingerprint == trained.fingerprint and len(shelf.requests) == 1
    home = tmp_path / "home" / "weights"
    network, _, head = row.partition("/")
    assert {path.name for path in (home / network).iterdir() if path.suffix != ".lock"} == {
        f"{head}.safetensors",
        f"{head}.pth.json",
    }
    maps = trained.image_network(64).model(torch.rand(1, 3, 64, 64))
    assert len(maps) == (3 if link.head == "retinanet" else 4)
    Image.new("RGB", (70, 45), (200, 30, 90)).save(tmp_path / "a.png")
    (said,) = TASKS[link.task].predict(trained, [tmp_path / "a.png"], lambda line: None, output=tmp_path / "out")
    assert str(tmp_path / "a.png") in said.text and list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("row", ["agent_pvt_tiny/mask_rcnn_1x"])
def test_detectors_are_judged_asked_and_listed_by_name(row, shelf, tmp_path, capsys):
    shelf.put(row)
    data = worlds.objects(tmp_path / "objects", counts=(1, 2))
    file = data / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    names = enumerate(released_networks.COCO_CLASSES, start=1)
    content["categories"] = [{"id": k, "name": name} for k, name in names]
    file.write_text(json.dumps(content))
    assert main(["download", row]) == 0
    assert capsys.readouterr().out.endswith("mask_rcnn_1x.safetensors, published box AP 41.4, mask AP 38.7\n")
    assert main(["list", "models", "--pretrained", "--filter", row]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "box AP 41.4, mask AP 38.7" in said[1] and " yes " in said[1]
    assert main(["detect", "eval", "--pretrained", row, "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert "2 images" in said and "published on COCO's val2017: box AP 41.4, mask AP 38.7" in said and "masks" in said
    pictures = str(data / "val2017")
    assert main(["detect", "predict", pictures, "--pretrained", row, "--output", str(tmp_path / "found")]) == 0
    assert "000000.png: " in capsys.readouterr().out and len(list((tmp_path / "found").iterdir())) == 2
    assert main(["segment", "predict", pictures, "--pretrained", row, "--output", str(tmp_path / "x")]) == 2
    assert "not for `subquad segment`" in capsys.readouterr().err
    assert len(shelf.requests) == 1


def test_segmenters_are_judged_and_asked_by_name(shelf, tmp_path, capsys):
    row = "agent_pvt_tiny/fpn_40k"
    shelf.put(row)
    data = worlds.scenes(tmp_path / "scenes", counts=(1, 2))
    names = (f"{k}\t{name}" for k, name in enumerate(released_networks.ADE20K_CLASSES, start=1))
    (data / "objectInfo.txt").write_text("\n".join(names))
    assert main(["segment", "eval", "--pretrained", row, "--data", str(data)]) == 0
    said = capsys.readouterr().out
    assert (
        "2 images: mIoU" in said and "published on ADE20K's validation part: mIoU 40.18, class accuracy 51.76" in said
    )
    pictures = str(data / "images" / "validation")
    assert (
        main(["segment", "predict", pictures, "--pretrained", "agent_pvt_tiny/fpn", "--output", str(tmp_path / "o")])
        == 0
    )
    assert "0.png: " in capsys.readouterr().out and len(list((tmp_path / "o").iterdir())) == 4


MISTAKES = {
    "detect eval": "no weights are named: give a run folder or a weight file, or --pretrained NAME",
    "detect predict a.png --checkpoint run --pretrained agent_pvt_tiny/mask_rcnn_1x": "both run and pretrained/",
    "detect predict a.png --pretrained agent_pvt_tiny/nothing": "no released weights of",
    "detect predict a.png --pretrained": "expected one argument",
    "segment eval --pretrained agent_pvt_tiny/mask_rcnn_1x": "it is for `subquad detect`, not for `subquad segment`",
    "detect predict a.png --pretrained agent_swin_tiny/upernet_160k": "it is for `subquad segment`, not for `subquad",
    "segment eval --pretrained agent_pvt_tiny": "cannot open pretrained/agent_pvt_tiny: it is a classifier (`subquad",
    "eval --model agent_pvt_tiny/fpn --pretrained": "it is for `subquad segment`, not a classifier",
    "segment eval pretrained/none/best.safetensors": "no weight file at pretrained/none/best.safetensors",
}


@pytest.mark.parametrize("command", sorted(MISTAKES))
def test_a_mistake_with_a_name_is_one_line(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert MISTAKES[command] in said and said.count("\n") == 1, said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("row", ["agent_pvt_tiny/mask_rcnn_1x", "agent_swin_tiny/upernet_160k"])
def test_a_backbone_starts_from_that_of_a_released_network(row, shelf):
    state, network = shelf.put(row), DENSE_LINKS[row].network
    start = {"initial_checkpoint": f"pretrained/{row}", "img_size": (224, 224)}
    recipe = SegmentRecipe(model=network, conventions="openmmlab", **start)
    backbone = build_backbone(backbone_arguments(recipe, False, recipe.conventions))
    own = backbone.state_dict()
    entries = {name.partition("pyramid.backbone.")[2]: tensor for name, tensor in state.items()}
    assert {name for name in own if name not in entries} <= {"norm.weight", "norm.bias"}
    assert not [name for name in own if name in entries and not torch.equal(own[name], entries[name])]
    assert backbone.creation["drop_remainder" if "pvt" in network else "fixed_windows"]
    other = recipe.replace(model=network.replace("agent", "inline"))
    with pytest.raises(SubquadError, match=r"cannot open .*\.safetensors: the state dict does not fit this model"):
        build_backbone(backbone_arguments(other, False))


def broken(link, state):
    """Released entries that are not as they should be, and what is said of them."""
    whole = released_network(link, state)
    name = "roi_head.bbox_head.fc_cls.weight"
    yield {key: value for key, value in whole.items() if key != "neck.fpn_convs.0.conv.bias"}, "1 missing"
    yield whole | {"roi_head.mask_iou_head.fcs.0.weight": torch.zeros(2, 2)}, r"1 unexpected \(roi_head.mask_iou_head"
    yield whole | {name: whole[name][:, :5]}, "1 of another shape"
    yield whole | {name: whole[name] * float("nan")}, "weights that are not finite"
    yield {key: value for key, value in whole.items() if not key.startswith("backbone.")}, "missing"


def test_a_file_that_does_not_fit_is_one_line_and_leaves_nothing(shelf, tmp_path):
    row = "agent_pvt_tiny/mask_rcnn_1x"
    state = shelf.put(row)
    for entries, words in broken(DENSE_LINKS[row], state):
        shelf.answers[f"/{row}"] = [Answer(pickled(DENSE_LINKS[row], entries))]
        with pytest.raises(SubquadError, match=words) as caught:
            subquad.open_trained(f"pretrained/{row}")
        assert "\n" not in str(caught.value) and DENSE_LINKS[row].url in str(caught.value)
        assert "agent_pvt_t_mrcnn_1x" in str(caught.value)
        assert not list((tmp_path / "home" / "weights").rglob("*.safetensors"))


def test_a_mirror_has_them_in_folders(shelf, tmp_path, monkeypatch):
    row = "agent_pvt_tiny/retinanet_1x"
    state = shelf.put(row)
    mirror = tmp_path / "mirror"
    monkeypatch.setenv("SUBQUAD_WEIGHTS", str(mirror))
    with pytest.raises(SubquadError, match=rf"neither {row}\.safetensors nor {row}\.pth is there"):
        subquad.open_trained(f"pretrained/{row}")
    (mirror / "agent_pvt_tiny").mkdir(parents=True)
    (mirror / f"{row}.pth").write_bytes(shelf.answers[f"/{row}"][0].body)
    opened = subquad.open_trained(f"pretrained/{row}", device="cpu").model.state_dict()
    assert all(torch.equal(opened[name], state[name]) for name in state) and not shelf.requests


def test_a_file_that_lies_somewhere_is_converted(shelf, tmp_path, capsys):
    row = "agent_pvt_tiny/fpn_40k"
    state = shelf.put(row)
    (tmp_path / "a.pth").write_bytes(shelf.answers[f"/{row}"][0].body)
    source, target = str(tmp_path / "a.pth"), str(tmp_path / "a.safetensors")
    assert main(["convert-checkpoint", source, target]) == 2
    assert "is of a network with the head fpn: name it with --model, as NETWORK/fpn_" in capsys.readouterr().err
    assert main(["convert-checkpoint", source, target, "--model", "agent_pvt_tiny/none"]) == 2
    assert "no detector or segmenter 'agent_pvt_tiny/none' is known here" in capsys.readouterr().err
    assert main(["convert-checkpoint", source, target, "--model", row, "--img-size", "64"]) == 2
    assert "takes images of any size" in capsys.readouterr().err
    assert main(["convert-checkpoint", source, target, "--model", "agent_pvt_tiny/fpn"]) == 0
    assert f"{row}: " in (said := capsys.readouterr().out) and "entries from the released fpn layout" in said
    opened = subquad.open_trained(target, device="cpu").model.state_dict()
    assert all(torch.equal(opened[name], state[name]) for name in state) and not shelf.requests


def test_a_detector_is_no_start_for_a_classifier(shelf):
    row = "agent_pvt_tiny/mask_rcnn_1x"
    state = shelf.put(row)
    file = io.BytesIO()
    torch.save(released_network(DENSE_LINKS[row], state), file)
    with pytest.raises(
        SubquadError, match="these are weights of a network with the head mask_rcnn, and the model is a pvt"
    ):
        subquad.load_checkpoint(subquad.create_model("agent_pvt_tiny"), released_network(DENSE_LINKS[row], state))
