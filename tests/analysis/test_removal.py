"""Keys are removed exactly: as if they had not been there, and nothing else is touched."""

import json

import pytest
import timm
import torch
from hosts import without_prefix
from mechanisms import WITH_WEIGHTS

import subquad
from subquad import ATTENTION, SubquadError
from subquad.analysis import (
    LayerAttention,
    Removal,
    attention_weights,
    count_confusions,
    count_hits,
    removed_pairs,
    removing,
    survey,
)
from subquad.analysis.removal import _without
from subquad.attention import traits_of
from subquad.attention.key_removal import recentred, renormalised
from subquad.grid import TokenGrid
from subquad.ops import inline_weights, linear_weights


def network(name, **settings):
    torch.manual_seed(0)
    sizes = {"depths": (2,), "num_classes": 3, "img_size": (10, 12), "patch_size": 2, "embed_dim": 16}
    model = subquad.create_model("deit_micro", attention=name, **sizes, **without_prefix(name), **settings).eval()
    # as large as trained ones: with the small weights that training starts from all rows are nearly alike
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.5)
        torch.nn.init.normal_(block.attn.proj.weight, std=0.5)
    torch.nn.init.normal_(model.head.weight)
    return model


def test_neighbourhoods_are_cut_at_borders_and_as_many_go_at_random():
    grid = TokenGrid(14, 14, 1)
    local = removed_pairs(grid, Removal("local", 3))
    assert local.sum() == 1600 and not local[0].any() and not local[:, 0].any() and local.diagonal()[1:].all()
    other = removed_pairs(grid, Removal("random", 3))
    assert torch.equal(other.sum(1), local.sum(1)) and not (other & local).any()
    assert not torch.equal(other, removed_pairs(grid, Removal("random", 3), layer=1))
    assert not torch.equal(other, removed_pairs(grid, Removal("random", 3, seed=1)))
    assert not removed_pairs(grid, Removal()).any()
    # a map that is hardly larger than the window: no more than all others can go, as docs/findings.md says
    small = [removed_pairs(TokenGrid(8, 8), Removal(kind, 7)).sum(1) for kind in ("local", "random")]
    assert [counts.double().mean().item() for counts in small] == [30.25, 24.375]
    assert torch.equal(small[1], torch.minimum(small[0], 64 - small[0]))


def test_rows_become_those_of_the_keys_that_are_left():
    q, k = torch.randn(2, 3, 12, 8, dtype=torch.float64), torch.randn(2, 3, 12, 8, dtype=torch.float64)
    gone = torch.zeros(12, 12, dtype=torch.bool)
    gone[:, [2, 7]] = True
    left = [j for j in range(12) if j not in (2, 7)]
    scores = q @ k.mT
    for weights, alone, change in [
        (scores.softmax(-1), scores[..., left].softmax(-1), renormalised),
        (linear_weights(q, k, eps=0), linear_weights(q, k[:, :, left], eps=0), renormalised),
        (inline_weights(q, k), inline_weights(q, k[:, :, left]), recentred),
    ]:
        changed = change(weights, gone)
        assert torch.allclose(changed[..., left], alone, atol=1e-12) and (changed[..., [2, 7]] == 0).all()


REMOVABLE = [name for name in WITH_WEIGHTS if traits_of(ATTENTION[name]).key_removal is not None]


@pytest.mark.parametrize("name", [name for name in WITH_WEIGHTS if name not in REMOVABLE])
def test_what_weights_can_not_tell_is_not_guessed(name):
    images = torch.randn(1, 3, 10, 12)
    with pytest.raises(SubquadError, match="does not say what its weights become without some keys"):
        removing(network(name), Removal("local", 3), images).__enter__()


@pytest.mark.parametrize("name", REMOVABLE)
def test_nothing_removed_is_the_network_itself(name):
    model, images = network(name).double(), torch.randn(2, 3, 10, 12, dtype=torch.float64)
    before = model(images)
    with torch.no_grad(), removing(model, Removal(), images):
        assert torch.allclose(model(images), before, atol=1e-9)
    with torch.no_grad(), removing(model, Removal("local", 3), images):
        assert not torch.allclose(model(images), before, atol=1e-5)
    assert torch.equal(model(images), before) and "forward" not in vars(model.blocks[0].attn.inner)


@pytest.mark.parametrize(("name", "settings"), [("softmax", {}), ("inline", {"local": False})])
def test_with_all_but_itself_removed_a_query_sees_its_own_value(name, settings):
    model, images = network(name, **settings), torch.randn(1, 3, 10, 12)
    seen = {}

    def look(module, given, supply, y):
        seen.update(supply, y=y)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(
            "subquad.analysis.removal.removed_pairs", lambda grid, *_: ~torch.eye(grid.num_tokens, dtype=torch.bool)
        )
        with removing(model, Removal("local", 3), images):
            model.blocks[0].attn.inner.register_forward_hook(look, with_kwargs=True)
            model(images)
    assert torch.allclose(seen["y"], seen["v"], atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "linear", "inline", "pola", "mlla"])
def test_what_fills_up_a_window_is_no_key(name):
    """Rows without removed keys are those of the mechanism where these are absent beside the padding."""
    grid, settings = TokenGrid(4, 4), {"dim": 16, "num_heads": 2}
    module = ATTENTION[name](**settings, grid=grid, kv_grid=grid).double().eval()
    q, k = torch.randn(2, 3, 2, 16, 8, dtype=torch.float64).unbind(0)
    padding = torch.zeros(3, 16, dtype=torch.bool)
    padding[0, 12:] = padding[1, 3::4] = True
    given = {word: value for word, value in {"q": q, "k": k}.items() if word in module.inputs}
    with torch.no_grad():
        weights = module.weights(**given, padding=padding, grid=grid, kv_grid=grid)
        inputs = given | {"padding": padding}
        layer = LayerAttention("a", name, weights, grid, grid, module, inputs, traits_of(module))
        changed = _without(layer, Removal("local", 3), 0, True)
        for row, gone in enumerate(removed_pairs(grid, Removal("local", 3))):
            alone = module.weights(**given, padding=padding | gone, grid=grid, kv_grid=grid)
            # what is added to divisors, 1e-6 and less, counts where no key is near a query
            assert torch.allclose(changed[..., row, :], alone[..., row, :], atol=1e-3), row


@pytest.mark.parametrize("name", REMOVABLE)
def test_branches_can_be_switched_off(name):
    model, images = network(name).double(), torch.randn(2, 3, 10, 12, dtype=torch.float64)
    for parameter in [p for block in model.blocks for p in block.attn.inner.parameters()]:
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad(), removing(model, Removal(), images, branches=False):
        without = model(images)
    for block in model.blocks:
        block.attn.inner.local = None
    assert torch.allclose(without, model(images), atol=1e-9)


def test_hits_are_counted_without_branches_where_that_is_asked_for():
    model, images = network("inline"), torch.randn(64, 3, 10, 12)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.inner.local.fc2.weight, std=5)
    with torch.no_grad(), removing(model, Removal(), images, branches=False):
        labels = model(images).argmax(-1)
    assert count_hits(model, [Removal()], branches=False)(images, labels) == {"none": [1.0] * 64}
    assert 0 in count_hits(model, [Removal()])(images, labels)["none"]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_networks_of_timm_are_read_and_lose_keys(name):
    small = {"swin": {"depths": (1, 1), "embed_dim": 32, "num_heads": (2, 2), "window_size": 4, "img_size": 32}}
    small["vit"] = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64}
    model = timm.create_model(name, pretrained=False, num_classes=3, **small[name.split("_")[0]]).eval()
    size = model.patch_embed.img_size[0]
    images = torch.randn(2, 3, size, size)
    before = model(images)
    layers = attention_weights(model, images)
    assert len(layers) == 2 and all(layer.mechanism == "softmax" for layer in layers)
    for layer in layers:
        assert torch.allclose(layer.weights.sum(-1), torch.ones(()), atol=1e-5)
        assert layer.grid == layer.kv_grid and layer.weights.shape[-1] == layer.grid.num_tokens
        assert layer.inputs["q"].shape[:3] == layer.weights[:, :, 0].shape[:3]
    assert layers[0].grid == (TokenGrid(4, 4, 1) if "vit" in name else TokenGrid(4, 4))
    with torch.no_grad(), removing(model, Removal(), images):
        assert torch.allclose(model(images), before, atol=1e-5)
    with torch.no_grad(), removing(model, Removal("random", 3), images):
        assert not torch.allclose(model(images), before, atol=1e-5)
    assert torch.equal(model(images), before)


def test_lavits_layers_are_read():
    model = subquad.create_model("lavit_deit_tiny", img_size=16, patch_size=4, embed_dim=16, num_heads=2, depths=(6,))
    images = torch.randn(2, 3, 16, 16)
    before = model.eval()(images)
    layers = attention_weights(model, images)
    assert [layer.mechanism for layer in layers] == ["softmax"] * 3 + ["less"] * 3
    assert all(torch.allclose(layer.weights.sum(-1), torch.ones(()), atol=1e-5) for layer in layers)
    assert torch.equal(model(images), before)
    with torch.no_grad(), removing(model, Removal(), images):
        assert torch.equal(model(images), before)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        # with all but itself removed, every layer gives a token's own value
        patch.setattr(
            "subquad.analysis.removal.removed_pairs", lambda grid, *_: ~torch.eye(grid.num_tokens, dtype=torch.bool)
        )
        with removing(model, Removal("local", 3), images):
            for block in (model.blocks[0], model.blocks[4]):
                attn, x = block.attn, torch.randn(2, 17, 16)
                y, _ = attn(x, torch.randn(2, 2, 17, 17), grid=TokenGrid(4, 4, 1))
                assert torch.allclose(y, attn.proj(attn.values(x).transpose(1, 2).flatten(2)), atol=1e-5)
    assert torch.equal(model(images), before)


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count):
        self.images, self.labels = torch.randn(count, 3, 10, 12), torch.arange(count) % 3
        self.seen = []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.seen.append(index)
        return None if index == 4 else (self.images[index], int(self.labels[index]))


def test_a_survey_goes_on_where_it_was_broken_off(tmp_path):
    model, images, file = network("linear"), Pictures(11), tmp_path / "hits.json"
    given = {"about": {"network": "a"}, "batch_size": 3, "device": torch.device("cpu")}
    removals = (Removal(), Removal("local", 3))
    whole = survey(images, count_hits(model, removals), **given)
    assert set(whole) == {"none", "local 9"} and all(len(values) == 10 for values in whole.values())
    left = [k for k in range(11) if k != 4]
    right = (model(images.images[left]).argmax(-1) == images.labels[left]).double().tolist()
    assert whole["none"] == right

    calls = []

    def breaking(batch, labels):
        calls.append(len(labels))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return count_hits(model, removals)(batch, labels)

    with pytest.raises(KeyboardInterrupt):
        survey(images, breaking, file=file, **given)
    assert json.loads(file.read_text())["done"] == 6
    images.seen.clear()
    assert survey(images, count_hits(model, removals), file=file, **given) == whole
    assert min(images.seen) == 6
    # finished: nothing is computed again, unless it is about something else
    assert survey(images, breaking, file=file, **given) == whole
    images.seen.clear()
    survey(images, count_hits(model, removals), file=file, **{**given, "about": {"network": "b"}})
    assert min(images.seen) == 0


def test_hits_are_of_answers_that_are_numbers():
    model, images = network("softmax"), torch.randn(2, 3, 10, 12)
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(SubquadError, match=r"answer to 2 images \(keys removed: none\) is not finite"):
        count_hits(model)(images, torch.zeros(2))


@pytest.mark.parametrize("name", ["reduced keys", "unknown places"])
def test_a_network_that_can_not_lose_keys_is_not_counted_as_without_them(name):
    if name == "reduced keys":
        # the last stage has one place at 32 px
        model, side = subquad.create_model("pvt_tiny", num_classes=3, img_size=32, depths=(1, 1, 1, 1)), 32
    else:
        model, side = timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, num_classes=3, depth=1), 64
    images = torch.randn(1, 3, side, side)
    assert count_hits(model, [Removal()])(images, torch.zeros(1)).keys() == {"none"}
    with pytest.raises(SubquadError, match=r"no layer of .* lost keys: they stand on a smaller map"):
        count_hits(model)(images, torch.zeros(1))


def test_confusions_are_counted_by_image():
    """Linear attention with all queries on one ray confuses every pair whose lengths differ enough; softmax none."""
    images = torch.randn(3, 3, 10, 12)
    labels = torch.zeros(3)
    for name, expected in (("linear", True), ("softmax", False)):
        model = network(name)
        for block in model.blocks:
            size = block.attn.qkv.weight.shape[1]
            with torch.no_grad():
                # rank one: queries of a head are multiples of one vector, of either sign
                block.attn.qkv.weight[:size] = torch.outer(torch.rand(size), torch.randn(size))
                block.attn.qkv.bias[:size] = 0
        found = count_confusions(model)(images, labels)["confused"]
        assert len(found) == 3 and all((value > 100) == expected for value in found), (name, found)


def test_complaints_name_the_numbers():
    model = subquad.create_model("lavit_deit_tiny", img_size=16, patch_size=4, embed_dim=16, num_heads=2, depths=(6,))
    with pytest.raises(SubquadError, match=r"no layer of .* shows its queries"):
        count_confusions(model)(torch.randn(1, 3, 16, 16), torch.zeros(1))
    with pytest.raises(SubquadError, match="Linear shows no attention that keys could be removed from"):
        removing(torch.nn.Linear(3, 2), Removal(), torch.randn(1, 3)).__enter__()
    silent = network("agent")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(ATTENTION["agent"], "traits")
        with pytest.raises(SubquadError, match=r"AgentAttention does not say what its weights become .* a key_removal"):
            removing(silent, Removal(), torch.randn(1, 3, 10, 12)).__enter__()
    with pytest.raises(SubquadError, match="unknown removal 'near'"):
        Removal("near")
    with pytest.raises(SubquadError, match="odd side, got 4"):
        Removal("local", 4)
