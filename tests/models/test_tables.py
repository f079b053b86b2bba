"""The table of networks: names, sizes, what timm makes of them, checkpoints of any layout."""

import json
import pickle
import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from hosts import small
from made_weights import make_state_dict
from released import our_network

import subquad
from subquad import SubquadError
from subquad.models import HOSTS, NETWORKS, VARIANTS, default_cfgs, read_weights
from subquad.models.checkpoint_conversion import recognise
from subquad.models.listing import known_sizes, sizes_of
from subquad.models.networks import BASELINES, PUBLISHED
from subquad.tasks import load_recipe
from subquad.tasks.classification import Recipe
from subquad.weights.fitting import adapt

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = {
    "agent": (18, "deit pvt swin cswin"),
    "inline": (15, "deit pvt swin cswin"),
    "pola": (8, "pvt swin"),
    "focused": (17, "pvt swin cswin"),
    "circulant": (3, "deit"),
    "mhla": (3, "deit"),
}


@cache
def _released(name):
    entries = json.loads((GOLDEN / f"{name}.json").read_text())["state_dict"]
    kept = {key: torch.zeros(entry["shape"]) for key, entry in entries.items() if entry["kind"] != "made"}
    return {key: tensor.float() for key, tensor in (make_state_dict(entries) | kept).items()}


def released(name):
    """The entries of a released file, made once; nobody writes into them."""
    return dict(_released(name))


def test_every_network_of_the_papers_is_there():
    for mechanism, (count, hosts) in FAMILIES.items():
        found = [name for name in PUBLISHED if name.startswith(f"{mechanism}_")]
        assert len(found) == count and {name.split("_")[1] for name in found} == set(hosts.split())
    sizes = ("tiny", "small", "small_deep", "medium", "large", "huge")
    assert {name for name in PUBLISHED if name.startswith("soft_")} == {
        f"soft_{form}{size}" for size in sizes for form in ("", "norm_")
    }
    for kind in ("mlla", "ttt_vit3", "ttt_hvit3"):
        assert {f"{kind}_{size}" for size in ("tiny", "small", "base")} <= PUBLISHED.keys()


def test_baselines_follow_the_scheme_and_no_name_is_one_of_timms():
    newer = ("mlla", "ttt", "circulant", "mhla")
    for mechanism in ("softmax", "linear", "focused", "agent", "inline", "pola", "soft", *newer):
        for host, sizes in {
            "pvt": ("tiny", "large"),
            "pvt_v2": ("b0", "b5"),
            "swin": ("small",),
            "cswin": ("base",),
            "deit": ("tiny",),
        }.items():
            assert all(f"{mechanism}_{host}_{size}" in NETWORKS for size in sizes)
    files = {module for module in timm.list_modules() if module != "timm_names"}
    theirs = {name for module in files for name in timm.list_models(module=module)}
    assert not theirs & NETWORKS.keys() and set(timm.list_models(module="timm_names")) == NETWORKS.keys()


# networks that were published, and one mechanism in the smallest of the other sizes, in the fast tests
SMALLEST = re.compile("linear_.*(tiny|micro|b0)")
FAST = {name for name in NETWORKS if name not in BASELINES or SMALLEST.match(name)}
SIZES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_the_table_says(name):
    model = subquad.create_model(name, device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert NETWORKS[name].params is None or count == round(NETWORKS[name].params * 1e6)
    assert known_sizes()[name] == [count, *model.img_size], "run scripts/model_table.py --all"
    assert type(model) is HOSTS[VARIANTS[NETWORKS[name].variant].host]


def test_sizes_are_known_of_every_network():
    assert list(known_sizes()) == list(dict.fromkeys((*VARIANTS, *NETWORKS))), "run scripts/model_table.py"
    for name in list(VARIANTS)[::8]:
        assert known_sizes()[name] == sizes_of(name)


def test_every_variant_names_a_host_and_a_recipe():
    for variant in VARIANTS.values():
        assert variant.host in HOSTS
        load_recipe(variant.recipe, Recipe)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "host",
    ["softmax_pvt_tiny", "focused_pvt_v2_b0", "agent_swin_tiny", "agent_cswin_tiny", "agent_deit_tiny", "soft_tiny"],
)
@pytest.mark.parametrize("size", [(225, 191), pytest.param((800, 1216), marks=pytest.mark.slow)])
def test_weights_of_224_px_see_images_of_a_detectors_size(host, size):
    # a block of each kind in every stage: with shifted windows there are two kinds
    depth = 2 if "swin_" in host else 1
    depths = [depth] * len(VARIANTS[NETWORKS[host].variant].depths)
    model = subquad.create_model(host, depths=depths).eval()
    with torch.no_grad():
        maps = model.forward_intermediates(torch.randn(1, 3, *size), intermediates_only=True)
    assert all(level.isfinite().all() and level.std() < 100 for level in maps)


def test_timm_makes_them_with_its_own_arguments(tmp_path):
    model = timm.create_model("agent_pvt_tiny", num_classes=7, in_chans=1, img_size=64, drop_path_rate=0.2)
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 7)
    with pytest.raises(TypeError, match="unknown setting"):
        timm.create_model("agent_pvt_tiny", no_such_argument=1)
    features = timm.create_model("agent_swin_tiny", features_only=True, out_indices=(1, 3))
    assert features.feature_info.channels() == [192, 768]
    on_meta = timm.create_model("pola_swin_tiny", device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in on_meta.parameters()} == {("meta", torch.bfloat16)}


# the smallest of each host in the fast tests
TOLD = sorted({row.variant: name for name, row in NETWORKS.items()}.values())
TOLD = [name if "tiny" in name or "b0" in name else pytest.param(name, marks=pytest.mark.slow) for name in TOLD]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", TOLD)
def test_timm_is_told_of_every_network_what_its_backbone_is(name):
    model = subquad.create_model(name, device="meta")
    features = timm.create_model(name, features_only=True, device="meta")
    strides = features.feature_info.reduction()
    if model.is_plain:
        assert default_cfgs[name].cfgs[""].pool_size is None and set(strides) == {model.patch_size}
        assert features.out_indices == [len(model.blocks) - 3 + k for k in range(3)]
    else:
        assert default_cfgs[name].cfgs[""].pool_size[0] >= 7 and strides == [4, 8, 16, 32]


def test_timm_loads_released_weights_and_weights_of_ours(tmp_path):
    state = released("flatten_pvt_v2_b0")
    torch.save({"model": state, "epoch": 3}, tmp_path / "released.pth")
    model = timm.create_model("focused_pvt_v2_b0", checkpoint_path=tmp_path / "released.pth").eval()
    subquad.convert_checkpoint(tmp_path / "released.pth", tmp_path / "ours.safetensors")
    again = timm.create_model("focused_pvt_v2_b0", checkpoint_path=tmp_path / "ours.safetensors").eval()
    overlay = {"file": str(tmp_path / "released.pth")}
    other = timm.create_model(
        "focused_pvt_v2_b0", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3
    ).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(other.forward_features(x), model.forward_features(x), rtol=0, atol=0)
    restored, note = subquad.restore_model(tmp_path / "ours.safetensors")
    torch.testing.assert_close(restored.eval()(x), model(x), rtol=0, atol=0)
    assert len(note["classes"]) == 1000 and note["input"]["crop_pct"] == 0.875


def test_a_network_saved_for_the_hub_comes_back_from_the_folder(tmp_path):
    from timm.models import save_for_hf

    model = timm.create_model("agent_deit_tiny", num_classes=4, img_size=64).eval()
    save_for_hf(model, tmp_path, model_args={"img_size": 64})
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


class Config(dict):
    """Stands for yacs' CfgNode: a dict with attributes, pickled by reference to a class that a reader may not have."""


def training_file(path, state, key="model"):
    config = Config(MODEL=Config(TYPE="agent"), list=[1, (2, 3)])
    config.note = "an attribute"
    torch.save({key: {f"module.{name}": tensor for name, tensor in state.items()}, "config": config, "epoch": 3}, path)


# the smallest in the fast tests
TRAINED = [("model", "flatten_pvt_v2_b0"), ("model", "pola_swin_t")]
TRAINED += [(key, "pola_swin_t") for key in ("state_dict", "model_ema", "state_dict_ema")]


@pytest.mark.parametrize(
    ("key", "network"), [TRAINED[0], *(pytest.param(*rest, marks=pytest.mark.slow) for rest in TRAINED[1:])]
)
def test_a_training_file_is_read_whatever_it_pickles_beside_the_weights(tmp_path, key, network):
    training_file(tmp_path / "run.pth", released(network), key)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "run.pth", weights_only=True)
    name, adapted = subquad.convert_checkpoint(tmp_path / "run.pth", tmp_path / "ours.safetensors")
    wanted = {"pola_swin_t": ("pola_swin_tiny", "swin"), "flatten_pvt_v2_b0": ("focused_pvt_v2_b0", "pvt_v2")}
    assert (name, adapted.family) == wanted[network] and not adapted.resized


def test_weights_are_those_that_the_published_accuracy_was_measured_with(tmp_path):
    """FLatten's CSwin was evaluated by `model`, whatever else its file holds; the others by the average."""
    for name, file in (("stage1.0.attns.0.positional_encoding", "focused"), ("stage1.0.attns.0.an_bias", "agent")):
        states = {key: {f"module.{name}": torch.full((1, 2), value)} for key, value in (("model", 1.0), ("other", 2.0))}
        torch.save({"model": states["model"], "state_dict_ema": states["other"]}, tmp_path / f"{file}.pth")
    assert read_weights(tmp_path / "focused.pth")[0]["stage1.0.attns.0.positional_encoding"].mean() == 1
    assert read_weights(tmp_path / "agent.pth")[0]["stage1.0.attns.0.an_bias"].mean() == 2
    alone = {"stage1.0.attns.0.positional_encoding": torch.ones(1, 2)}
    torch.save({"state_dict_ema": alone, "model": {}}, tmp_path / "alone.pth")
    assert read_weights(tmp_path / "alone.pth")[0].keys() == alone.keys()


RECOGNISED = ("pvt_v2_b0", "swin_t", "cswin_t")


class Dangerous:
    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "name", ["flatten_pvt_t", *(pytest.param(f"flatten_{rest}", marks=pytest.mark.slow) for rest in RECOGNISED)]
)
def test_networks_of_flatten_are_recognised(name):
    entries = json.loads((GOLDEN / f"{name}.json").read_text())["state_dict"]
    sketch = {key: torch.empty(entry["shape"], device="meta") for key, entry in entries.items()}
    assert recognise(sketch, name) == name.replace("flatten", "focused").replace("_t", "_tiny")


OF_MAVIT = [path.stem for path in sorted(GOLDEN.glob("*.json")) if re.match(r"([mnr]ala|polapp)_[^_]+$", path.stem)]


@pytest.mark.parametrize("name", OF_MAVIT)
def test_networks_of_mavits_host_are_recognised(name):
    entries = json.loads((GOLDEN / f"{name}.json").read_text())["state_dict"]
    sketch = {key: torch.empty(entry["shape"], device="meta") for key, entry in entries.items()}
    assert recognise(sketch, name) == our_network(name)


@pytest.mark.parametrize("legacy", [False, True])
def test_no_code_in_a_checkpoint_is_run(tmp_path, capsys, legacy):
    model, other = small("vit"), small("vit")
    target = tmp_path / "written"
    attacks = [Dangerous(print, "ran"), Dangerous(exec, f"open({str(target)!r}, 'w')"), Dangerous(getattr, 1, "real")]
    content = {"attacks": attacks, "state_dict": model.state_dict()}
    torch.save(content, tmp_path / "run.pth", _use_new_zipfile_serialization=not legacy)
    subquad.load_checkpoint(other, tmp_path / "run.pth")
    assert torch.equal(other.head.weight, model.head.weight)
    assert not capsys.readouterr().out and not target.exists()


def test_a_program_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    with pytest.raises(SubquadError, match="TorchScript program, which is code"):
        subquad.load_checkpoint(small("vit"), tmp_path / "program.pt")


def test_a_file_of_ours_is_converted_to_the_network_that_it_holds(tmp_path):
    """Linear and softmax attention have the same entries."""
    sizes = {"img_size": 32, "depths": [2], "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    made = subquad.create_model("deit_tiny", attention="linear", **sizes).eval()
    subquad.save_weights(made, tmp_path / "first.safetensors")
    images = torch.randn(1, 3, 32, 32)
    for name in (None, "deit_tiny"):
        subquad.convert_checkpoint(tmp_path / "first.safetensors", tmp_path / "second.safetensors", name=name)
        opened = subquad.restore_model(tmp_path / "second.safetensors")[0].eval()
        assert opened.creation == made.creation
        torch.testing.assert_close(opened(images), made(images))


def test_what_does_not_fit_is_said_and_leaves_the_model_alone(tmp_path):
    state = released("agent_pvt_t")
    with pytest.raises(SubquadError, match="weights of a pvt network, and the model is a swin"):
        subquad.load_checkpoint(subquad.create_model("agent_swin_tiny", device="meta"), state)
    with pytest.raises(SubquadError, match=r"released pvt layout.*missing.*unexpected"):
        subquad.load_checkpoint(subquad.create_model("softmax_pvt_tiny", device="meta"), state)
    model = subquad.create_model("agent_pvt_tiny", num_classes=10)
    before = model.head.weight.clone()
    with pytest.raises(SubquadError, match=r"head\.weight is \(1000, 512\), the model's \(10, 512\).*head=False keeps"):
        subquad.load_checkpoint(model, state)
    assert torch.equal(model.head.weight, before)
    subquad.load_checkpoint(model, state, head=False)
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.stages[0].blocks[0].norm1.weight, state["block1.0.norm1.weight"])
    # a network without a head, and a file without one
    bare = subquad.create_model("agent_pvt_tiny", num_classes=0)
    with pytest.raises(SubquadError, match=r"2 unexpected \(head\.bias, head\.weight\); head=False keeps .* has none"):
        subquad.load_checkpoint(bare, state)
    subquad.load_checkpoint(bare, state, head=False)
    headless = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    with pytest.raises(SubquadError, match=r"2 missing \(head\.bias, head\.weight\); head=False keeps"):
        subquad.load_checkpoint(model, headless)
    subquad.load_checkpoint(model, headless, head=False)
    assert torch.equal(model.head.weight, before)


def test_a_network_on_the_meta_device_has_nothing_to_save(tmp_path):
    model = subquad.create_model("deit_micro", device="meta")
    with pytest.raises(SubquadError, match=r"is on the meta device and has no numbers: give the network its weights"):
        subquad.save_weights(model, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_kept_entries_may_be_there_or_not():
    state = released("soft_tiny")
    model = subquad.create_model("soft_tiny")
    whole = subquad.create_model("soft_tiny")
    without = {key: t for key, t in state.items() if "num_batches" not in key}
    assert len(without) < len(state)
    subquad.load_checkpoint(model, without)
    subquad.load_checkpoint(whole, state)
    loaded, own = whole.state_dict(), model.state_dict()
    counters = {name for name in loaded if name.endswith("num_batches_tracked")}
    for name, weight in loaded.items():
        assert name in counters or torch.equal(weight, own[name]), name
    # what the file says is taken, and what it lacks stays
    assert all(own[name] == 0 for name in counters)
    assert {name for name, weight in loaded.items() if name in counters and weight != 0} == {
        name for name in counters if any(t != 0 for key, t in state.items() if key.endswith("num_batches_tracked"))
    }
    swin = released("plain_swin_t")
    model, again = subquad.create_model("softmax_swin_tiny"), subquad.create_model("softmax_swin_tiny")
    few = {key: t for key, t in swin.items() if "attn_mask" not in key and "index" not in key}
    assert len(few) < len(swin)
    subquad.load_checkpoint(model, few)
    subquad.load_checkpoint(again, swin)
    own = model.state_dict()
    assert all(torch.equal(weight, own[name]) for name, weight in again.state_dict().items())


def test_released_tables_are_moved_to_another_image_size():
    model = subquad.create_model("agent_swin_tiny", img_size=288)
    resized = subquad.load_checkpoint(model, released("agent_swin_t")).resized
    assert {name.rpartition("inner.")[2] for name in resized} == {
        *(f"{bias}.{part}" for bias in ("agent_bias", "query_bias") for part in ("rows", "columns")),
        "relative_bias.table",
    }
    assert model.stages[3].blocks[0].attn.inner.relative_bias.table.shape == (24, 17, 17)


def test_files_that_several_networks_fit_ask_for_the_name(tmp_path):
    torch.save(released("soft_tiny"), tmp_path / "soft.pth")
    with pytest.raises(SubquadError, match="fits soft_tiny and soft_norm_tiny alike"):
        subquad.convert_checkpoint(tmp_path / "soft.pth", tmp_path / "ours.safetensors")
    name, _ = subquad.convert_checkpoint(tmp_path / "soft.pth", tmp_path / "ours.safetensors", name="soft_norm_tiny")
    assert name == "soft_norm_tiny"
    with pytest.raises(SubquadError, match="fits none of the"):
        subquad.convert_checkpoint(_saved(tmp_path, {"a.weight": torch.ones(2)}), tmp_path / "x.safetensors")
    with pytest.raises(SubquadError, match=r"written as \.safetensors"):
        subquad.convert_checkpoint(tmp_path / "soft.pth", tmp_path / "ours.pth")
    assert not (tmp_path / "x.safetensors").exists() and not (tmp_path / "ours.pth").exists()


def _saved(folder, state):
    torch.save(state, folder / "strange.pth")
    return folder / "strange.pth"


def test_weights_of_ours_are_not_taken_for_someone_elses():
    for host in HOSTS:
        model = small(host)
        assert adapt(model.state_dict(), model).family is None


def test_the_page_of_models_has_a_row_for_each_network_with_its_parameters():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = {line.split("|")[1].strip(" `"): line.split("|") for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() == NETWORKS.keys()
    for name, network in NETWORKS.items():
        assert network.params is None or rows[name][4].strip() == f"{network.params:.3f}", name
