"""The explicit attention of a whole network is that of its layers, and asking for it changes nothing."""

import pytest
import torch
from hosts import refuses_prefix, without_prefix
from mechanisms import WITH_WEIGHTS, WITHOUT_WEIGHTS

import subquad
from subquad import ATTENTION, SubquadError
from subquad.analysis import Removal, attention_weights, check_removal, count_confusions, measure_network, removing
from subquad.attention import traits_of

every_mechanism = pytest.mark.parametrize("name", ATTENTION)


def network(name):
    sizes = {"depths": (2,), "num_classes": 3, "img_size": (6, 8), "patch_size": 2, "embed_dim": 16}
    return subquad.create_model("deit_micro", attention=name, **sizes | without_prefix(name))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_layer_is_there_with_its_grid(name):
    layers = attention_weights(network(name), torch.randn(2, 3, 6, 8))
    assert [layer.name for layer in layers] == ["stages.0.blocks.0.attn.inner", "stages.0.blocks.1.attn.inner"]
    for layer in layers:
        assert (
            layer.mechanism == name and layer.grid.shape == (3, 4) and layer.grid.prefix == (not refuses_prefix(name))
        )
        assert layer.weights.shape[:2] == (2, 4) and layer.weights.shape[3:] == (layer.grid.num_tokens,) * 2


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_what_has_no_weights_is_left_out_and_the_reason_is_said_where_something_is_asked_of_them(name):
    model, images = network(name), torch.randn(2, 3, 6, 8)
    assert not attention_weights(model, images)
    reason = f"has no explicit weights: {traits_of(ATTENTION[name]).no_weights}"
    for ask in (
        lambda: measure_network(model, [images]),
        lambda: check_removal(model),
        lambda: removing(model, Removal("local", 3), images).__enter__(),
        lambda: count_confusions(model)(images, torch.zeros(2)),
    ):
        with pytest.raises(SubquadError, match=reason) as caught:
            ask()
        assert "\n" not in str(caught.value)
    mixed = network([name, "softmax"])
    assert [layer.name for layer in attention_weights(mixed, images)] == ["stages.0.blocks.1.attn.inner"]


def test_weights_are_those_of_the_layers_inputs():
    model = network("softmax").eval()
    images = torch.randn(2, 3, 6, 8)
    seen = {}
    model.blocks[1].attn.inner.register_forward_pre_hook(lambda _, __, kw: seen.update(kw), with_kwargs=True)
    layer = attention_weights(model, images)[1]
    expected = (seen["q"] @ seen["k"].mT / 2).softmax(-1)
    torch.testing.assert_close(layer.weights[:, :, 0], expected)


@every_mechanism
def test_the_network_is_left_as_it_was(name):
    model = network(name).train()
    model.blocks[0].eval()
    attention_weights(model, torch.randn(1, 3, 6, 8))
    assert model.training and not model.blocks[0].training
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(SubquadError):
        attention_weights(model, torch.randn(1, 7, 6, 8))
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
