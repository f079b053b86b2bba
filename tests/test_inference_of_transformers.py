"""`subquad.optimize` of transformers' plain vision encoders, as they are and converted."""

import importlib
import pickle
from copy import deepcopy

import pytest
import torch

import subquad
from subquad.inference.older_blocks import BLOCKS
from subquad.inference.transformers_blocks import PARTS, PREFIX, full_name
from subquad.kernels import replaying, unavailable

NATIVE = unavailable("native") is None
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 100,
    "image_size": 24,
    "patch_size": 4,
}
MODELS = ["ViT", "Dinov2WithRegisters", "DINOv3ViT", "SiglipVision", "CLIPVision"]
ALL = [None, "softmax", "linear", "inline", "agent", "mlla"]


def scattered(model):
    """The same module with random numbers in every parameter, in evaluation."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim == 1 else 0.15)
    return model.eval()


def network(kind="ViT", name=None, **settings):
    """A tiny encoder of a kind, whose attention is another's."""
    transformers = pytest.importorskip("transformers", "5.1")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**SIZES | settings))
    if name is not None:
        subquad.convert(model, name, in_place=True)
    return scattered(model)


def layer(full):
    """A block of the class of this full name, of the configuration that its class asks for."""
    pytest.importorskip("transformers", "5.1")
    home, _, cls = full.rpartition(".")
    module = pytest.importorskip(home, exc_type=ImportError)
    configs = [name for name in vars(module) if name.endswith("Config")]
    # those that read texts too have a part for images
    config = next((name for name in configs if name.endswith("VisionConfig")), configs[0])
    torch.manual_seed(0)
    sizes = {"image_size": [24, 24]} if "yolos" in home else {}
    settings = getattr(module, config)(**SIZES | sizes)
    settings._attn_implementation = "sdpa"
    return scattered(getattr(module, cls)(settings))


def answer(model, x):
    return model(x).last_hidden_state


def error(x, wanted):
    return float((x.float() - wanted).norm() / wanted.norm())


def turns(n, width=24):
    angles = torch.randn(n, width // 2).repeat(1, 2)
    return angles.cos(), angles.sin()


@torch.no_grad()
@pytest.mark.parametrize("full", [*PARTS, *BLOCKS])
def test_every_row_is_what_transformers_has(full):
    plain = layer(full)
    fast = subquad.optimize(deepcopy(plain))
    assert type(fast).__name__ == PREFIX + type(plain).__name__
    for x in [torch.randn(2, 36, 48), torch.randn(1, 20, 48)] * 2:
        given = {"position_embeddings": turns(x.shape[1] - 2)} if "dinov3" in full else {}
        asked = given if full in BLOCKS else {"attention_mask": None, **given}
        assert 0 < error(fast(x, **asked), plain(x, **asked)) < 1e-6
    if NATIVE:
        assert all(kept is not None for kept in replaying.tapes_of(fast)["block"].tapes.values())


@torch.no_grad()
@pytest.mark.parametrize("full", PARTS)
def test_hooks_of_attention_layers_find_tokens_where_transformers_puts_them(full):
    """Who scales what is given by its place scaled rotations too, and by SigLIP's names found nothing there."""
    plain = layer(full)
    fast, x, seen = subquad.optimize(deepcopy(plain)), torch.randn(2, 36, 48), []
    for block in (plain, fast):
        attention = getattr(block, PARTS[full].attention)
        given = {"position_embeddings": turns(34)} if "dinov3" in full else {}
        attention.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append([one is not None for one in args] + sorted(kwargs)), with_kwargs=True
        )
        block(x, attention_mask=None, **given)
    tokens, wanted = ("hidden_states", *given), seen[0]
    assert [name for name in wanted if name in tokens] == [name for name in seen[1] if name in tokens]
    assert wanted.count(True) == seen[1].count(True)


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", MODELS)
def test_an_optimized_network_gives_what_it_gave(kind, name):
    model = network(kind, name)
    fast, keys = subquad.optimize(deepcopy(model)), list(model.state_dict())
    half, rounded = subquad.optimize(deepcopy(model), torch.bfloat16), deepcopy(model).bfloat16()
    for shape in [(2, 3, 24, 24), (1, 3, 24, 24)] * 3:
        x = torch.randn(shape)
        wanted = answer(model, x)
        assert error(answer(fast, x), wanted) < 1e-5
        lost = error(answer(rounded, x.bfloat16()), wanted)
        assert error(answer(half, x.bfloat16()), wanted) < 1.5 * lost
    assert list(fast.state_dict()) == keys


def of_first_vit(kind, name=None, **settings):
    """A network whose blocks have the form of transformers' first ViT; its answer alone is a tensor."""
    settings = {"num_detection_tokens": 5, "image_size": [24, 24]} | settings
    return network("Yolos", name, **settings) if kind == "Yolos" else dpt(name)


def dpt(name):
    transformers = pytest.importorskip("transformers", "5.1")
    torch.manual_seed(0)
    sizes = {"backbone_out_indices": [0, 1, 0, 1], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}
    model = transformers.DPTModel(transformers.DPTConfig(**SIZES | sizes, is_hybrid=False))
    return scattered(model if name is None else subquad.convert(model, name))


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["Yolos", "DPT"])
def test_blocks_in_the_form_of_the_first_vit(kind, name):
    model = of_first_vit(kind, name)
    fast, keys = subquad.optimize(deepcopy(model)), list(model.state_dict())
    fused = [module for module in fast.modules() if type(module).__name__.startswith(PREFIX)]
    assert len(fused) == 2
    heard = []
    for number in (2, 1, 2, 1):
        x = torch.randn(number, 3, 24, 24)
        wanted = answer(model, x)
        assert 0 < error(answer(fast, x), wanted) < 1e-5
        # who listens to a layer hears it, and nothing else changes
        hooks = [module.output.dense.register_forward_hook(lambda *_: heard.append(1)) for module in fused]
        assert error(answer(fast, x), wanted) < 1e-5
        for hook in hooks:
            hook.remove()
    assert len(heard) == 4 * len(fused)
    other = pickle.loads(pickle.dumps(fast))
    assert torch.equal(answer(other, x), answer(fast, x)) and list(other.state_dict()) == keys
    assert error(answer(fast.train(), x), answer(model.train(), x)) < 1e-6


@torch.no_grad()
@pytest.mark.skipif(not NATIVE, reason="no kernels")
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_are_fast_where_their_answers_are_asked_for_as_well(kind):
    model = network(kind)
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(1, 3, 24, 24)
    for _ in range(2):
        states, wanted = (one(x, output_hidden_states=True).hidden_states for one in (fast, model))
        assert len(states) == len(wanted) == 3
        assert all(error(*both) < 1e-5 for both in zip(states, wanted, strict=True))
        assert torch.equal(states[-1], fast(x, output_hidden_states=True).hidden_states[-1])
        assert not torch.equal(states[-1], wanted[-1])


@torch.no_grad()
@pytest.mark.parametrize("name", [None, "inline"])
def test_networks_for_any_size(name):
    model = network("Dinov2", name)
    fast = subquad.optimize(deepcopy(model))
    for shape in [(1, 3, 24, 24), (1, 3, 32, 20)] * 3:
        x = torch.randn(shape)
        assert error(answer(fast, x), answer(model, x)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Dinov2", {"use_swiglu_ffn": True}),
        ("Dinov2", {"hidden_act": "relu"}),
        ("Dinov2", {"qkv_bias": False}),
        ("Dinov2", {"attn_implementation": "eager"}),
        ("DINOv3ViT", {"mlp_bias": False}),
        ("DINOv3ViT", {"use_gated_mlp": True}),
    ],
    ids=str,
)
def test_what_blocks_have_beside_is_kept(kind, settings):
    model = network(kind, **settings)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.03)):
        fast, x = subquad.optimize(deepcopy(model), dtype), torch.randn(2, 3, 24, 24)
        assert all(error(answer(fast, x.to(dtype)), answer(model, x)) < tolerance for _ in range(2))


@pytest.mark.parametrize(
    "place",
    ["layernorm_before", "attention", "attention.q_proj", "attention.v_proj", "attention.o_proj", "mlp", "mlp.fc1"],
)
@pytest.mark.parametrize("name", [None, "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_who_listens_hears_every_step(name, place, dtype):
    fast, x = subquad.optimize(network("ViT", name), dtype), torch.randn(1, 3, 24, 24).to(dtype)
    fast(x)
    heard = []
    fast.get_submodule(f"layers.1.{place}").register_forward_hook(lambda *args: heard.append(place))
    fast(x)
    assert heard == [place]


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "place"), [("ViT", "dropout"), ("Dinov2", "drop_path"), ("DINOv3ViT", "drop_path"), ("CLIPVision", None)]
)
@pytest.mark.parametrize("name", [None, "linear"])
def test_what_drops_is_called_where_it_goes_on_or_somebody_listens(kind, place, name):
    settings = {"drop_path": {"drop_path_rate": 0.5}, "dropout": {"hidden_dropout_prob": 0.5}}.get(place, {})
    model, x = network(kind, name, **settings), torch.randn(2, 3, 24, 24)
    fast, heard = subquad.optimize(deepcopy(model)), []
    answer(fast, x)
    last = [module for module in fast.modules() if type(module).__name__.startswith(PREFIX)][-1]
    if place is not None:
        handle = last.get_submodule(place).register_forward_hook(lambda *given: heard.append(place))
        assert error(answer(fast, x), answer(model, x)) < 1e-5 and heard == [place] * 2
        handle.remove()
    for each in (model, fast):
        for module in each.modules():
            if not list(module.children()):
                module.train()
    answers = []
    for each in (model, fast):
        torch.manual_seed(1)
        answers.append(answer(each, x))
    assert error(answers[1], answers[0]) < 1e-5


class Adapted(torch.nn.Linear):
    """What others make of a projection."""

    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize("place", ["attention.k_proj", "attention.o_proj", "mlp.fc2"])
@pytest.mark.parametrize("name", [None, "linear"])
def test_layers_of_other_classes_are_called(name, place):
    model, x = network("ViT", name), torch.randn(2, 3, 24, 24)
    for block in model.layers:
        block.get_submodule(place).__class__ = Adapted
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        fast = subquad.optimize(deepcopy(model), dtype)
        assert error(answer(fast, x.to(dtype)), answer(model, x)) < tolerance


@torch.no_grad()
def test_masks_and_causal_attention_are_seen():
    plain = layer("transformers.models.clip.modeling_clip.CLIPEncoderLayer")
    fast, x = subquad.optimize(deepcopy(plain)), torch.randn(2, 9, 48)
    mask = torch.zeros(2, 1, 9, 9).masked_fill(torch.rand(2, 1, 9, 9) < 0.3, float("-inf"))
    mask.diagonal(dim1=-2, dim2=-1).zero_()
    for given in ({"attention_mask": mask}, {"attention_mask": None, "is_causal": True}):
        wanted = plain(x, **given)
        assert error(wanted, plain(x, None)) > 1e-3
        assert error(fast(x, **given), wanted) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_hidden_states_and_attention_maps_are_given(kind):
    model = network(kind, attn_implementation="eager")
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(2, 3, 24, 24)
    fast(x)
    asked = {"output_hidden_states": True, "output_attentions": True}
    wanted, given = model(x, **asked), fast(x, **asked)
    for one, other in ((wanted.hidden_states, given.hidden_states), (wanted.attentions, given.attentions)):
        assert len(one) == len(other) > 1
        assert all(error(x, y) < 1e-5 for x, y in zip(other, one, strict=True))
    assert error(answer(fast, x), answer(model, x)) < 1e-5


@torch.no_grad()
def test_another_implementation_of_attention_is_taken_from_then_on(monkeypatch):
    fast, x, called = subquad.optimize(network()), torch.randn(1, 3, 24, 24), []
    wanted = [answer(fast, x) for _ in range(2)][-1]
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS

    def of_mine(*args, **kwargs):
        called.append(kwargs)
        return functions["sdpa"](*args, **kwargs)

    monkeypatch.setitem(functions, "mine", of_mine)
    fast.config._attn_implementation = "mine"
    assert error(answer(fast, x), wanted) < 1e-5
    assert len(called) == SIZES["num_hidden_layers"]


def test_training_goes_the_single_steps():
    model = network("ViT", hidden_dropout_prob=0.3)
    fast = subquad.optimize(deepcopy(model)).train().requires_grad_(True)
    model.train()
    x, answers = torch.randn(2, 3, 24, 24), []
    for each in (model, fast):
        torch.manual_seed(1)
        answers.append(answer(each, x))
        answers[-1].square().sum().backward()
    assert torch.equal(*answers)
    assert torch.equal(model.layers[0].attention.q_proj.weight.grad, fast.layers[0].attention.q_proj.weight.grad)


@torch.no_grad()
def test_it_is_copied_pickled_and_saved_and_its_weights_are_changed_in_place(tmp_path):
    fast, x = subquad.optimize(network()), torch.randn(1, 3, 24, 24)
    wanted = answer(fast, x)
    for other in (deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(answer(other, x), wanted)
    fast.save_pretrained(tmp_path)
    assert error(answer(type(fast).from_pretrained(tmp_path), x), wanted) < 1e-6
    fast.load_state_dict({name: value + 0.1 for name, value in fast.state_dict().items()})
    assert error(answer(fast, x), answer(deepcopy(fast).train(), x)) < 1e-5


@torch.no_grad()
def test_it_is_converted_after_and_put_back():
    model, x = network("Dinov2"), torch.randn(1, 3, 24, 24)
    wanted = answer(model, x)
    converted = subquad.convert(subquad.optimize(deepcopy(model)), "linear", in_place=True)
    first = answer(subquad.convert(deepcopy(model), "linear", in_place=True), x)
    assert error(answer(converted, x), first) < 1e-5
    assert error(answer(subquad.restore(converted), x), wanted) < 1e-5


def test_classes_that_derive_from_theirs_stay():
    plain = layer(next(iter(PARTS)))

    class Own(type(plain)):
        pass

    plain.__class__ = Own
    assert type(subquad.optimize(plain)) is Own
    assert full_name(Own) not in PARTS


def test_layers_of_other_parts_stay():
    plain = layer(next(iter(PARTS)))
    plain.attention = torch.nn.Identity()
    assert type(subquad.optimize(deepcopy(plain))) is type(plain)


@torch.no_grad()
def test_it_is_exported():
    fast, x = subquad.optimize(network("ViT", "linear")), torch.randn(2, 3, 24, 24)
    program = torch.export.export(fast, (x,))
    assert error(program.module()(x).last_hidden_state, answer(fast, x)) < 1e-5


def swin(name=None):
    """A tiny Swin, whose attention is another's."""
    transformers = pytest.importorskip("transformers", "5.1")
    torch.manual_seed(0)
    sizes = {"image_size": (24, 36), "patch_size": 2, "embed_dim": 24, "depths": [2, 1], "num_heads": [2, 2]}
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=3, drop_path_rate=0.0))
    if name is not None:
        subquad.convert(model, name, in_place=True)
    return scattered(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "linear", "inline", "agent"])
def test_a_converted_swin_is_of_few_steps(name):
    model, x = swin(name), torch.randn(2, 3, 24, 36)
    wanted, keys = answer(model, x), list(model.state_dict())
    lost = error(answer(deepcopy(model).bfloat16(), x.bfloat16()), wanted)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1.5 * lost)):
        fast = subquad.optimize(deepcopy(model), dtype)
        assert all(error(answer(fast, x.to(dtype)), wanted) < tolerance for _ in range(3))
        assert list(fast.state_dict()) == keys
        blocks = [block for stage in fast.encoder.layers for block in stage.blocks]
        assert all("block" in replaying.tapes_of(block) for block in blocks) or not NATIVE
    assert torch.equal(answer(fast.float().train(), x), answer(deepcopy(model).bfloat16().float().train(), x))


@torch.no_grad()
@pytest.mark.parametrize("place", ["layernorm_before", "attention.k_proj", "attention.o_proj", "mlp", "mlp.fc1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_who_listens_hears_every_step_of_swin(place, dtype):
    fast, x = subquad.optimize(swin("linear"), dtype), torch.randn(1, 3, 24, 36).to(dtype)
    fast(x)
    heard = []
    block = fast.encoder.layers[0].blocks[1]
    block.get_submodule(place).register_forward_hook(lambda *args: heard.append(place))
    fast(x)
    assert heard == [place]


@torch.no_grad()
@pytest.mark.parametrize("place", ["dropout", "drop_path"])
@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_what_drops_in_swin_is_called_where_it_goes_on_or_somebody_listens(name, place):
    """Dropout that goes on in evaluation, for the spread of its answers, did nothing in converted blocks."""
    model, x = swin(name), torch.randn(2, 3, 24, 36)
    fast = subquad.optimize(deepcopy(model))
    before = answer(fast, x)
    for each in (model, fast):
        for block in (block for stage in each.encoder.layers for block in stage.blocks):
            block.set_submodule(place, torch.nn.Dropout(0.5).train())
    for seed in range(2):
        answers = []
        for each in (model, fast):
            torch.manual_seed(seed)
            answers.append(answer(each, x))
        assert error(answers[1], answers[0]) < 1e-5 < error(answers[0], before)
    for each in (model, fast):
        for block in (block for stage in each.encoder.layers for block in stage.blocks):
            block.get_submodule(place).eval().register_forward_hook(lambda module, args, y: 1.5 * y)
    assert error(answer(fast, x), answer(model, x)) < 1e-5
