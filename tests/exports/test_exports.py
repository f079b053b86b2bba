"""What is exported computes what the network computes, at sizes that were not traced, and errors are one line."""

import importlib.util

import pytest
import torch
from hosts import SMALL, fewest_blocks, small

import subquad
from subquad import ATTENTION, SubquadError
from subquad.exports import EXPORTERS, Exporter, export, open_exported, register_exporter
from subquad.exports.programs import DYNAMIC, program_of
from subquad.models.assembling import settings_of
from subquad.ops import pool_tokens
from subquad.positions import adaptive_means, resample_places
from subquad.tracing import first, larger, smaller, surely, up_to_multiple

FEWER = {"newton_steps": 2}
"""Settings that make a mechanism's program shorter."""
OTHERS = [(1, 40, 33), (3, 17, 100), (2, 64, 64)]


def random_network(host, mechanism=None, **changes):
    torch.manual_seed(0)
    model = small(host, mechanism, **changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def program(model, least):
    return program_of(model, torch.zeros(1, 3, *model.img_size), DYNAMIC, least)


# seconds each; one without and one with tables stand for all in the fast tests
QUICK = {"agent", "linear"}


@pytest.mark.parametrize(
    "mechanism", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(ATTENTION)]
)
def test_a_program_of_any_size_computes_what_the_network_computes(mechanism):
    settings = {key: value for key, value in FEWER.items() if key in settings_of(mechanism)}
    model = random_network("vit", mechanism, depths=(1,), patch_size=16, img_size=32, **settings)
    exported = program(model, 17)
    assert not [node for node in exported.graph.nodes if "subquad" in str(node.target)]
    run = exported.module()
    for batch, height, width in OTHERS:
        x = torch.randn(batch, 3, height, width)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("host", sorted(SMALL))
def test_every_host_exports_for_any_size(host, tmp_path):
    model = random_network(host, "agent", img_size=96, depths=fewest_blocks(host))
    written = export(model, tmp_path / "network.pt2", format="pt2", dynamic=DYNAMIC)
    assert written.difference < 1e-5 and (tmp_path / "network.pt2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["cswin", "swin"])
def test_windows_export_for_any_size_of_a_window_and_more(host, tmp_path):
    model = random_network(host, "softmax", img_size=224, depths=fewest_blocks(host))
    written = export(model, tmp_path / "network.pt2", format="pt2", dynamic=DYNAMIC)
    assert written.least == model.least_size > 32
    run = EXPORTERS["pt2"].load(tmp_path / "network.pt2")
    for size in [(model.least_size, 230), (301, 224)]:
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", sorted({"onnx", "openvino"}))
@pytest.mark.slow
def test_engines_compute_what_the_network_computes(format, tmp_path):
    if missing := [name for name in EXPORTERS[format].needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    model = random_network("vit", "agent", depths=(1,), patch_size=16, img_size=32)
    written = export(model, tmp_path / f"n{EXPORTERS[format].suffix}", format=format, dynamic=DYNAMIC)
    assert written.difference < 1e-4 and len(written.shapes) == 2


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def test_what_is_written_is_checked_and_not_kept_where_it_is_wrong(tmp_path, monkeypatch):
    right = EXPORTERS["pt2"]
    wrong = Exporter("wrong", ".pt2", (), right.write, lambda path: lambda x: Mean()(x) + 1)
    monkeypatch.setitem(EXPORTERS, "wrong", wrong)
    with pytest.raises(SubquadError, match="is off by"):
        export(Mean(), tmp_path / "mean.pt2", format="wrong", img_size=8)
    assert not list(tmp_path.iterdir())
    written = export(Mean(), tmp_path / "mean.pt2", format="pt2", img_size=8, dynamic=["batch"])
    assert written.shapes == ((1, 8, 8), (3, 8, 8)) and written.difference == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mean.pt2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "onx"}, "unknown format 'onx': did you mean onnx"),
        ({"format": "missing"}, "needs no_such_package: pip install 'subquad\\[export\\]'"),
        ({"format": "pt2", "dynamic": ["sizes"]}, "may change is batch or size, got 'sizes'"),
        ({"format": "pt2", "dtype": "int8"}, "unknown dtype"),
        ({"format": "pt2", "img_size": (16, 24), "dynamic": ["size"]}, "takes at least 17 px, got 16×24"),
        ({"format": "onnx", "int8": "weights"}, "onnx is not written with int8 weights: pt2, aoti can be"),
        ({"format": "pt2", "int8": "all"}, "unknown int8 'all'"),
        ({"format": "openvino"}, "openvino is written as .xml, got n.pt2"),
    ],
)
def test_mistakes_are_one_line(settings, message, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPORTERS, "missing", Exporter("", ".pt2", ("no_such_package",), None, None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "no_such_package" else name)
    model = small("vit", "linear", depths=(1,), patch_size=16, img_size=32)
    with pytest.raises(SubquadError, match=message) as raised:
        export(model, tmp_path / "n.pt2", **settings)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_formats_can_be_added_and_not_replaced(monkeypatch):
    monkeypatch.setattr(EXPORTERS, "_entries", dict(EXPORTERS._entries))
    other = Exporter("other", ".other", (), None, None)
    register_exporter("other", other)
    with pytest.raises(SubquadError, match="a format 'pt2' already"):
        register_exporter("pt2", other)


def test_the_function_takes_names_and_networks(tmp_path):
    model = small("vit", "linear", depths=(1,), patch_size=16, img_size=32)
    written = subquad.export(model, tmp_path / "n.pt2", format="pt2", dtype="bf16")
    assert written.path.exists() and next(model.parameters()).dtype == torch.float32
    with pytest.raises(SubquadError, match="no-such-run"):
        subquad.export(tmp_path / "no-such-run", format="pt2")


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


def test_maps_roll_for_export_as_they_do_otherwise(monkeypatch):
    from subquad.models import swin

    image = torch.randn(2, 5, 7, 3)
    monkeypatch.setattr(swin, "is_symbol", lambda size: True)
    for down, right in [(0, 0), (2, 3), (2, 0), (0, 6)]:
        there = swin.rolled(image, (down, right))
        torch.testing.assert_close(there, image.roll((-down, -right), dims=(1, 2)), rtol=0, atol=0)
        torch.testing.assert_close(swin.rolled(there, (down, right), back=True), image, rtol=0, atol=0)


def test_sizes_that_are_numbers_are_numbers():
    assert surely(2 == 2) is True and surely(2 > 3) is False
    assert (smaller(2, 3), larger(2, 3), up_to_multiple(7, 3), up_to_multiple(6, 3)) == (2, 3, 9, 6)
    assert first(torch.arange(5), 2, 0).tolist() == [0, 1]


def sizes_of(path):
    return path.stat().st_size


@pytest.mark.parametrize(("format", "what"), [("pt2", "weights"), ("onnx", "dynamic")])
@pytest.mark.slow
def test_int8_is_smaller_and_near(format, what, tmp_path):
    for package in ("torchao", *EXPORTERS[format].needs):
        pytest.importorskip(package)
    model = random_network("vit", "agent", depths=(1,), embed_dim=256, patch_size=16, img_size=32)
    suffix = EXPORTERS[format].suffix
    plain = export(model, tmp_path / f"plain{suffix}", format=format, dynamic=["batch"])
    small_one = export(model, tmp_path / f"int8{suffix}", format=format, dynamic=["batch"], int8=what)
    assert plain.difference < small_one.difference < 0.1
    assert sizes_of(small_one.path) < 0.6 * sizes_of(plain.path)
    if format == "pt2":
        # it is read without torchao
        assert not [node for node in torch.export.load(small_one.path).graph.nodes if "torchao" in str(node.target)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_what_was_exported_is_judged_in_its_engine(tmp_path):
    run = tmp_path / "run"
    subquad.train("digits", run, attention="linear", epochs=1)
    written = subquad.export(run, tmp_path / "n.pt2", format="pt2", dynamic=["batch"])
    there, here = subquad.evaluate(run, engine=written.path), subquad.evaluate(run)
    assert there.result.top1 == here.result.top1 and (there.result.confusion == here.result.confusion).all()
    for engine, message in [
        (tmp_path / "none.onnx", "there is no file"),
        (run / "best.safetensors", "what was exported ends in .onnx, .pt2, .xml"),
    ]:
        with pytest.raises(SubquadError, match=message):
            subquad.evaluate(run, engine=engine)
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    with pytest.raises(SubquadError, match=r"can't be opened as pt2 or aoti"):
        open_exported(tmp_path / "bad.pt2")
    fixed = subquad.export(run, tmp_path / "one.pt2", format="pt2")
    with pytest.raises(SubquadError, match=r"does not take .*--dynamic batch"):
        subquad.evaluate(run, engine=fixed.path)
