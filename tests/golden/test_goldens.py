"""What the papers' networks computed, in float64, from made-up weights: ours computes the same numbers."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import released
import torch
import torch.nn.functional as F
from einops import rearrange
from made_weights import make_input, make_state_dict
from torch import nn

import subquad
from subquad import ATTENTION, TokenGrid
from subquad.attention import traits_of
from subquad.attention.mhla import mixing_start
from subquad.models.cswin import CrossShapedAttention
from subquad.models.layers import PartlyBiased, SelfAttention
from subquad.models.mavit import GatedAttention
from subquad.models.mlla_network import MambaLikeAttention, MambaLikeBlock
from subquad.models.pvt import SpatialReductionAttention
from subquad.ops import gaussian_kernel, map_formulas, newton_inverse, soft_formula
from subquad.rope import rope_of
from subquad.weights.released import family_of, our_name, to_our_layout

pytestmark = pytest.mark.whole


def golden(name):
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())


def assert_as_recorded(tensor, record, *, rtol=1e-8, atol=5e-9):
    """The recorded entries agree; they are stored with nine digits."""
    assert list(tensor.shape) == record["shape"]
    expected = torch.tensor(record["value"], dtype=torch.float64)
    torch.testing.assert_close(tensor.detach().double().flatten()[record["index"]], expected, rtol=rtol, atol=atol)


FILES = sorted(path.stem for path in Path(__file__).parent.glob("*.json"))
NETWORKS = [name for name in FILES if released.our_network(name) in subquad.models.NETWORKS]


def gradient_norm(model, target):
    """Of the parameter that a released entry became, or of its part in a fused projection."""
    name, _, part = target.partition("@")
    owner, _, parameter = name.rpartition(".")
    gradient = getattr(model.get_submodule(owner), parameter).grad
    if part.isalpha():
        layer = model.get_submodule(owner.rpartition(".")[0])
        letters = "".join(getattr(layer, "projected", "qkv"))
        if parameter == "bias" and isinstance(layer.qkv, PartlyBiased):
            letters = "".join(letter for letter, own in zip(letters, layer.qkv.with_bias, strict=True) if own)
        pieces = dict(zip(letters, gradient.chunk(len(letters)), strict=True))
        gradient = torch.cat([pieces[letter] for letter in part])
    elif part and parameter == "prefix_tokens":
        assert part == "0"  # the class token; the released networks have no registers
        gradient = gradient[:, :1]
    elif part:
        branches = len(model.get_submodule(owner.rpartition(".")[0]).branches)
        gradient = gradient.chunk(branches)[int(part)]
    return gradient.norm().item()


def assert_gradients_as_recorded(model, record, family, at=""):
    own = model.state_dict()
    for key, norm in record["grads"].items():
        target = our_name(at + key, family, own)
        assert gradient_norm(model, target) == pytest.approx(norm, rel=1e-6, abs=1e-12), key


def assert_stages_as_recorded(model, images, record):
    """Recorded as tokens, with the class token if there is one, or as maps."""
    for s, (tokens, grid) in enumerate(model.walk(images)):
        expected = record["outputs"][f"stage{s + 1}"]
        assert_as_recorded(grid.to_image(tokens) if len(expected["shape"]) == 4 else tokens, expected)


def assert_blocks_as_recorded(model, images, record):
    """Tokens behind some of a plain network's blocks, numbered from 0 or 1; MHLA's by blocks of the map."""
    blocks = {int(key[5:]): expected for key, expected in record["outputs"].items() if re.fullmatch(r"block\d+", key)}
    for number, (tokens, grid) in enumerate(
        model.walk(images) if blocks and model.is_plain else (), start=int(0 not in blocks)
    ):
        if number in blocks:
            if len(blocks[number]["shape"]) == 4:
                tokens = by_block(tokens, grid, model.blocks[0].attn.inner.pieces)
            assert_as_recorded(tokens, blocks[number])


def by_block(tokens, grid, pieces):
    """Tokens (b, n, c) as the released MHLA holds them: (b, blocks, tokens of a block, c)."""
    sides = {"r": pieces[0], "l": pieces[1], "y": grid.height // pieces[0]}
    return rearrange(tokens, "b (r y l x) c -> b (r l) (y x) c", **sides)


def float64_network(name):
    """A network that starts in float64, as those did whose numbers were kept."""
    torch.set_default_dtype(torch.float64)
    try:
        return subquad.create_model(name).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def kept_entries(record, model):
    """What a released network computes for itself when it is made: ours has the same."""
    kept = {name: entry["shape"] for name, entry in record["state_dict"].items() if entry["kind"] == "kept"}
    own, family = model.state_dict(), family_of(record["state_dict"])
    targets = {name: our_name(name, family) for name in kept}
    return {name: own[target].view(kept[name]) for name, target in targets.items() if target in own}


def test_every_network_that_is_recorded_is_one_of_the_table():
    kinds = {name: golden(name).get("outputs", {}) for name in FILES if not name.startswith(("agentsd", "dense"))}
    assert [name for name, outputs in kinds.items() if "logits" in outputs] == NETWORKS


# one network of each of the smaller hosts and mechanisms in the fast tests
SLOW = re.compile(
    "swin|flatten|pola|soft_tiny|ttt_vit|agent_deit|inline_pvt|plain|soft_norm|[mr]ala_t|nala|mlla|ttt_h|mhla|agent_pvt_t$"
)
SLOW_OR_NOT = [pytest.param(name, marks=pytest.mark.slow) if SLOW.search(name) else name for name in NETWORKS]


@pytest.mark.parametrize("name", SLOW_OR_NOT)
@pytest.mark.thinned(3)
def test_networks_compute_what_the_released_ones_do(name):
    record = golden(name)
    model = float64_network(released.our_network(name))
    state = make_state_dict(record["state_dict"]) | kept_entries(record, model)
    # PolaFormer's and FLatten's PVT count a final norm that nothing calls
    unused = sum(state[key].numel() for key in record.get("no_grad", []))
    assert sum(parameter.numel() for parameter in model.parameters()) == record["num_params"] - unused
    loaded = subquad.load_checkpoint(model, state)
    assert not loaded.resized
    images = make_input(record["input_shape"])
    with torch.no_grad():
        if "stage1" in record["outputs"]:
            assert_stages_as_recorded(model, images, record)
        assert_blocks_as_recorded(model, images, record)
    logits = model(images)
    assert_as_recorded(logits, record["outputs"]["logits"])
    logits.square().mean().backward()
    assert_gradients_as_recorded(model, record, loaded.family)
    with torch.no_grad():
        single = model.float()(images.float())
    assert_as_recorded(single, record["outputs"]["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_dense_backbone_computes_what_the_released_one_does():
    record = golden("ds_agent_pvt_t")
    shapes = record["kwargs"]["downstream_agent_shapes"]
    model = (
        subquad.create_model("agent_pvt_tiny", num_classes=0, pooled_agents=[y * x for y, x in shapes]).double().eval()
    )
    loaded = subquad.load_checkpoint(model, make_state_dict(record["state_dict"]))
    assert not loaded.resized
    maps = model.forward_intermediates(make_input(record["input_shape"]), intermediates_only=True)
    for features, expected in zip(maps, record["outputs"].values(), strict=True):
        assert_as_recorded(features, expected)
    sum(features.square().mean() for features in maps).backward()
    assert_gradients_as_recorded(model, record, loaded.family)


def grid_of(name):
    """The map that a layer's golden is called after."""
    height, width = name.rpartition("_")[2].split("x")
    return TokenGrid(int(height), int(width))


def check_layer(layer, state, record, grid, x):
    subquad.load_checkpoint(layer, state)
    y = layer(x.requires_grad_(), grid=grid)
    assert_as_recorded(y, record["outputs"]["out"])
    y.square().mean().backward()
    return layer


@pytest.mark.parametrize("name", ["pola_attn_pvt_6x10", "pola_attn_pvt_eps_6x10"])
def test_pola_attention_computes_what_the_released_layer_does(name):
    record, grid = golden(name), TokenGrid(6, 10)
    layer = SelfAttention(64, 4, ATTENTION["pola"], grid=grid, qkv_bias="eps" not in name).double()
    x = make_input(record["input_shape"]) * record.get("input_scale", 1)
    layer = check_layer(layer, released.pola_layer(make_state_dict(record["state_dict"]), 4), record, grid, x)
    assert layer.inner.power.grad.norm().item() == pytest.approx(record["grads"]["power"], rel=1e-6)
    assert layer.inner.temperature.grad.norm().item() == pytest.approx(record["grads"]["scale"], rel=1e-6)
    assert layer.inner.local.weight.grad.norm().item() == pytest.approx(record["grads"]["dwc.weight"], rel=1e-6)


def check_focused_layer(layer, name):
    record = golden(name)
    x = make_input(record["input_shape"])
    released_layer = released.focused_layer(make_state_dict(record["state_dict"]), 4)
    check_layer(layer.double(), released_layer, record, TokenGrid(6, 10), x)
    assert x.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)
    for key, parameter in (("scale", layer.inner.temperature), ("positional_encoding", layer.inner.positions.table)):
        assert parameter.grad.norm().item() == pytest.approx(record["grads"][key], rel=1e-6)


def test_focused_attention_computes_what_the_released_layer_does():
    check_focused_layer(SelfAttention(64, 4, ATTENTION["focused"], grid=TokenGrid(6, 10)), "flatten_attn_6x10")


def resampled_in_a_row(grid, kv_grid, v):
    """As the released layer brings the values of reduced keys to the queries: as a sequence, which shears their map."""
    return grid.to_map(F.interpolate(v.flatten(0, 1).mT, grid.num_tokens, mode="linear").mT.unflatten(0, v.shape[:2]))


def test_focused_attention_on_reduced_keys_is_the_released_layers_but_for_its_sheared_values(monkeypatch):
    layer = SpatialReductionAttention(64, 4, ATTENTION["focused"], grid=TokenGrid(6, 10), sr_ratio=2)
    monkeypatch.setattr(map_formulas, "values_on", resampled_in_a_row)
    check_focused_layer(layer, "flatten_attn_sr2_6x10")


def test_focused_attention_in_cswin_computes_what_the_released_branch_does():
    record, grid = golden("flatten_attn_cswin_8x8"), TokenGrid(8, 8)
    layer = CrossShapedAttention(64, 4, ATTENTION["focused"], grid=grid).double()
    state = {f"stage1.0.attns.0.{key}": tensor for key, tensor in make_state_dict(record["state_dict"]).items()}
    place, own = "stages.0.blocks.0.attn.", layer.state_dict()
    state = to_our_layout(state, "cswin", {place + name: tensor.shape for name, tensor in own.items()})
    projections = {name: tensor for name, tensor in own.items() if name.startswith(("qkv.", "proj."))}
    layer.load_state_dict(projections | {name.removeprefix(place): tensor for name, tensor in state.items()})
    projected = make_input(record["input_shape"]).requires_grad_()
    maps = projected.unflatten(2, grid.shape)
    y = layer.branch_of(0, maps, grid)
    assert_as_recorded(y, record["outputs"]["out"])
    y.square().mean().backward()
    assert projected.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)
    for key, parameter in (("get_v", layer.lepe), ("dwc", layer.branches[0].local)):
        assert parameter.weight.grad.norm().item() == pytest.approx(record["grads"][f"{key}.weight"], rel=1e-6)


class InBlock(nn.Module):
    """A layer where a network has it, so that names of entries are the released ones."""

    def __init__(self, layer):
        super().__init__()
        self.stages = nn.ModuleList([nn.Module()])
        self.stages[0].blocks = nn.ModuleList([nn.Module()])
        self.stages[0].blocks[0].attn = layer


@pytest.mark.parametrize("name", [name for name in FILES if re.match("(mala|rala|nala|polapp)_attn_", name)])
def test_gated_attention_computes_what_the_released_layer_does(name):
    record, at = golden(name), "layers.0.blocks.0.attn."
    mechanism, grid = ATTENTION[name.partition("_")[0]], TokenGrid(*map(int, re.findall(r"\d+", name)))
    dim, heads = map(int, re.search(r"\((\d+), (\d+)\)", record["call"]).groups())
    gate = "norm_silu" if any(key.startswith("ln.") for key in record["state_dict"]) else "plain"
    mechanism = partial(mechanism, local=False) if gate == "norm_silu" else mechanism
    layer = GatedAttention(dim, heads, mechanism, grid=grid, gate=gate).double()
    network = InBlock(layer)
    state = {at + key: tensor for key, tensor in make_state_dict(record["state_dict"]).items()}
    assert sum(parameter.numel() for parameter in network.parameters()) == record["num_params"]
    network.load_state_dict(to_our_layout(state, "mavit", {k: t.shape for k, t in network.state_dict().items()}))
    image = make_input(record["input_shape"]).requires_grad_()
    wide = traits_of(layer.inner).feature_width
    rotation = rope_of("mala", dim // heads, heads)(grid, image.device, image.dtype, feature_width=wide)
    y = layer(image.flatten(2).mT, grid=grid, rotation=rotation)
    assert_as_recorded(grid.to_image(y), record["outputs"]["out"])
    y.square().mean().backward()
    assert_gradients_as_recorded(network, record, "mavit", at)
    assert image.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)


def test_soft_attention_computes_what_the_released_layer_does():
    record = golden("soft_mod_attention_r2")
    grid = TokenGrid(*record["hw"])
    layer = SelfAttention(64, 2, partial(ATTENTION["soft"], ratio=2), grid=grid).double()
    state = make_state_dict(record["state_dict"])
    for key in state:
        for ending, factor in record["scaled"].items():
            state[key] = state[key] * factor if key.endswith(ending) else state[key]
    x = make_input(record["input_shape"])
    layer = check_layer(layer, released.soft_layer(state), record, grid, x)
    assert_as_recorded(x.grad, record["outputs"]["grad_input"], rtol=1e-6, atol=1e-6)
    landmark = layer.inner.landmark.weight.grad.norm().item()
    assert landmark == pytest.approx(record["grads"]["attn.Qlandmark_op.weight"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("circulant_attn_")])
def test_circulant_attention_computes_what_the_released_layer_does(name):
    record = golden(name)
    (_, tokens, dim), grid = record["input_shape"], grid_of(name)
    assert grid.num_tokens == tokens
    # heads mean nothing
    for heads in (1, 4):
        layer = SelfAttention(dim, heads, ATTENTION["circulant"], grid=grid, qkv_bias=False, gate_bias=True)
        state = released.circulant_layer(make_state_dict(record["state_dict"]))
        x = make_input(record["input_shape"])
        layer = check_layer(layer.double(), state, record, grid, x)
        assert x.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)
        parts = dict(zip("qkvg", layer.qkv.weight.grad.chunk(4), strict=True))
        found = {"gate.0.weight": parts.pop("g"), "gate.0.bias": layer.qkv.bias.grad}
        found |= {"qkv.weight": torch.cat(list(parts.values()))}
        found |= {f"proj.{key}": parameter.grad for key, parameter in layer.proj.named_parameters()}
        assert {key: gradient.norm().item() for key, gradient in found.items()} == pytest.approx(
            record["grads"], rel=1e-6
        )
        with torch.no_grad():
            single = layer.float()(x.float(), grid=grid)
        assert_as_recorded(single, record["outputs"]["out"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("mhla_attn_")])
def test_mhla_computes_what_the_released_layer_does(name):
    record = golden(name)
    (_, blocks, width, dim), grid = record["input_shape"], grid_of(name)
    side = math.isqrt(width)
    heads = re.search(r"heads=(\d+)", record["call"])
    settings = {"num_pieces": blocks, "normaliser": "released"}
    mechanism = partial(ATTENTION["mhla"], **settings)
    layer = SelfAttention(
        dim, int(heads[1]) if heads else 4, mechanism, grid=grid, qkv_bias=False, pre_norm=True
    ).double()
    assert layer.inner.pieces == (grid.height // side, grid.width // side)
    start = mixing_start("linear", layer.inner.pieces)
    torch.testing.assert_close(layer.inner.mixing, start, rtol=1e-6, atol=1e-7)
    order = {"r": layer.inner.pieces[0], "l": layer.inner.pieces[1], "y": side}

    given = make_input(record["input_shape"]).requires_grad_()
    state = released.mhla_layer(make_state_dict(record["state_dict"]), start)
    layer.load_state_dict({key: tensor.reshape(layer.state_dict()[key].shape) for key, tensor in state.items()})
    y = layer(rearrange(given, "b (r l) (y x) c -> b (r y l x) c", **order), grid=grid)
    assert_as_recorded(by_block(y, grid, layer.inner.pieces), record["outputs"]["out"])
    y.square().mean().backward()
    assert given.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)
    names = released.mhla_names(record["state_dict"])
    found = {key: layer.get_parameter(ours).grad.norm().item() for key, ours in names.items()}
    assert found == pytest.approx(record["grads"], rel=1e-6)
    with torch.no_grad():
        single = layer.float()(rearrange(given.float(), "b (r l) (y x) c -> b (r y l x) c", **order), grid=grid)
    assert_as_recorded(by_block(single, grid, layer.inner.pieces), record["outputs"]["out"], rtol=1e-4, atol=1e-4)


def soft_norm_layer(record):
    grid = TokenGrid(*record["hw"])
    layer = SelfAttention(64, 2, partial(ATTENTION["soft"], ratio=2, inverse="norm"), grid=grid).double()
    state = make_state_dict(record["state_dict"])
    for key in state:
        for ending, factor in record["scaled"].items():
            state[key] = state[key] * factor if key.endswith(ending) else state[key]
    layer.load_state_dict(released.soft_layer(state))
    return layer, grid


def test_normalised_soft_attention_is_the_released_layers_up_to_what_its_batch_mates_do():
    record = golden("soft_mod_norm_attention_r2")
    layer, grid = soft_norm_layer(record)
    x = make_input(record["input_shape"]).requires_grad_()
    y = layer(x, grid=grid)
    # the released code starts all images from one alpha; the golden says how far an image alone may be from that
    gap = record["gap"]["image_by_image"]
    assert_as_recorded(y, record["outputs"]["out"], rtol=0, atol=2 * gap * y.abs().max().item())
    y.square().mean().backward()
    landmark = layer.inner.landmark.weight.grad.norm().item()
    assert landmark == pytest.approx(record["grads"]["attn.Qlandmark_op.weight"], rel=1e-3)


def alpha_of_the_batch(gram):
    """The released start, one for all matrices, as its authors wrote it down."""
    alpha = 2 / gram.sum(-1).max() ** 2
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype)
    for _ in range(10):
        if (identity - alpha * gram @ gram).abs().sum(-2).max() <= 1.01:
            break
        alpha = alpha / 2
    return alpha


def test_normalised_soft_attention_with_one_alpha_for_the_batch_is_the_released_layer(monkeypatch):
    record = golden("soft_mod_norm_attention_r2")
    layer, grid = soft_norm_layer(record)
    monkeypatch.setattr(soft_formula, "halved_alpha", alpha_of_the_batch)
    assert_as_recorded(layer(make_input(record["input_shape"]), grid=grid), record["outputs"]["out"])


@pytest.mark.parametrize("scale", ["0.5", "0.2", "0.05"])
def test_newton_without_ridge_computes_what_the_released_function_does(scale):
    record = golden("soft_fn_newton_inverse")
    tokens = make_input(record["input_shape"]) * float(scale)
    gram = gaussian_kernel(tokens, tokens)
    inverse = newton_inverse(gram, alpha_of_the_batch(gram), ridge=0)
    assert_as_recorded(inverse, record["outputs"][f"plain20_{scale}"], atol=1e-8 * inverse.abs().max().item())


@pytest.mark.parametrize("scale", ["0.5", "0.2", "0.05"])
def test_newton_inverse_computes_what_the_released_function_does(scale):
    record = golden("soft_fn_newton_inverse")
    tokens = make_input(record["input_shape"]) * float(scale)
    gram = gaussian_kernel(tokens, tokens)
    assert_as_recorded(gram, record["outputs"][f"A_{scale}"])
    inverse = newton_inverse(gram)
    size = inverse.abs().max().item()
    assert_as_recorded(inverse, record["outputs"][f"ridge20_{scale}"], atol=1e-8 * size)
    single = newton_inverse(gram.float()).double()
    assert (single - inverse).norm() <= 1e-5 * inverse.norm()


def under_our_names(state, layer, family, *, theirs, ours):
    """Entries of a released block or layer, which stands at `theirs` in its network, as those of `layer` at `ours`."""
    shapes = {ours + name: tensor.shape for name, tensor in layer.state_dict().items()}
    renamed = to_our_layout({theirs + key: tensor for key, tensor in state.items()}, family, shapes)
    return {name.removeprefix(ours): tensor for name, tensor in renamed.items()}


def check_gradients(layer, record, family, *, theirs, ours):
    for key, norm in record["grads"].items():
        target = our_name(theirs + key, family).removeprefix(ours)
        assert gradient_norm(layer, target) == pytest.approx(norm, rel=1e-6, abs=1e-12), key


MLLA = {"theirs": "layers.0.blocks.0.attn.", "ours": "stages.0.blocks.0.attn."}
MLLA_BLOCK = {"theirs": "layers.0.blocks.0.", "ours": "stages.0.blocks.0."}


def mlla_sizes(record):
    """Channels and heads of a layer, between which the call has its grid."""
    return map(int, re.search(r"\((\d+), \(\d+, \d+\), (\d+)\)", record["call"]).groups())


def rotation_on(grid, dim, heads, dtype=torch.float64):
    return rope_of("mlla", dim // heads, heads)(grid, torch.device("cpu"), dtype)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("mlla_attn_")])
def test_mlla_attention_computes_what_the_released_layer_does(name):
    record, grid = golden(name), grid_of(name)
    dim, heads = mlla_sizes(record)
    layer = MambaLikeAttention(dim, heads, ATTENTION["mlla"], grid=grid).double()
    state = under_our_names(make_state_dict(record["state_dict"]), layer, "mllanet", **MLLA)
    others = {name: tensor for name, tensor in layer.state_dict().items() if name not in state}
    assert {name.partition(".")[0] for name in others} == {"in_proj", "gate", "conv", "proj"}
    layer.load_state_dict(state | others)
    x = make_input(record["input_shape"]).requires_grad_()
    supply = {"padding": None, "rotation": rotation_on(grid, dim, heads)}
    y = layer.mixed(supply | layer.heads(x), grid, grid)
    assert_as_recorded(y, record["outputs"]["out"])
    y.square().mean().backward()
    check_gradients(layer, record, "mllanet", **MLLA)
    assert x.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("mlla_block_")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_mllas_block_computes_what_the_released_one_does(name, dtype):
    record, grid = golden(name), grid_of(name)
    dim, heads = mlla_sizes(record)
    block = MambaLikeBlock(dim, MambaLikeAttention(dim, heads, ATTENTION["mlla"], grid=grid)).to(dtype)
    block.load_state_dict(under_our_names(make_state_dict(record["state_dict"]), block, "mllanet", **MLLA_BLOCK))
    x = make_input(record["input_shape"]).to(dtype).requires_grad_()
    y = block(x, grid=grid, rotation=rotation_on(grid, dim, heads, dtype))
    if dtype == torch.float32:
        assert_as_recorded(y, record["outputs"]["out"], rtol=1e-4, atol=1e-4)
        return
    assert_as_recorded(y, record["outputs"]["out"])
    y.square().mean().backward()
    check_gradients(block, record, "mllanet", **MLLA_BLOCK)
    assert x.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)


VIT3 = {"theirs": "blocks.0.attn.", "ours": "stages.0.blocks.0.attn."}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("ttt_attn")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_test_time_training_computes_what_the_released_layer_does(name, dtype):
    record, grid = golden(name), TokenGrid(*map(int, re.findall(r"\d+", name)))
    dim, heads = map(int, re.findall(r"\d+", record["call"])[:2])
    layer = SelfAttention(dim, heads, ATTENTION["ttt"], grid=grid).to(dtype)
    assert sum(parameter.numel() for parameter in layer.parameters()) == record["num_params"]
    layer.load_state_dict(under_our_names(make_state_dict(record["state_dict"]), layer, "vit", **VIT3))
    x = make_input(record["input_shape"]).to(dtype).requires_grad_()
    y = layer(x, grid=grid, rotation=rotation_on(grid, dim, heads, dtype) if "rope" in name else None)
    if dtype == torch.float32:
        assert_as_recorded(y, record["outputs"]["out"], rtol=1e-4, atol=1e-4)
        return
    assert_as_recorded(y, record["outputs"]["out"])
    y.square().mean().backward()
    check_gradients(layer, record, "vit", **VIT3)
    assert x.grad.norm().item() == pytest.approx(record["grad_input"], rel=1e-6)
