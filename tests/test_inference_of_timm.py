"""`subquad.optimize` of timm's plain networks, as they are and converted."""

import inspect
import pickle
from copy import deepcopy
from functools import partial

import pytest
import timm
import torch
from timm.layers import SwiGLU
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer

import subquad
from subquad.attention import traits_of
from subquad.kernels import replaying, unavailable

NATIVE = unavailable("native") is None
ALL = [None, *subquad.ATTENTION]


def network(name=None, **settings):
    """A tiny ViT whose attention is another's, with random numbers in every parameter."""
    torch.manual_seed(0)
    settings = {"init_values": 0.1, "dynamic_img_size": True, **settings}
    if name is not None and "prefix" in traits_of(subquad.ATTENTION[name]).refuses:
        settings |= {"class_token": False, "global_pool": "avg"}
    model = VisionTransformer(img_size=24, patch_size=4, embed_dim=48, depth=2, num_heads=2, num_classes=5, **settings)
    if name is not None:
        subquad.convert(model, name, in_place=True)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim == 1 else 0.15)
    return model.eval()


def error(x, wanted):
    return float((x.float() - wanted).norm() / wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_an_optimized_network_gives_what_it_gave(name):
    model = network(name)
    fast, keys = subquad.optimize(deepcopy(model)), list(model.state_dict())
    # each is listened to once and made again; sizes change in between
    for shape in [(2, 3, 24, 24), (1, 3, 28, 20)] * 3:
        x = torch.randn(shape)
        assert error(fast(x), model(x)) < 1e-5
    assert list(fast.state_dict()) == keys


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_in_bf16_it_is_as_good_as_bf16_is(name):
    model, x = network(name), torch.randn(4, 3, 24, 24)
    wanted, half = model(x), deepcopy(model).bfloat16()(x.bfloat16())
    fast = subquad.optimize(deepcopy(model), torch.bfloat16)
    assert all(error(fast(x.bfloat16()), wanted) < 1.5 * error(half, wanted) for _ in range(2))


@torch.no_grad()
@pytest.mark.skipif(not NATIVE, reason="no kernels")
@pytest.mark.parametrize("name", [None, "softmax", "linear", "inline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_blocks_that_are_kernels_alone_are_one_call(name, dtype):
    fast = subquad.optimize(network(name), dtype)
    for _ in range(2):
        fast(torch.randn(1, 3, 24, 24).to(dtype))
    assert all(replaying.tapes_of(block)["block"].tapes.popitem()[1] is not None for block in fast.blocks)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"act_layer": name}
            for name in ("gelu_tanh", "quick_gelu", "relu", partial(torch.nn.GELU, approximate="tanh"))
        ),
        *(
            {"qk_norm": True},
            {"init_values": None},
            {"mlp_layer": SwiGLU},
            {"reg_tokens": 3},
            {"scale_attn_norm": True},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [None, "linear"])
def test_what_blocks_have_beside_is_kept(settings, name):
    model = network(name, **settings)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.03)):
        fast, x = subquad.optimize(deepcopy(model), dtype), torch.randn(2, 3, 24, 24)
        assert all(error(fast(x.to(dtype)), model(x)) < tolerance for _ in range(2))


@pytest.mark.parametrize(
    "place",
    ["norm1", "attn", "attn.qkv", "attn.proj", "ls1", "drop_path1", "norm2", "mlp", "mlp.fc1", "ls2", "drop_path2"],
)
@pytest.mark.parametrize("name", [None, "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_who_listens_hears_every_step(name, place, dtype):
    fast, x = subquad.optimize(network(name), dtype), torch.randn(1, 3, 24, 24).to(dtype)
    fast(x)
    heard = []
    fast.blocks[1].get_submodule(place).register_forward_hook(lambda *args: heard.append(place))
    fast(x)
    assert heard == [place]


@torch.no_grad()
@pytest.mark.parametrize("place", ["attn.proj_drop", "drop_path1", "mlp.drop1", "mlp.drop2", "drop_path2"])
@pytest.mark.parametrize("name", [None, "linear"])
def test_what_drops_may_go_on_in_evaluation_or_be_something_else(name, place):
    model, x = network(name), torch.randn(2, 3, 24, 24)
    fast = subquad.optimize(deepcopy(model))
    fast(x)
    for each in (model, fast):
        for block in each.blocks:
            block.set_submodule(place, torch.nn.Dropout(0.5).train())
    for seed in range(2):
        answers = []
        for each in (model, fast):
            torch.manual_seed(seed)
            answers.append(each(x))
        assert error(answers[1], answers[0]) < 1e-5
    for each in (model, fast):
        for block in each.blocks:
            block.set_submodule(place, torch.nn.Softsign().eval())
    assert error(fast(x), model(x)) < 1e-5


class Adapted(torch.nn.Linear):
    """What others make of a projection."""

    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize("place", ["attn.qkv", "attn.proj", "mlp.fc1"])
@pytest.mark.parametrize("name", [None, "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layers_of_other_classes_are_called(name, place, dtype):
    model = network(name)
    for block in model.blocks:
        block.get_submodule(place).__class__ = Adapted
    x = torch.randn(2, 3, 24, 24)
    fast = subquad.optimize(deepcopy(model), dtype)
    assert error(fast(x.to(dtype)), model(x)) < (1e-5 if dtype == torch.float32 else 0.05)


@torch.no_grad()
def test_a_mask_is_seen():
    model = network()
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(2, 37, 48)
    mask = torch.rand(2, 1, 37, 37) < 0.7
    mask |= torch.eye(37, dtype=torch.bool)
    wanted = model.blocks[0](x, attn_mask=mask)
    assert error(wanted, model.blocks[0](x)) > 1e-3
    assert error(fast.blocks[0](x, attn_mask=mask), wanted) < 1e-6
    assert error(fast.blocks[0](x, mask), wanted) < 1e-6


def test_training_goes_the_single_steps():
    model = network("inline", drop_path_rate=0.5)
    fast = subquad.optimize(deepcopy(model)).train().requires_grad_(True)
    model.train()
    x, answers = torch.randn(2, 3, 24, 24), []
    for each in (model, fast):
        torch.manual_seed(1)
        answers.append(each(x))
        answers[-1].square().sum().backward()
    assert torch.equal(*answers)
    assert torch.equal(model.blocks[0].attn.qkv.weight.grad, fast.blocks[0].attn.qkv.weight.grad)


@torch.no_grad()
def test_it_is_copied_and_pickled_and_its_weights_are_changed_in_place():
    fast, x = subquad.optimize(network()), torch.randn(1, 3, 24, 24)
    wanted = fast(x)
    for other in (deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(x), wanted)
    fast.load_state_dict({name: value + 0.1 for name, value in fast.state_dict().items()})
    assert error(fast(x), deepcopy(fast).train()(x)) < 1e-5


@torch.no_grad()
def test_what_was_converted_can_be_put_back():
    model, x = network(), torch.randn(1, 3, 24, 24)
    wanted = model(x)
    converted = subquad.optimize(subquad.convert(deepcopy(model), "linear", in_place=True))
    assert error(converted(x), wanted) > 1e-3
    assert error(subquad.restore(converted)(x), wanted) < 1e-5


def test_classes_that_derive_from_timms_block_stay():
    class Own(Block):
        def forward(self, x, *args, **kwargs):
            return x

    model = network(block_fn=Own)
    assert {type(block) for block in subquad.optimize(model).blocks} == {Own}


ROPE = {"use_rot_pos_emb": True, "use_abs_pos_emb": False}
DINOV3 = {**ROPE, "rope_type": "dinov3", "rope_rotate_half": True, "qkv_bias": False, "num_reg_tokens": 2}


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        DINOV3,
        {**DINOV3, "init_values": 0.1},
        {**ROPE, "attn_type": "rope", "qk_norm": True, "init_values": 0.1},
        {**ROPE, "swiglu_mlp": True},
        {"scale_attn_inner": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [None, "linear", "inline"])
def test_networks_with_rotary_positions(settings, name):
    if missing := settings.keys() - inspect.signature(Eva).parameters.keys():
        pytest.skip(f"this timm's Eva knows no {', '.join(missing)}")
    torch.manual_seed(0)
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = Eva(**sizes, **settings, dynamic_img_size=True)
    if name is not None:
        subquad.convert(model, name, in_place=True)
    for parameter in model.blocks.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim == 1 else 0.15)
    model.eval()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        fast, x = subquad.optimize(deepcopy(model), dtype), torch.randn(2, 3, 24, 24)
        assert all(error(fast(x.to(dtype)), model(x)) < tolerance for _ in range(2))
        if NATIVE and "rope_type" in settings:
            # norms of queries and answers, and gated MLPs, are PyTorch's
            assert all(replaying.tapes_of(block)["block"].tapes.popitem()[1] is not None for block in fast.blocks)
    # training goes the single steps
    again = subquad.optimize(deepcopy(model)).train()
    assert torch.equal(again(x), model.train()(x))


@torch.no_grad()
@torch.no_grad()
@pytest.mark.parametrize("name", [None, "linear"])
def test_positions_that_change_are_heard(name):
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = Eva(**sizes, **ROPE).eval()
    model = model if name is None else subquad.convert(model, name)
    for parameter in model.blocks.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(2, 37, 48)
    for each in (model, fast):
        each(torch.randn(2, 3, 24, 24))
    rope = torch.randn(36, 48)
    for _ in range(3):
        # as they are made anew for each image, or written where others were
        for given in (torch.randn(36, 48), rope.copy_(torch.randn(36, 48))):
            wanted = model.blocks[0](x, rope=given)
            assert error(fast.blocks[0](x, rope=given), wanted) < 1e-5
            assert error(fast.blocks[0](x, rope=given.flip(0)), wanted) > 1e-3
    before = fast.blocks[0](x, rope=rope)
    rope.copy_(rope.flip(0))
    assert error(fast.blocks[0](x, rope=rope), before) > 1e-3


def test_a_network_with_other_blocks_is_left_as_it_is():
    model = timm.create_model("beit_base_patch16_224", img_size=32, depth=1, num_classes=3, embed_dim=48, num_heads=2)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(subquad.optimize(deepcopy(model))(x), model.eval()(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rotary", [False, True], ids=["vit", "eva"])
@pytest.mark.parametrize("most_tokens", [30, 1000])
def test_an_optimized_network_streams(rotary, dtype, most_tokens):
    torch.manual_seed(0)
    model = network(global_pool="avg")
    if rotary:
        sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 5}
        model = Eva(**sizes, **DINOV3, dynamic_img_size=True).eval()
    fast = subquad.optimize(subquad.convert(model, "inline", in_place=True), dtype)
    x = torch.randn(3, 32, 24)
    for _ in range(2):
        whole = fast(x[None].to(dtype)).float()[0]
        assert error(subquad.stream(fast, x, most_tokens=most_tokens).logits.float(), whole) < (
            1e-5 if dtype == torch.float32 else 0.03
        )


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # TorchScript is on its way out
def test_a_trace_is_right_and_a_script_is_refused():
    fast = subquad.optimize(network())
    traced = torch.jit.trace(fast, torch.randn(1, 3, 24, 24))
    x = torch.randn(1, 3, 24, 24)
    assert error(traced(x), fast(x)) < 1e-5
    with pytest.raises(subquad.SubquadError, match="TorchScript"):
        torch.jit.script(fast)


WITH_BIASES = {
    "beit": ("beit_base_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 2}),
    "beit without factors": (
        "beit_base_patch16_224",
        {"embed_dim": 48, "depth": 2, "num_heads": 2, "init_values": None},
    ),
    "beitv2": (
        "beitv2_base_patch16_224",
        {"embed_dim": 48, "depth": 2, "num_heads": 2, "use_shared_rel_pos_bias": True},
    ),
    "relpos": ("vit_relpos_small_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 2}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 24, "depths": (2, 1), "num_heads": (2, 2), "window_size": 3},
    ),
}
"""Networks of timm whose logits have a bias of each pair of tokens, by what is tested with them."""


def with_biases(kind):
    """A tiny one, with random numbers in every parameter."""
    torch.manual_seed(0)
    name, settings = WITH_BIASES[kind]
    model = timm.create_model(name, img_size=(48, 80), num_classes=5, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim == 1 else 0.1)
    return model.eval()


def eva():
    sizes = {"img_size": (48, 80), "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = Eva(**sizes, use_rot_pos_emb=True, init_values=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim == 1 else 0.1)
    return model.eval()


@torch.no_grad()
def test_hooks_of_attention_layers_find_positions_by_name():
    model, seen = eva(), []
    for one in (model, subquad.optimize(deepcopy(model))):
        one.blocks[0].attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((len(args), kwargs["rope"] is not None)), with_kwargs=True
        )
        one(torch.randn(1, 3, 48, 80))
    assert seen == [(1, True)] * 2


@torch.no_grad()
@pytest.mark.parametrize("name", [None, "linear"])
@pytest.mark.parametrize("kind", ["eva", *WITH_BIASES])
def test_what_drops_branches_is_given_them_as_timm_gives_them(kind, name):
    """Behind the factors of their channels: hooks that keep or change branches saw them without."""
    model, x = eva() if kind == "eva" else with_biases(kind), torch.randn(2, 3, 48, 80)
    if name is not None:
        model = subquad.convert(model, name, in_place=True)
    fast, answers = subquad.optimize(deepcopy(model)), []
    fast(x)
    for each in (model, fast):
        for path, module in each.named_modules():
            if path.endswith(("drop_path1", "drop_path2")):
                module.register_forward_hook(lambda module, args, y: torch.tanh(y))
        answers.append(each.forward_features(x))
    assert error(answers[1], answers[0]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", [None, "softmax", "linear", "inline", "agent"])
@pytest.mark.parametrize("kind", WITH_BIASES)
def test_networks_with_biases_of_pairs(kind, name):
    model, x = with_biases(kind), torch.randn(2, 3, 48, 80)
    wanted = model(x)
    if name is not None:
        model = subquad.convert(model, name, in_place=True)
    keys, given = list(model.state_dict()), model(x)
    # of features: ten logits are too few to compare what is rounded off
    features = model.forward_features(x)
    lost = error(deepcopy(model).bfloat16().forward_features(x.bfloat16()), features)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1.2 * lost)):
        fast = subquad.optimize(deepcopy(model), dtype)
        assert all(error(fast.forward_features(x.to(dtype)), features) < tolerance for _ in range(3))
        assert list(fast.state_dict()) == keys
    again = pickle.loads(pickle.dumps(subquad.optimize(deepcopy(model))))
    assert error(again(x), given) < 1e-5
    answers = []
    for each in (again, deepcopy(model)):
        torch.manual_seed(1)
        answers.append(each.train()(x))
    assert torch.equal(*answers)
    if name is not None:
        assert error(subquad.restore(subquad.optimize(model))(x), wanted) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", WITH_BIASES)
def test_an_optimized_network_with_biases_is_converted_after_and_put_back(kind):
    model, x = with_biases(kind), torch.randn(2, 3, 48, 80)
    wanted = model(x)
    converted = subquad.convert(subquad.optimize(deepcopy(model)), "linear", in_place=True)
    assert error(converted(x), subquad.convert(deepcopy(model), "linear", in_place=True)(x)) < 1e-5
    assert error(subquad.restore(converted)(x), wanted) < 1e-5


@torch.no_grad()
@pytest.mark.skipif(not NATIVE, reason="no kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_converted_blocks_of_swin_that_are_kernels_alone_are_one_call(dtype):
    fast = subquad.optimize(subquad.convert(with_biases("swin"), "linear", in_place=True), dtype)
    for _ in range(2):
        fast(torch.randn(1, 3, 48, 80).to(dtype))
    blocks = [block for stage in fast.layers for block in stage.blocks]
    assert all(replaying.tapes_of(block)["block"].tapes.popitem()[1] is not None for block in blocks)


@pytest.mark.parametrize(
    "place", ["norm1", "attn.qkv", "attn.proj", "drop_path1", "norm2", "mlp", "mlp.act", "drop_path2"]
)
@pytest.mark.parametrize("name", [None, "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_who_listens_hears_every_step_of_swin(name, place, dtype):
    model = with_biases("swin")
    if name is not None:
        subquad.convert(model, name, in_place=True)
    fast, x = subquad.optimize(model, dtype), torch.randn(1, 3, 48, 80).to(dtype)
    fast(x)
    heard = []
    fast.layers[0].blocks[1].get_submodule(place).register_forward_hook(lambda *args: heard.append(place))
    fast(x)
    assert heard == [place]


class Changed(torch.nn.Module):
    """A projection with a change of low rank beside it, as people write it by hand."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.down = layer, torch.nn.Linear(layer.in_features, 2)
        self.up = torch.nn.Linear(2, width)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@torch.no_grad()
@pytest.mark.parametrize("kind", WITH_BIASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_changes_of_low_rank_beside_projections_are_computed(kind, dtype):
    model = with_biases(kind)
    owners = [module for module in model.modules() if isinstance(getattr(module, "proj", None), torch.nn.Linear)]
    for owner in owners:
        # BEiT's layer asks its projection in for its weight
        for place in ("proj",) if kind.startswith("beit") else ("qkv", "proj"):
            layer = getattr(owner, place)
            setattr(owner, place, Changed(layer, layer.out_features))
    fast, x = subquad.optimize(deepcopy(model), dtype), torch.randn(1, 3, 48, 80)
    assert all(error(fast(x.to(dtype)), model(x)) < (1e-5 if dtype == torch.float32 else 0.1) for _ in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "linear"])
@pytest.mark.filterwarnings("ignore:While \\w+, we found certain side effects")  # the grid is written down
@torch.no_grad()
def test_a_compiler_follows_all_of_an_optimized_network(name):
    model, x = subquad.optimize(network(name)), torch.randn(2, 3, 24, 24)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exported = torch.export.export(model, (x,), strict=True).module()
    for one in (compiled, exported):
        torch.testing.assert_close(one(x), model(x), rtol=1e-4, atol=1e-5)
