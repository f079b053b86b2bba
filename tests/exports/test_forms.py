"""The forms that formulas take while a network is exported are the same functions."""

import pytest
import torch
from torch.nn import functional

import subquad
from subquad.exports.foreign_forms import forms_of_any_size
from subquad.ops import pool_tokens
from subquad.positions import adaptive_means, resample_places
from subquad.tracing import first, larger, smaller, surely, up_to_multiple


def test_forms_for_export_are_the_same_functions(monkeypatch):
    from subquad.ops import map_formulas, pola_formula

    x, taps, bias = torch.randn(2, 4, 5, 7).double(), torch.randn(2, 4, 3, 3).double(), torch.randn(4).double()
    power = 1 + torch.rand(4, 1, 7).double()
    plain = map_formulas.filter_map(x, taps, bias), pola_formula.signed_power(x, power)
    for module in (map_formulas, pola_formula):
        monkeypatch.setattr(module, "is_exporting", lambda: True)
    torch.testing.assert_close(map_formulas.filter_map(x, taps, bias), plain[0])
    torch.testing.assert_close(pola_formula.signed_power(x, power), plain[1], rtol=0, atol=0)


@pytest.mark.parametrize("prefix", [0, 2])
def test_maps_and_means_for_export_are_the_same_functions(prefix, monkeypatch):
    grid, bins = subquad.TokenGrid(5, 7, prefix), subquad.TokenGrid(3, 4)
    tokens, image = torch.randn(2, 3, grid.num_tokens, 4).double(), torch.randn(2, 12, 5, 7).double()

    def forms():
        exact = grid.to_map(tokens), grid.to_heads(image, 3)
        return exact, (pool_tokens(tokens, grid, bins), adaptive_means(image, bins.shape))

    exact, near = forms()
    for module in ("grid", "positions", "ops.map_formulas"):
        monkeypatch.setattr(f"subquad.{module}.is_exporting", lambda: True)
    torch.testing.assert_close(forms()[0], exact, rtol=0, atol=0)
    torch.testing.assert_close(forms()[1], near)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_a_table_resampled_to_its_own_grid_is_itself(mode, monkeypatch):
    table, grid = torch.randn(2, 1 + 12, 5), subquad.TokenGrid(3, 4, 1)
    monkeypatch.setattr(subquad.TokenGrid, "stands_on", lambda self, other: False)
    torch.testing.assert_close(resample_places(table, grid, grid, mode), table, rtol=0, atol=1e-7)


@pytest.mark.parametrize("factors", [(1.0125, 1.5125), (0.35, 2.0), (3.01, 0.99)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resampling_by_fractional_factors_for_export_is_the_same_function(mode, factors):
    image = torch.randn(1, 3, 14, 9).double()
    plain = functional.interpolate(image, scale_factor=factors, mode=mode)
    with forms_of_any_size():
        products = functional.interpolate(image, scale_factor=factors, mode=mode, align_corners=False)
        whole = functional.interpolate(image, scale_factor=2.0, mode=mode)
    torch.testing.assert_close(products, plain)
    torch.testing.assert_close(whole, functional.interpolate(image, scale_factor=2.0, mode=mode), rtol=0, atol=0)


def test_maps_roll_for_export_as_they_do_otherwise(monkeypatch):
    from subquad.models import windows

    image = torch.randn(2, 5, 7, 3)
    monkeypatch.setattr(windows, "is_symbol", lambda size: True)
    for down, right in [(0, 0), (2, 3), (2, 0), (0, 6)]:
        there = windows.rolled(image, (down, right))
        torch.testing.assert_close(there, image.roll((-down, -right), dims=(1, 2)), rtol=0, atol=0)
        torch.testing.assert_close(windows.rolled(there, (down, right), back=True), image, rtol=0, atol=0)


def test_sizes_that_are_numbers_are_numbers():
    assert surely(2 == 2) is True and surely(2 > 3) is False
    assert (smaller(2, 3), larger(2, 3), up_to_multiple(7, 3), up_to_multiple(6, 3)) == (2, 3, 9, 6)
    assert first(torch.arange(5), 2, 0).tolist() == [0, 1]


@pytest.mark.parametrize("mask", [None, (5, 7), (3, 5, 7)])
def test_softmax_attention_of_three_axes_is_that_of_four(mask):
    """timm's SAM calls it so, and torch.onnx knows it of four alone."""
    q, k, v = (torch.randn(3, n, 4) for n in (5, 7, 7))
    mask = None if mask is None else torch.randn(mask)
    plain = functional.scaled_dot_product_attention(q, k, v, mask)
    with forms_of_any_size():
        torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v, mask), plain)


def test_what_stands_in_the_place_of_a_function_takes_its_arguments_by_their_names():
    image, film, q = torch.randn(1, 2, 6, 6), torch.randn(1, 2, 3, 4, 4), torch.randn(1, 2, 5, 4)
    calls = {
        "adaptive_avg_pool2d": {"input": image, "output_size": 3},
        "interpolate": {"input": image, "size": (4, 4), "mode": "bicubic", "antialias": True},
        "conv3d": {"input": film, "weight": torch.randn(3, 2, 1, 2, 2), "bias": None},
        "scaled_dot_product_attention": {"query": q, "key": q, "value": q, "attn_mask": None},
    }
    plain = {name: getattr(functional, name)(**given) for name, given in calls.items()}
    with forms_of_any_size():
        for name, given in calls.items():
            torch.testing.assert_close(getattr(functional, name)(**given), plain[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "bool", "numbers"])
def test_what_torch_onnx_gets_of_softmax_attention_is_softmax_attention(mask, monkeypatch):
    from subquad.ops import softmax_formula

    q, k, v = torch.randn(3, 2, 2, 5, 4).double()
    seen = torch.rand(2, 1, 5, 5) > 0.4
    seen[0, 0, 2] = False
    masks = {"none": None, "bool": seen, "numbers": torch.randn(2, 2, 5, 5).double().masked_fill(~seen, -torch.inf)}
    plain = softmax_formula.pytorch_softmax(q, k, v, masks[mask])
    monkeypatch.setattr(softmax_formula, "is_exporting", lambda: True)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    torch.testing.assert_close(softmax_formula.pytorch_softmax(q, k, v, masks[mask]), plain)
