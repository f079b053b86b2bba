"""What the papers' networks computed, in float64, from made-up weights: ours computes the same numbers."""

import json
from functools import partial
from pathlib import Path

import pytest
import released
import torch
from made_weights import make_input, make_state_dict

import subquad
from subquad import ATTENTION, TokenGrid
from subquad.models.layers import SelfAttention
from subquad.ops import gaussian_kernel, newton_inverse


def golden(name):
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())


def assert_as_recorded(tensor, record, *, rtol=1e-8, atol=5e-9):
    """The recorded entries agree; they are stored with nine digits."""
    assert list(tensor.shape) == record["shape"]
    expected = torch.tensor(record["value"], dtype=torch.float64)
    torch.testing.assert_close(tensor.detach().double().flatten()[record["index"]], expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "attention", "sizes"),
    [
        ("plain_deit_t", "softmax", {}),
        ("agent_deit_t", "agent", {}),
        ("inline_deit_t", "inline", {"num_heads": 6}),
    ],
)
def test_networks_compute_what_the_released_ones_do(name, attention, sizes):
    record = golden(name)
    model = subquad.create_model("deit_tiny", attention=attention, **sizes).double().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == record["num_params"]
    subquad.load_checkpoint(model, released.deit(make_state_dict(record["state_dict"])))
    images = make_input(record["input_shape"])
    logits = model(images)
    assert_as_recorded(logits, record["outputs"]["logits"])
    logits.square().mean().backward()
    gradients = {key: parameter.grad.norm().item() for key, parameter in model.named_parameters()}
    for key, norm in record["grads"].items():
        assert gradients[released.our_name(key)] == pytest.approx(norm, rel=1e-6, abs=1e-12), key
    with torch.no_grad():
        single = model.float()(images.float())
    assert_as_recorded(single, record["outputs"]["logits"], rtol=1e-4, atol=1e-4)


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
