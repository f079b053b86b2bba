"""`subquad.optimize` of timm's PVTv2 and SegFormer, transformers' and smp's, as they are and converted."""

import pickle
from copy import deepcopy

import pytest
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2

import subquad
from subquad.kernels import replaying, unavailable

NATIVE = unavailable("native") is None
ALL = [None, "softmax", "linear", "inline", "agent", "mlla"]
KINDS = ["PVTv2", "SegFormer", "MiT"]


class Summed(torch.nn.Module):
    """What all maps of an encoder say, in the mean."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        # the first are the images
        return torch.cat([one.mean((2, 3)) for one in self.encoder(x)[2:]], dim=1)


def mit(*, drop_path_rate=0.0, **settings):
    smp = pytest.importorskip("segmentation_models_pytorch")
    sizes = {"embed_dims": [16, 32, 48, 64], "num_heads": [1, 2, 3, 4], "depths": [1, 1, 1, 1], "qkv_bias": True}
    sizes |= {"sr_ratios": [8, 4, 2, 1], "out_channels": (3, 0, 16, 32, 48, 64), "drop_path_rate": drop_path_rate}
    return Summed(smp.encoders.mix_transformer.MixVisionTransformerEncoder(**sizes | settings))


def network(kind, name=None, **settings):
    """A tiny one whose queries choose among the keys, with another's attention."""
    torch.manual_seed(0)
    if kind == "PVTv2":
        sizes = {"depths": (1, 1, 1), "embed_dims": (16, 32, 48), "num_heads": (1, 2, 3), "mlp_ratios": (4, 4, 4)}
        model = PyramidVisionTransformerV2(**sizes | {"sr_ratios": (4, 2, 1), "num_classes": 5} | settings)
        model.pretrained_cfg = {"input_size": (3, 64, 64)}
    elif kind == "MiT":
        model = mit(**settings)
    else:
        transformers = pytest.importorskip("transformers", "5.1")
        sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]}
        config = transformers.SegformerConfig(**sizes | {"decoder_hidden_size": 16, "num_labels": 3} | settings)
        model = transformers.SegformerForSemanticSegmentation(config)
        if not any(path.endswith("attention.q_proj") for path, _ in model.named_modules()):
            pytest.skip(f"SegFormer of transformers {transformers.__version__} has parts of other names")
    if name is not None:
        subquad.convert(model, name, in_place=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() < 2), std=0.2)
    return model.eval()


def blocks_of(model):
    return [module for module in model.modules() if type(module).__name__.startswith("Fused")]


def answer(model, x):
    y = model(x)
    return y if isinstance(y, torch.Tensor) else y.logits


def error(x, wanted):
    return float((x.float() - wanted).norm() / wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimized_network_gives_what_it_gave(kind, name):
    model = network(kind, name)
    fast, keys = subquad.optimize(deepcopy(model)), list(model.state_dict())
    half, rounded = subquad.optimize(deepcopy(model), torch.bfloat16), deepcopy(model).bfloat16()
    assert len(blocks_of(fast)) == (3 if kind == "PVTv2" else 4)
    # a few numbers of bf16, which are off by chance: all together
    lost = dict.fromkeys((half, rounded), 0.0)
    for shape in [(2, 3, 64, 64), (1, 3, 64, 96)] * 3:
        x = torch.randn(shape)
        wanted = answer(model, x)
        assert error(answer(fast, x), wanted) < 1e-5
        for one in lost:
            lost[one] += error(answer(one, x.bfloat16()), wanted)
    assert lost[half] < 1.5 * lost[rounded]
    assert list(fast.state_dict()) == keys


@torch.no_grad()
@pytest.mark.skipif(not NATIVE, reason="no kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_kernels_alone_are_one_call(kind):
    model = network(kind, "linear")
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(1, 3, 64, 96)
    for _ in range(3):
        assert 0 < error(answer(fast, x), answer(model, x)) < 1e-5
    for block in blocks_of(fast):
        assert all(kept is not None for kept in replaying.tapes_of(block)["block"].tapes.values())


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("PVTv2", place) for place in ("norm1", "attn.q", "attn.proj", "norm2", "mlp", "mlp.dwconv", "mlp.act")),
        *(("SegFormer", place) for place in ("layernorm_before", "attention.q_proj", "attention", "layernorm_after")),
        *(("SegFormer", place) for place in ("mlp.fc1", "mlp.dwconv", "mlp.dwconv.dwconv", "mlp.activation_fn")),
        *(
            ("MiT", place)
            for place in ("norm1", "attn.q", "attn", "norm2", "mlp.dwconv", "mlp.dwconv.dwconv", "mlp.act")
        ),
    ],
)
@pytest.mark.parametrize("name", [None, "linear"])
def test_who_listens_hears_every_step(kind, place, name):
    model = network(kind, name)
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(1, 3, 64, 64)
    heard = []
    for block in blocks_of(fast):
        block.get_submodule(place).register_forward_hook(lambda *call: heard.append(call[0]))
    for _ in range(2):
        assert error(answer(fast, x), answer(model, x)) < 1e-5
    assert len(heard) == 2 * len(blocks_of(fast))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("PVTv2", {"linear": True}),
        ("PVTv2", {"qkv_bias": False}),
        ("PVTv2", {"proj_drop_rate": 0.5, "drop_path_rate": 0.5}),
        ("SegFormer", {"hidden_act": "relu"}),
        ("SegFormer", {"attn_implementation": "eager"}),
        ("SegFormer", {"hidden_dropout_prob": 0.5, "drop_path_rate": 0.5}),
        ("MiT", {"qkv_bias": False}),
        ("MiT", {"drop_rate": 0.5, "drop_path_rate": 0.5}),
    ],
)
@pytest.mark.parametrize("name", [None, "linear"])
def test_what_blocks_have_beside_is_kept(kind, settings, name):
    model = network(kind, name, **settings)
    fast, x = subquad.optimize(deepcopy(model)), torch.randn(2, 3, 64, 96)
    for _ in range(2):
        assert error(answer(fast, x), answer(model, x)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_what_drops_may_go_on_in_evaluation(kind):
    fast = subquad.optimize(network(kind, "linear", drop_path_rate=0.9))
    x = torch.randn(8, 3, 64, 64)
    quiet = answer(fast, x)
    dropping = [block.drop_path2 if kind == "PVTv2" else block.drop_path for block in blocks_of(fast)]
    for one in dropping:
        one.train()
    assert error(answer(fast, x), quiet) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_the_single_steps(kind):
    model = network(kind, "linear")
    fast = subquad.optimize(deepcopy(model)).train().requires_grad_(True)
    x = torch.randn(2, 3, 64, 64)
    for one in (model.train(), fast):
        torch.manual_seed(1)
        answer(one, x).square().mean().backward()
    for ours, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_copied_and_pickled_and_put_back(kind):
    model, x = network(kind), torch.randn(1, 3, 64, 64)
    fast = subquad.optimize(subquad.convert(model, "inline"))
    # transformers' networks have hooks from their first call on that can't be pickled
    copies = deepcopy(fast), pickle.loads(pickle.dumps(fast))
    wanted = answer(fast, x)
    for again in copies:
        assert blocks_of(again)
        assert error(answer(again, x), wanted) < 1e-6
    assert error(answer(subquad.restore(fast), x), answer(model, x)) < 1e-5
    assert error(answer(subquad.convert(fast, "softmax"), x), answer(model, x)) < 1e-5
