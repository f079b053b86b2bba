"""The authors' weights by name: every row of the links, from a server on the loopback with files as theirs are."""

import io
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from made_weights import make_input, make_state_dict
from PIL import Image
from released_layouts import released_state
from serving import Answer, serving

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.data.imagenet_names import places_of
from subquad.home import home
from subquad.models import NETWORKS, VARIANTS, pretrained
from subquad.tasks.backbone_arguments import backbone_arguments, build_backbone
from subquad.tasks.classification.classification_recipe import Recipe
from subquad.tasks.classification.classification_task import build_model
from subquad.tasks.classification.published_figures import interval
from subquad.tasks.segmentation.segmentation_recipe import SegmentRecipe
from subquad.weights import downloading
from subquad.weights.dense_links import DENSE_LINKS
from subquad.weights.files import fitted
from subquad.weights.fitting import misfits
from subquad.weights.hub_files import fits
from subquad.weights.links import LINKS, PAGES, TAGS, network_of, row_of

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = [row for row in LINKS if network_of(row) in NETWORKS]
# one of each mechanism in each host in the fast tests
FIRST = {network_of(row).rsplit("_", 1)[0]: row for row in reversed(ROWS)}
FAST_AND_SLOW = [row if row in FIRST.values() else pytest.param(row, marks=pytest.mark.slow) for row in ROWS]


def golden_entries(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())["state_dict"]


def meta_state(network):
    return subquad.create_model(network, device="meta").state_dict()


@pytest.mark.parametrize(
    "file, network",
    [
        ("agent_deit_t", "agent_deit_tiny"),
        ("agent_pvt_t", "agent_pvt_tiny"),
        ("agent_swin_t", "agent_swin_tiny"),
        ("agent_cswin_t", "agent_cswin_tiny"),
        ("inline_deit_t", "inline_deit_tiny"),
        ("inline_pvt_t", "inline_pvt_tiny"),
        ("inline_swin_t", "inline_swin_tiny"),
        ("inline_cswin_t", "inline_cswin_tiny"),
        ("pola_pvt_t", "pola_pvt_tiny"),
        ("pola_swin_t", "pola_swin_tiny"),
        ("soft_tiny", "soft_tiny"),
        ("soft_norm_tiny", "soft_norm_tiny"),
        ("flatten_pvt_t", "focused_pvt_tiny"),
        ("flatten_pvt_v2_b0", "focused_pvt_v2_b0"),
        ("flatten_swin_t", "focused_swin_tiny"),
        ("flatten_cswin_t", "focused_cswin_tiny"),
        ("mlla_t", "mlla_tiny"),
        ("mala_t", "mala_tiny"),
        ("circulant_deit_t", "circulant_deit_tiny"),
        ("rala_t", "rala_tiny"),
        ("nala_xt", "nala_xtiny"),
        ("polapp_b0", "polapp_b0"),
        ("ttt_vit_t", "ttt_vit3_tiny"),
        ("ttt_h_t", "ttt_hvit3_tiny"),
    ],
)
def test_the_layouts_of_the_files_that_are_served_are_the_released_ones(file, network):
    made = {name: list(tensor.shape) for name, tensor in released_state(network, meta_state(network)).items()}
    told = {name: entry["shape"] for name, entry in golden_entries(file).items()}
    # PolaFormer's and FLatten's PVT store a norm that nothing calls; masks may be there or not
    told = {name: shape for name, shape in told.items() if not name.endswith("attn_mask")}
    if file in ("pola_pvt_t", "flatten_pvt_t"):
        told = {name: shape for name, shape in told.items() if name not in ("norm.weight", "norm.bias")}
    assert made == told


@pytest.mark.thinned(4)
@pytest.mark.parametrize("row", FAST_AND_SLOW)
def test_a_file_of_every_link_fits_its_network_entry_by_entry(row):
    network = network_of(row)
    model = subquad.create_model(network, device="meta")
    adapted = fitted(released_state(network, model.state_dict()), model, row)
    assert adapted.family == VARIANTS[NETWORKS[network].variant].host
    assert not adapted.resized and not misfits(adapted.state, model.state_dict())
    assert model.img_size == (LINKS[row].px, LINKS[row].px)
    assert NETWORKS[network].top1 in (None, LINKS[row].top1)


def test_links_are_whole():
    assert len([row for row in LINKS if not (LINKS[row].is_repository or LINKS[row].is_share)]) == 60
    assert set(ROWS) == set(LINKS)
    for row, link in LINKS.items():
        assert link.url.startswith("https://") and link.page in PAGES and link.label
        assert link.page in (row.split("_")[0], "soft")
    urls = [link.url for link in LINKS.values() if not (link.is_repository or link.is_share)]
    assert len(set(urls)) == len(urls)
    assert row_of("agent_deit_small.r448") == row_of("agent_deit_small_448") == "agent_deit_small_448"
    with pytest.raises(
        SubquadError, match="no released weights of 'softmax_pvt_tiny' are known here: see `subquad list"
    ):
        row_of("softmax_pvt_tiny")
    with pytest.raises(SubquadError, match=r"are known here: did you mean agent_pvt_tiny.*\? See `subquad list models"):
        row_of("agent_pvt_tin")


@pytest.mark.parametrize("row", FAST_AND_SLOW)
def test_timm_knows_every_link_by_name_and_tag(row):
    tagged = next((name for name, target in TAGS.items() if target == row), row)
    for name in {tagged, row} - {"soft_tiny.cuda"} | {tagged}:
        cfg = timm.get_pretrained_cfg(name)
        assert cfg.url == LINKS[row].url and cfg.input_size == (3, LINKS[row].px, LINKS[row].px)
        assert name in timm.list_pretrained()
    arch = tagged.partition(".")[0]
    assert timm.create_model(tagged, device="meta").img_size == (LINKS[row].px, LINKS[row].px)
    assert arch in timm.list_models(pretrained=True)


class Config(dict):
    """Stands for yacs' CfgNode, and for the Namespace of timm's saver."""


def pickled(state, page, average=None):
    """A file as the authors' scripts write it: SOFT's by timm's saver, the others' with a configuration."""
    file = io.BytesIO()
    if page == "soft":
        content = {"epoch": 299, "arch": "soft", "state_dict": {key: 0 * value for key, value in state.items()}}
        content |= {"optimizer": {}, "version": 2, "args": Config(lr=1e-3), "state_dict_ema": state, "metric": 79.3}
    else:
        content = {"model": state, "optimizer": {"state": {}}, "lr_scheduler": {}, "max_accuracy": 78.4, "epoch": 299}
        content |= {"config": Config(MODEL=Config(TYPE="agent"))}
        if average is not None:
            content |= {"max_accuracy_e": 83.0, "state_dict_ema": average}
    torch.save(content, file)
    return file.getvalue()


def made_state(network):
    """A state dict of ours with numbers that differ from entry to entry."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in meta_state(network).items()}
    return {
        name: torch.tensor(0) if name.endswith("num_batches_tracked") else torch.rand(shape, generator=generator) + 0.5
        for name, shape in shapes.items()
    }


TINY = {
    "vit": {"embed_dim": 24, "num_heads": 2},
    "pvt": {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2)},
    "pvt_v2": {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2)},
    "swin": {"embed_dim": 8, "num_heads": (1, 2, 2, 2)},
    "cswin": {"embed_dim": 8, "num_heads": (2, 2, 2, 2)},
    "softnet": {"embed_dims": (32, 32, 64, 64)},
    "mllanet": {"embed_dim": 8, "num_heads": (1, 2, 2, 4), "rope": "mlla"},
    "hvit3": {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2)},
    "mavit": {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2), "head_width": 40},
}
"""What stands for the networks' sizes, so that a file has some hundred kilobytes."""


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    """A server for the links of rows, whose networks are made tiny; nothing is kept outside of the test's folder."""
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("SUBQUAD_WEIGHTS", raising=False)
    monkeypatch.setattr(downloading, "PAUSE", 0.001)

    def put(row, **content):
        network = network_of(row)
        variant = VARIANTS[NETWORKS[network].variant]
        depths = (4,) if len(variant.depths) == 1 else (1,) * len(variant.depths)
        if variant.depths != depths:
            attention = NETWORKS[network].attention
            attention = (
                attention if isinstance(attention, str) else [_first(stage) for stage in attention[: len(depths)]]
            )
            settings = {**NETWORKS[network].settings, **TINY[variant.host]}
            monkeypatch.setitem(VARIANTS, NETWORKS[network].variant, replace(variant, depths=depths))
            monkeypatch.setitem(NETWORKS, network, replace(NETWORKS[network], attention=attention, settings=settings))
        state = made_state(network)
        body = pickled(released_state(network, state), LINKS[row].page, **content)
        server.answers[f"/{row}"] = [Answer(body)]
        monkeypatch.setitem(LINKS, row, replace(LINKS[row], url=f"{server.url}/{row}"))
        return state

    with serving() as server:
        server.put = put
        yield server


def _first(stage):
    return stage if isinstance(stage, str) else stage[0] if isinstance(stage[1], int) else _first(stage[0])


# a row of each host and of each page in the fast tests
FAST = {
    "agent_pvt_tiny",
    "inline_deit_tiny",
    "focused_cswin_tiny",
    "agent_swin_base_384",
    "soft_tiny.cuda",
    "mlla_tiny",
    "ttt_vit3_tiny",
    "ttt_hvit3_tiny",
}
BY_NAME = [
    row if row in FAST else pytest.param(row, marks=pytest.mark.slow) for row in ROWS if not LINKS[row].is_repository
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("row", BY_NAME)
def test_every_link_loads_by_name_in_ours_and_in_timm(row, shelf, tmp_path):
    state = shelf.put(row)
    tagged = next((name for name, target in TAGS.items() if target == row), row)
    ours = subquad.create_model(tagged, pretrained=True)
    theirs = timm.create_model(tagged, pretrained=True)
    for loaded in (ours.state_dict(), theirs.state_dict()):
        assert not [name for name, tensor in state.items() if not torch.equal(loaded[name], tensor)]
    # how pixels are normalised and images are cut
    seen, theirs_seen = (timm.data.resolve_model_data_config(loaded) for loaded in (ours, theirs))
    assert seen == theirs_seen and ours.pretrained_cfg["num_classes"] == 1000
    # fetched once, and what is kept is ours
    assert len(shelf.requests) == 1
    kept = {path.name for path in (tmp_path / "home" / "weights").iterdir() if path.suffix != ".lock"}
    assert kept == {f"{row}.safetensors", f"{row}.pth.json"}
    assert ours.creation["name"] == network_of(row) and "pretrained" not in ours.creation
    restored, note = subquad.restore_model(tmp_path / "home" / "weights" / f"{row}.safetensors")
    assert torch.equal(restored.head.weight, ours.head.weight)
    assert note["released"]["top1"] == LINKS[row].top1 and len(note["classes"]) == 1000
    fewer = subquad.create_model(tagged, pretrained=True, num_classes=3).state_dict()
    assert len(fewer["head.weight"]) == 3
    assert all(torch.equal(fewer[name], tensor) for name, tensor in state.items() if not name.startswith("head."))
    features = timm.create_model(tagged, pretrained=True, features_only=True).state_dict()
    block = next(name for name in state if name.endswith("blocks.0.attn.qkv.weight"))
    assert any(name.endswith(block) and torch.equal(tensor, state[block]) for name, tensor in features.items())


@pytest.mark.parametrize("row", ["agent_pvt_tiny", "mlla_tiny", "ttt_hvit3_tiny"])
def test_images_of_other_channels_are_seen_as_in_timm(row, shelf):
    state = shelf.put(row)
    for channels in (1, 5):
        ours = subquad.create_model(row, pretrained=True, in_chans=channels)
        theirs = timm.create_model(row, pretrained=True, in_chans=channels).state_dict()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.state_dict().items())
        first = f"{ours.first_conv}.weight"
        assert channels > 1 or torch.equal(ours.state_dict()[first], state[first].sum(1, keepdim=True))


def test_flattens_cswin_takes_the_weights_of_the_published_figure(shelf):
    row = "focused_cswin_tiny"
    shelf.put(row)
    state = made_state(row)
    average = {name: value + 1 for name, value in released_state(row, state).items()}
    shelf.answers[f"/{row}"] = [Answer(pickled(released_state(row, state), "focused", average))]
    assert torch.equal(subquad.create_model(row, pretrained=True).head.bias, state["head.bias"])


@pytest.mark.parametrize(
    "case, words",
    [
        ("cut", "is damaged"),
        ("other", "does not fit this model"),
        ("not finite", "not finite"),
        ("words", "holds no weights"),
    ],
)
def test_a_file_that_is_no_such_weights_is_one_line_and_is_not_kept(case, words, shelf, tmp_path):
    row = "agent_pvt_tiny"
    state = shelf.put(row)
    released = released_state(row, state)
    good = shelf.answers[f"/{row}"][0].body
    bad = {
        "cut": lambda: good[: len(good) // 2],
        "other": lambda: pickled({**released, "head.bias": torch.zeros(7)}, "agent"),
        "not finite": lambda: pickled({**released, "head.bias": torch.full((1000,), torch.nan)}, "agent"),
        "words": lambda: pickled({"a": 1}, "agent"),
    }[case]()
    shelf.answers[f"/{row}"] = [Answer(bad)]
    for _ in range(2):
        with pytest.raises(SubquadError) as raised:
            subquad.create_model(row, pretrained=True)
        line = str(raised.value)
        assert "\n" not in line and words in line and LINKS[row].url in line and "agent_pvt_t" in line, line
        assert str(tmp_path / "home" / "weights" / f"{row}.pth") in line
        assert {path.suffix for path in (tmp_path / "home" / "weights").iterdir()} == {".lock"}
    # the right file is taken after all
    shelf.answers[f"/{row}"] = [Answer(good)]
    assert torch.equal(subquad.create_model(row, pretrained=True).head.bias, state["head.bias"])


def test_a_file_that_was_put_there_by_hand_is_taken_and_stays(shelf, tmp_path):
    row = "agent_pvt_tiny"
    state = shelf.put(row)
    good, place = shelf.answers[f"/{row}"][0].body, tmp_path / "home" / "weights" / f"{row}.pth"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"<html>")
    with pytest.raises(SubquadError, match="is no file of PyTorch weights"):
        subquad.create_model(row, pretrained=True)
    place.write_bytes(good)
    assert torch.equal(timm.create_model(row, pretrained=True).head.bias, state["head.bias"])
    assert place.read_bytes() == good and not shelf.requests


def test_a_mirror_is_a_folder_or_a_link(shelf, tmp_path, monkeypatch):
    row = "agent_pvt_tiny"
    state = shelf.put(row)
    folder = tmp_path / "mirror"
    folder.mkdir()
    monkeypatch.setenv("SUBQUAD_WEIGHTS", str(folder))
    with pytest.raises(
        SubquadError, match=r"neither agent_pvt_tiny.safetensors nor agent_pvt_tiny.pth is there: put what"
    ):
        subquad.create_model(row, pretrained=True)
    (folder / f"{row}.pth").write_bytes(shelf.answers[f"/{row}"][0].body)
    assert torch.equal(subquad.create_model(row, pretrained=True).head.bias, state["head.bias"])
    assert not shelf.requests and (folder / f"{row}.pth").exists()
    # another time from a link, and the same file as at first
    shelf.answers[f"/pub/{row}.pth"] = shelf.answers[f"/{row}"]
    monkeypatch.setenv("SUBQUAD_WEIGHTS", f"{shelf.url}/pub/")
    pretrained.pretrained_file(row).unlink()
    assert torch.equal(subquad.create_model(row, pretrained=True).head.bias, state["head.bias"])
    assert [path for path, _ in shelf.requests] == [f"/pub/{row}.pth"]
    pretrained.pretrained_file(row).unlink()
    shelf.answers[f"/pub/{row}.pth"] = [Answer(pickled({"other": torch.ones(3)}, "agent"))]
    with pytest.raises(SubquadError, match="another file than expected"):
        subquad.create_model(row, pretrained=True)


def test_a_kept_file_that_is_damaged_is_said_and_what_to_do(shelf):
    row = "agent_pvt_tiny"
    shelf.put(row)
    file = pretrained.pretrained_file(row)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for make in (subquad.create_model, timm.create_model):
        with pytest.raises(SubquadError, match=r"damaged.*; remove it, and the next call makes it anew"):
            make(row, pretrained=True)


def test_other_mechanisms_and_notes_get_no_released_weights(shelf, tmp_path):
    shelf.put("agent_pvt_tiny")
    with pytest.raises(SubquadError, match="does not fit this model"):
        subquad.create_model("agent_pvt_tiny", pretrained=True, attention="inline")
    with pytest.raises(SubquadError, match="no released weights of 'deit_tiny'"):
        subquad.create_model("deit_tiny", pretrained=True)
    with pytest.raises(SubquadError, match="on the meta device holds no weights"):
        subquad.create_model("agent_pvt_tiny", pretrained=True, device="meta")
    network = subquad.create_model("agent_pvt_tiny")
    network.creation["pretrained"] = True
    subquad.save_weights(network, tmp_path / "stranger.safetensors")
    requests = len(shelf.requests)
    with pytest.raises(SubquadError, match="has an argument pretrained, which no network is made with"):
        subquad.restore_model(tmp_path / "stranger.safetensors")
    assert len(shelf.requests) == requests


FILES = sorted(path.stem for path in GOLDEN.glob("*.json"))
WITH_GOLDEN = [
    name for name in FILES if re.fullmatch(r"(agent|inline)_\w+_t|rala_t|soft(_norm)?_tiny|flatten_\w+_(t|b0)", name)
]


@pytest.mark.thinned(4)
@pytest.mark.slow
@pytest.mark.parametrize("file", WITH_GOLDEN)
def test_a_released_file_that_is_fetched_computes_its_golden(file, shelf, monkeypatch):
    row = file.replace("flatten", "focused")
    row = f"{row}iny" if row.endswith("_t") else row
    record = json.loads((GOLDEN / f"{file}.json").read_text())
    body = pickled(
        {name: tensor.float() for name, tensor in make_state_dict(record["state_dict"]).items()}, LINKS[row].page
    )
    shelf.answers[f"/{row}"] = [Answer(body)]
    monkeypatch.setitem(LINKS, row, replace(LINKS[row], url=f"{shelf.url}/{row}"))
    expected, places = record["outputs"]["logits"]["value"], record["outputs"]["logits"]["index"]
    for make in (subquad.create_model, timm.create_model):
        with torch.inference_mode():
            logits = make(row, pretrained=True).eval()(make_input(record["input_shape"]).float())
        torch.testing.assert_close(logits.flatten()[places], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def listing(*paths):
    return Answer(json.dumps([{"type": "file", "path": path, "size": 3} for path in paths]).encode())


@pytest.mark.parametrize("row", [next(row for row in ROWS if LINKS[row].is_share)])
def test_files_of_a_share_are_put_in_their_place_by_hand(row, shelf, monkeypatch):
    url = LINKS[row].url
    state = shelf.put(row)
    monkeypatch.setitem(LINKS, row, replace(LINKS[row], url=url))
    place = pretrained.weights_home() / f"{row}.pth"
    with pytest.raises(SubquadError, match="a browser has to open; fetch") as raised:
        subquad.create_model(row, pretrained=True)
    assert url in str(raised.value) and str(place) in str(raised.value)
    place.write_bytes(shelf.answers[f"/{row}"][0].body)
    assert torch.equal(subquad.create_model(row, pretrained=True).head.bias, state["head.bias"])


def test_polaformers_files_are_found_by_name_in_the_repository(shelf, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", shelf.url)
    row = "pola_pvt_tiny"
    url = LINKS[row].url
    state = shelf.put(row)
    monkeypatch.setitem(LINKS, row, replace(LINKS[row], url=url))
    tree = "/api/models/ZachMeng/PolaFormer/tree/main"
    shelf.answers[tree] = [listing("README.md", "pvt/PolaPVT_Tiny.pth", "pvt/PolaPVT_small.pth", "mask_rcnn_pvt_t.pth")]
    shelf.answers["/ZachMeng/PolaFormer/resolve/main/pvt/PolaPVT_Tiny.pth"] = shelf.answers[f"/{row}"]
    assert torch.equal(subquad.create_model(row, pretrained=True).head.bias, state["head.bias"])
    pretrained.pretrained_file(row).unlink()
    for paths, words in (
        ((), "no file of pola_pvt_tiny by name: none"),
        (("a_pvt_t.pth", "b/pvt-tiny.pt"), "several files"),
    ):
        shelf.answers[tree] = [listing(*paths)]
        with pytest.raises(SubquadError, match=words):
            subquad.create_model(row, pretrained=True)
    shelf.answers[tree] = [Answer(b"{")]
    with pytest.raises(SubquadError, match="gives no listing of ZachMeng/PolaFormer"):
        subquad.create_model(row, pretrained=True)


@pytest.mark.parametrize(
    ("path", "network"),
    [("MAViT_T.pth", "mala_tiny"), ("cls/mala_b.pth", "mala_base"), ("pvt/PolaPVT_large.pth", "pola_pvt_large")],
)
def test_names_in_a_repository_are_of_one_network(path, network):
    others = [row for row, link in LINKS.items() if link.is_repository and fits(path, row)]
    assert others == [network] and not fits(path.replace("_", "_fpn_"), network)


def imagenet_folder(folder, names, size=(48, 40)):
    """Three images a class, held out; class i is mostly the network's own doing."""
    for k, name in enumerate(names):
        (folder / "val" / name).mkdir(parents=True)
        for j in range(3):
            Image.new("RGB", size, (20 * k, 50 * j, 99)).save(folder / "val" / name / f"{j}.png")
    return folder


def test_the_commands_take_a_networks_name_instead_of_a_file(shelf, tmp_path, capsys, monkeypatch):
    # no kernels: they would be compiled into this test's folder
    monkeypatch.setattr("subquad.kernels.backends._asked", "eager")
    row = "agent_pvt_tiny"
    shelf.put(row)
    assert main(["list", "models", "--pretrained", "--filter", "agent_pvt_*"]) == 0
    # detectors and segmenters are a table of their own
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len(lines) == 6 and not any(" yes " in line for line in lines)
    assert main(["download", row]) == 0
    assert capsys.readouterr().out.endswith(f"{row}.safetensors, published top-1 78.4 %\n")
    assert main(["list", "--pretrained", "--filter", row]) == 0
    assert " 78.4 " in (said := capsys.readouterr().out) and " yes " in said
    # the answer does not depend on weights of ones and halves: top-1 is what it is, the line is there
    data = imagenet_folder(tmp_path / "few", ["n01440764", "n02102040"])
    flags = ["--model", row, "--pretrained", "--img-size", "64"]
    assert main(["eval", *flags, "--data", "imagenet", "--data-dir", str(data), "--batch-size", "2"]) == 0
    said = capsys.readouterr().out
    assert "6 images: top-1" in said and "published top-1 78.4 % at 224 px, measured" in said
    assert "of 6 images (95 % interval" in said and "the images are of 2 of 1000 classes" in said
    assert main(["predict", str(data / "val" / "n01440764" / "0.png"), *flags[:3]]) == 0
    assert "n0" in capsys.readouterr().out or "n1" in capsys.readouterr().out
    flags = [
        "--img-size",
        "64",
        "--max-images",
        "1",
        "--images",
        str(data),
        "--measures",
        "entropy",
        "--shown",
        "0",
        "--output",
        str(tmp_path / "analysis"),
    ]
    assert main(["analyze", "--model", row, "--pretrained", *flags]) == 0
    assert f"{row}: 4 layers" in capsys.readouterr().out
    assert len(shelf.requests) == 1


MISTAKES = {
    "eval --model agent_pvt_tiny": "--model agent_pvt_tiny alone has no weights: add --pretrained",
    "eval --pretrained": "--pretrained is of a network: name it with --model",
    "eval": "no weights are named: give a run folder or a weight file, or --model NAME --pretrained",
    "eval run --model agent_pvt_tiny --pretrained": "both run and pretrained/agent_pvt_tiny are named",
    "predict a.png": "give --checkpoint with a run folder or a weight file, or --model NAME --pretrained",
    "predict . --model softmax_pvt_tiny --pretrained": "no released weights of 'softmax_pvt_tiny' are known here",
    "download agent_pvt": "no released weights of 'agent_pvt' are known here",
    "list hosts --pretrained": "--pretrained lists models",
    "train --resume run --pretrained": "in its own folder: leave out --pretrained",
    "train --model agent_pvt_tiny --pretrained --initial-checkpoint a.pth": "it starts from a.pth already",
    "train --model softmax_pvt_tiny --pretrained": "no released weights of 'softmax_pvt_tiny'",
}


@pytest.mark.parametrize("command", sorted(MISTAKES))
def test_a_mistake_with_a_networks_name_is_one_line(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert MISTAKES[command] in said and said.count("\n") == 1, said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("initial", ["pretrained/agent_pvt_tiny", None])
def test_training_starts_from_the_authors_weights(initial, shelf, tmp_path):
    state = shelf.put("agent_pvt_tiny")
    recipe = Recipe(model="agent_pvt_tiny", img_size=(64, 64), initial_checkpoint=initial)
    model = build_model(recipe, 10).state_dict()
    name = "stages.0.blocks.0.mlp.fc1.weight"
    assert torch.equal(model[name], state[name]) == (initial is not None)
    assert len(model["head.weight"]) == 10
    backbone = build_backbone(
        backbone_arguments(SegmentRecipe(model="agent_pvt_tiny", initial_checkpoint=initial), False)
    )
    assert torch.equal(backbone.state_dict()[name], state[name]) == (initial is not None)


def test_the_page_of_weights_has_the_tables_of_the_links():
    page = Path(__file__).parents[2] / "docs" / "weights.md"
    script = runpy.run_path(str(page.parents[1] / "scripts" / "weights_page.py"))
    text = page.read_text()
    assert script["filled"](text) == text, "run python scripts/weights_page.py"
    assert all(link.url in text and f"`subquad download {row}`" in text for row, link in LINKS.items())
    assert all(link.url in text and f"--pretrained {row}`" in text for row, link in DENSE_LINKS.items())
    assert "Nothing was downloaded where this was written" in text


def test_names_of_imagenets_classes(tmp_path):
    assert places_of("d", ["n02102040", "n01440764"]) == [217, 0]
    # Imagenette's, in words
    words = ["tench", "English_springer", "cassette player", "chain saw", "church", "French horn", "garbage truck"]
    ids = ["n01440764", "n02102040", "n02979186", "n03000684", "n03028079", "n03394916", "n03417042"]
    assert places_of("d", words) == places_of("d", ids)
    for names, message in (
        (["crane"], "which is 2 classes of ImageNet"),
        (["house cat"], "d has a class house cat, which is no class of ImageNet"),
        (["tench", "n01440764"], "d has classes tench and n01440764, which are one of ImageNet's"),
    ):
        with pytest.raises(SubquadError, match=message):
            places_of("d", names)


@pytest.mark.parametrize(
    "top1, count, ends", [(100.0, 10, (72.25, 100)), (0.0, 10, (0, 27.75)), (78.4, 50_000, (78.04, 78.76))]
)
def test_intervals_are_wilsons(top1, count, ends):
    assert interval(top1, count) == pytest.approx(ends, abs=0.01)


def test_places_that_can_not_be_looked_into_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", "x" * 300)
    with pytest.raises(SubquadError, match=r"^'x+.* can't be looked into \(File name too long\): set SUBQUAD_HOME"):
        home()


def test_a_mirror_may_be_named_from_the_home(tmp_path, monkeypatch):
    """As SUBQUAD_HOME may be, where no shell has written it out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "kept"))
    monkeypatch.setenv("SUBQUAD_WEIGHTS", "~/mirror")
    with pytest.raises(SubquadError, match=f"SUBQUAD_WEIGHTS names {tmp_path}/mirror, and neither"):
        pretrained.pretrained_file("agent_deit_tiny")
