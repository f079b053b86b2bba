"""Other people's weights as a start: timm's in our softmax hosts, what fits other mechanisms, files of a link."""

import pytest
import timm
import torch
from hosts import paired, without_prefix
from safetensors.torch import save_file
from serving import Answer, serving

import subquad
from subquad import ATTENTION, SubquadError
from subquad.weights import downloading

SIZES = {"depths": (2, 2, 2, 2), "num_heads": (2, 2, 4, 4), "embed_dim": 16}
TIMM = {
    "swin": ("swin_tiny_patch4_window7_224", "swin_tiny", SIZES),
    "pvt_v2": ("pvt_v2_b0", "pvt_v2_b0", {}),
    "deit": ("deit_tiny_patch16_224", "deit_tiny", {"depth": 2, "embed_dim": 32, "num_heads": 2}),
}


def timms(host, **more):
    """A small network of timm's with weights that matter, and the arguments of ours."""
    theirs, ours, sizes = TIMM[host]
    network = timm.create_model(theirs, **sizes, **more).eval()
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    sizes = {
        ("depths" if key == "depth" else key): [value] if key == "depth" else value for key, value in sizes.items()
    }
    return network, ours, sizes


@pytest.mark.parametrize("host", sorted(TIMM))
def test_timms_softmax_networks_are_ours(host, tmp_path):
    theirs, name, sizes = timms(host)
    ours = subquad.create_model(name, **sizes).eval()
    save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    loaded = subquad.load_checkpoint(ours, tmp_path / "timm.safetensors")
    assert not loaded.resized and not loaded.new and not loaded.unused
    images = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("host", "attention"), paired(sorted(TIMM), sorted(ATTENTION), whole="deit"))
def test_another_mechanism_keeps_what_fits_and_says_the_rest_in_one_line(host, attention):
    theirs, name, sizes = timms(host)
    needed = without_prefix(attention) if host == "deit" else {}
    if needed:
        # positions that count a class token fit no table without
        needed["pos_embed"] = "none"
    ours = subquad.create_model(name, attention=attention, num_classes=10, **sizes, **needed)
    before = {key: tensor.clone() for key, tensor in ours.state_dict().items()}
    loaded = subquad.load_checkpoint(ours, theirs.state_dict(), strict=False)
    after = ours.state_dict()
    assert {"head.weight", "head.bias"} <= set(loaded.new) and set(loaded.new) <= before.keys()
    assert all(torch.equal(after[key], before[key]) for key in loaded.new)
    changed = {key for key in before if not torch.equal(after[key], before[key])}
    assert changed == before.keys() - loaded.new - {key for key in before if key.endswith("num_batches_tracked")}
    assert torch.equal(after["stages.0.blocks.1.mlp.fc1.weight"], _mlp(theirs, host))
    line = repr(loaded)
    assert "\n" not in line and len(line) < 400 and f"{len(loaded.new)} new (" in line
    if {*loaded.new, *loaded.unused} - {"head.weight", "head.bias"}:
        with pytest.raises(SubquadError, match="does not fit this model"):
            subquad.load_checkpoint(ours, theirs.state_dict(), head=False)


@pytest.mark.parametrize("attention, parts", [("pola", "qkvg"), ("soft", "qv")])
def test_projections_to_other_parts_start_from_those_that_both_have(attention, parts):
    theirs, name, sizes = timms("deit")
    ours = subquad.create_model(name, attention=attention, **sizes)
    layer = ours.stages[0].blocks[0].attn
    assert layer.projected == tuple(parts)
    fused = next(module for module in layer.children() if isinstance(module, torch.nn.Linear))
    before = {key: tensor.clone() for key, tensor in fused.state_dict().items()}
    loaded = subquad.load_checkpoint(ours, theirs.state_dict(), strict=False)
    assert len(loaded.partly) == 4 and "4 partly new (" in repr(loaded)
    assert not set(loaded.partly) & {*loaded.new, *loaded.unused}
    for kind, mine in fused.state_dict().items():
        given = dict(zip("qkv", getattr(theirs.blocks[0].attn.qkv, kind).chunk(3), strict=True))
        for part, rows, old in zip(parts, mine.chunk(len(parts)), before[kind].chunk(len(parts)), strict=True):
            assert torch.equal(rows, given.get(part, old))


def test_heads_that_a_mechanism_has_beside_the_hosts_start_anew_and_the_others_from_what_is_there():
    theirs, name, sizes = timms("deit")
    ours = subquad.create_model(name, attention="ttt", **sizes)
    layer = ours.stages[0].blocks[0].attn
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    loaded = subquad.load_checkpoint(ours, theirs.state_dict(), strict=False)
    assert {key.rpartition("attn.")[2] for key in loaded.partly} == {"qkv.weight", "qkv.bias", "proj.weight"}
    dim = layer.proj.out_features
    for kind in ("weight", "bias"):
        given = getattr(theirs.blocks[0].attn.qkv, kind).chunk(3)
        parts = zip(given, getattr(layer.qkv, kind).chunk(3), before[f"qkv.{kind}"].chunk(3), strict=True)
        for rows, mine, old in parts:
            assert torch.equal(mine[:dim], rows) and torch.equal(mine[dim:], old[dim:])
    assert torch.equal(layer.proj.weight[:, :dim], theirs.blocks[0].attn.proj.weight)
    assert torch.equal(layer.proj.weight[:, dim:], before["proj.weight"][:, dim:])


def test_an_entry_without_numbers_starts_nothing():
    model = subquad.create_model("deit_tiny", attention="ttt", depths=[1], embed_dim=24, num_heads=2, img_size=32)
    name = "stages.0.blocks.0.attn.inner.w1"
    state = model.state_dict()
    loaded = subquad.load_checkpoint(model, state | {name: state[name][:0]}, strict=False)
    assert loaded.new == [name]


def _mlp(network, host):
    stage = {"swin": "layers", "pvt_v2": "stages"}
    return (getattr(network, stage[host])[0] if host in stage else network).blocks[1].mlp.fc1.weight


def test_a_strict_load_prints_as_a_line_too():
    model = subquad.create_model("deit_tiny", depths=[1], img_size=32)
    assert (
        repr(subquad.load_checkpoint(model, model.state_dict())) == f"{len(model.state_dict())} entries from our layout"
    )
    larger = subquad.create_model("deit_tiny", depths=[1], img_size=64)
    assert "1 resampled (pos_embed.table)" in repr(subquad.load_checkpoint(larger, model.state_dict()))


def test_weights_of_another_host_start_nothing():
    theirs, _, _ = timms("deit")
    model = subquad.create_model("swin_tiny", **SIZES)
    with pytest.raises(SubquadError, match="weights of a vit network, and the model is a swin"):
        subquad.load_checkpoint(model, theirs.state_dict(), strict=False)
    with pytest.raises(SubquadError, match=r"has nothing that fits this model: a\.weight"):
        subquad.load_checkpoint(model, {"a.weight": torch.ones(2)}, strict=False)


def test_a_link_is_fetched_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(downloading, "PAUSE", 0.001)
    model, other = (subquad.create_model("deit_tiny", depths=[1], img_size=32) for _ in range(2))
    subquad.save_weights(model, tmp_path / "a.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "a.pth")
    for name in ("a.safetensors", "a.pth"):
        with serving(**{name: Answer((tmp_path / name).read_bytes())}) as server:
            for _ in range(2):
                subquad.load_checkpoint(other, f"{server.url}/{name}?dl=1")
            assert len(server.requests) == 1
        assert torch.equal(other.head.weight, model.head.weight)
    with serving(**{"a.pth": Answer(b"PK\x03\x04 and no more")}) as server:
        with pytest.raises(SubquadError) as raised:
            subquad.load_checkpoint(other, f"{server.url}/a.pth")
        assert f"fetch {server.url}/a.pth by hand" in str(raised.value) and "\n" not in str(raised.value)
    kept = sorted(path.suffix for path in (tmp_path / "home" / "weights" / "links").iterdir())
    assert kept == [".json", ".json", ".lock", ".lock", ".lock", ".pth", ".safetensors"]
