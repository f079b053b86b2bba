"""What is exported computes what the network computes, at sizes that were not traced, in every engine."""

import importlib.util
import re

import pytest
import torch
from hosts import SMALL, fewest, small

from subquad import ATTENTION, SubquadError
from subquad.exports import DTYPES, EXPORTERS, export, open_exported
from subquad.exports.changing_axes import DYNAMIC
from subquad.exports.programs import as_formulas, program_of
from subquad.models.assembling import settings_of
from subquad.tracing import surely

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
    return program_of(model, (torch.zeros(1, 3, *model.img_size),), DYNAMIC, least=least)


# seconds each; one without and one with tables stand for all in the fast tests
QUICK = {"agent", "linear"}


@pytest.mark.slow
@pytest.mark.thinned(3)
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


class Squeezing(torch.nn.Module):
    """It takes sides away, the first of which are longer than 1 and stay."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 5, 4, 4)

    def forward(self, x):
        y = self.layer(x.squeeze(1)).mean(3, keepdim=True)
        return y.squeeze((2, 3)).squeeze(1)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_sides_that_a_squeeze_leaves_stay(format, tmp_path):
    pytest.importorskip("onnxruntime")
    model, images = Squeezing(), torch.randn(2, 3, 8, 8)
    export(model, tmp_path / f"network.{format}", format=format, img_size=8, batch=2)
    found = open_exported(tmp_path / f"network.{format}")(images)
    torch.testing.assert_close(found, model(images), rtol=1e-5, atol=1e-5)


class Turning(torch.nn.Module):
    """Positions as complex numbers, some of them written in place."""

    def __init__(self):
        super().__init__()
        self.table = torch.polar(torch.ones(5, 4), torch.rand(5, 4))

    def forward(self, x):
        turns = torch.cat(self.table.split([2, 2], dim=1)[::-1], dim=1)
        turns[0] = torch.complex(torch.zeros(4), torch.ones(4))
        signs = torch.ones(4)
        signs[::2] = -1
        return x * turns.real + x.flip(-1) * turns.imag * signs


@pytest.mark.parametrize("format", ["pt2", "onnx", "openvino"])
def test_constants_may_be_complex(format, tmp_path):
    pytest.importorskip("onnxruntime" if format == "onnx" else "openvino")
    model, x, file = Turning(), torch.randn(2, 5, 4), tmp_path / f"network.{'xml' if format == 'openvino' else format}"
    export(model, file, format=format, given={"x": torch.randn(2, 5, 4)})
    torch.testing.assert_close(open_exported(file, format)(x), model(x), rtol=1e-5, atol=1e-5)


def test_parameters_are_asked_before_what_is_given(tmp_path):
    given = {"input": torch.randn(2, 4)}
    for model, dtype, says in (
        (torch.nn.Linear(4, 3), "bf16", "the network is torch.float32: bring it to torch.bfloat16 first"),
        (torch.nn.Linear(4, 3, device="meta"), "fp32", "this network is on meta, where no weights are"),
    ):
        with pytest.raises(SubquadError, match=says):
            export(model, tmp_path / "network.pt2", format="pt2", dtype=dtype, given=given)


@pytest.mark.slow
@pytest.mark.thinned(5)
@pytest.mark.parametrize("host", sorted(SMALL))
def test_every_host_exports_for_any_size(host, tmp_path):
    model = random_network(host, "agent", img_size=96, **fewest(host))
    written = export(model, tmp_path / "network.pt2", format="pt2", dynamic=DYNAMIC)
    assert written.difference < 1e-5 and (tmp_path / "network.pt2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["cswin", "swin"])
def test_windows_export_for_any_size_of_a_window_and_more(host, tmp_path):
    model = random_network(host, "softmax", img_size=224, **fewest(host))
    written = export(model, tmp_path / "network.pt2", format="pt2", dynamic=DYNAMIC)
    assert written.least == model.least_size > 1
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


@pytest.mark.slow
def test_what_may_change_has_its_name_in_an_onnx_file(tmp_path):
    for package in EXPORTERS["onnx"].needs:
        pytest.importorskip(package)
    import onnx

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Flatten(2))
    axes = []
    for dynamic in ((), ("batch",), DYNAMIC):
        export(model, tmp_path / "n.onnx", dynamic=dynamic, img_size=24)
        written = onnx.load(tmp_path / "n.onnx")
        (images,), (output,) = written.graph.input, written.graph.output
        axes.append([axis.dim_param or axis.dim_value for axis in images.type.tensor_type.shape.dim])
        assert output.type.tensor_type.shape.dim[0].dim_param == ("batch" if dynamic else "")
        # nowhere else by PyTorch's numbers either
        inside = [axis.dim_param for value in written.graph.value_info for axis in value.type.tensor_type.shape.dim]
        assert not [name for name in inside if re.search(r"\bs\d+", name)]
    assert axes == [[1, 3, 24, 24], ["batch", 3, 24, 24], ["batch", 3, "height", "width"]]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("format", "dtype"), [(name, dtype) for name in ("onnx", "openvino") for dtype in EXPORTERS[name].dtypes[1:]]
)
@pytest.mark.slow
def test_engines_take_half_precision(format, dtype, tmp_path):
    for package in EXPORTERS[format].needs:
        pytest.importorskip(package)
    model = random_network("vit", "agent", depths=(1,), patch_size=16, img_size=32).to(DTYPES[dtype])
    written = export(model, tmp_path / f"n{EXPORTERS[format].suffix}", format=format, dtype=dtype, dynamic=DYNAMIC)
    assert written.difference < {"fp16": 5e-3, "bf16": 5e-2}[dtype]
    assert open_exported(written.path)(torch.zeros(2, 3, 40, 48, dtype=DTYPES[dtype])).dtype == DTYPES[dtype]


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


class Fitted(torch.nn.Module):
    def forward(self, x):
        return x * 2 if surely(x.shape[0] == 2) else x + x


def test_what_is_asked_of_sizes_does_not_hold_a_program_to_them():
    run = program_of(Fitted(), (torch.zeros(1, 3, 8, 8),), ["batch"]).module()
    for batch in (1, 2, 5):
        torch.testing.assert_close(run(torch.ones(batch, 3, 8, 8)), torch.full((batch, 3, 8, 8), 2.0))


class Attending(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_softmax_attention_is_written_as_its_formula():
    with as_formulas():
        program = program_of(Attending(), (torch.zeros(1, 3, 8, 8),), ()).run_decompositions()
    names = [str(node.target) for node in program.graph.nodes]
    assert not any("scaled_dot_product" in name for name in names)
    assert any("softmax" in name for name in names)
    # the fused one's result lies in another order, which reshapes behind it stumble over
    assert "aten.clone.default" not in names
