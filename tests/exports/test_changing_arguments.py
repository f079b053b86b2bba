"""Networks of several arguments, as files that take other numbers and sizes of images than what was given."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from subquad import SubquadError, export
from subquad.exports import EXPORTERS, open_exported
from subquad.exports.changing_axes import Axes, axes_of
from subquad.exports.checking import tried_like
from subquad.exports.taken_sizes import taken_by

FORMATS = [("pt2", "pt2"), ("onnx", "onnx"), ("openvino", "xml")]


class Halving(nn.Module):
    """A map, a time each and a mask to a map; a text and one scale for all are told in a dictionary."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.text = nn.Linear(6, 4)

    def forward(self, sample, time, told, mask=None):
        if sample.shape[-1] % 2 or sample.shape[-2] % 2:
            raise RuntimeError("odd sides")
        y = self.up(functional.silu(self.down(sample))) + self.text(told["text"]).mean(dim=1)[..., None, None]
        y = y * told["scale"] + time[:, None, None, None].to(y.dtype) / 100
        return {"sample": y if mask is None else y * mask, "other": y.mean()}


def call(batch=2, height=16, width=16, generator=None):
    told = {"text": torch.randn(batch, 5, 6), "scale": torch.rand(1), "kind": "plain"}
    mask = (torch.rand(batch, 1, height, width) > 0.5).float()
    return {"sample": torch.randn(batch, 4, height, width), "time": torch.arange(batch) + 3, "told": told, "mask": mask}


TAKES = ["time", "sample", "text", "scale", "mask"]


def handed(given):
    return [given["told"][name] if name in given["told"] else given[name] for name in TAKES]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Halving().eval()


@pytest.mark.parametrize(("format", "suffix"), FORMATS)
def test_other_numbers_and_sizes_are_taken(network, format, suffix, tmp_path):
    for package in EXPORTERS[format].needs:
        pytest.importorskip(package)
    file = tmp_path / f"n.{suffix}"
    written = export(network, file, format=format, given=call(), takes=TAKES, dynamic="batch,size")
    assert (written.step, written.most) == (2, 4096) and written.least % 2 == 0
    assert (2, 4, 16, 16) in written.shapes and any(shape[0] == 3 and shape[-1] != 16 for shape in written.shapes)
    run = open_exported(file)
    for size in ((1, 8, 24), (5, 30, 10)):
        other = call(*size)
        torch.testing.assert_close(run(*handed(other)), network(**other)["sample"], rtol=1e-5, atol=1e-5)
    if format != "pt2":
        wanted = r"written for sample of torch.float32, batch 1 to 4096, .*height \d+ to 16384 in steps of 2"
        with pytest.raises(SubquadError, match=wanted):
            run(*handed(call(1, 8, 9)))


def test_an_onnx_file_names_what_changes(network, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    export(network, tmp_path / "n.onnx", given=call(), takes=TAKES, dynamic=["batch", "size"])
    inputs = onnx.load(tmp_path / "n.onnx").graph.input
    axes = {one.name: [axis.dim_param or axis.dim_value for axis in one.type.tensor_type.shape.dim] for one in inputs}
    assert list(axes) == TAKES
    assert axes["time"] == ["batch"] and axes["text"] == ["batch", 5, 6] and axes["scale"] == [1]
    for name in ("sample", "mask"):
        assert axes[name][0] == "batch" and all("height" in one or "width" in one for one in axes[name][2:])


def test_one_of_them_may_change_alone(network, tmp_path):
    export(network, tmp_path / "n.pt2", format="pt2", given=call(1), takes=TAKES, dynamic="size")
    run = open_exported(tmp_path / "n.pt2")
    other = call(1, 6, 20)
    torch.testing.assert_close(run(*handed(other)), network(**other)["sample"], rtol=1e-5, atol=1e-5)
    with pytest.raises((RuntimeError, AssertionError)):
        run(*handed(call(2, 6, 20)))


def test_what_tensors_have_of_images_is_seen():
    tensors = [torch.zeros(*shape) for shape in ((7,), (2, 77, 8), (2,), (2, 4, 8, 6), (1, 8, 8, 6), (2, 2, 9, 9))]
    assert axes_of(tensors) == (
        Axes(False, False),
        Axes(True, False),
        Axes(True, False),
        Axes(True, True),
        Axes(False, True),
        Axes(True, False),
    )
    assert axes_of([torch.zeros(())]) == (Axes(False, False),)


def test_resized_numbers_are_those_that_were_there():
    x = torch.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    larger = Axes(True, True).resized(x, 3, (3, 5))
    assert larger.shape == (3, 3, 3, 5) and torch.equal(larger[2, :, 2, 4], x[0, :, 0, 0])
    assert torch.equal(Axes(False, True).resized(x, 3, (1, 2)), x[:, :, :1])


def test_a_file_is_tried_with_the_rows_the_other_way_around_in_each_size():
    time, x = torch.tensor([3, 4]), torch.randn(2, 3, 4, 4)
    scale = torch.tensor(0.5)
    (at_first, turned, larger) = tried_like([time, x, scale], axes_of([time, x, scale]), [(2, 4, 4), (3, 6, 5)])
    assert [one.tolist() for one in (at_first[1][0], turned[1][0], larger[1][0])] == [[3, 4], [4, 3], [3, 4, 3]]
    assert torch.equal(turned[1][1], x.flip(0)) and larger[1][1].shape == (3, 3, 6, 5) and larger[1][2] is scale
    assert at_first[0] == "of 2 and 2 × 3 × 4 × 4 and 1 numbers"


@pytest.mark.parametrize(
    ("takes", "dynamic", "says"),
    [
        (["scale"], "batch", "none of what the file takes has a batch: leave batch out"),
        (["time"], "size", "none of what the file takes is a map of four axes"),
        (["sample"], "sizes", "what may change is batch or size, got 'sizes'"),
        (["sample", "kind"], "", "what is taken are tensors of what is given, sample, time, told, mask, got kind"),
    ],
)
def test_what_can_not_change_is_said(network, takes, dynamic, says, tmp_path):
    with pytest.raises(SubquadError, match=says):
        export(network, tmp_path / "n.pt2", format="pt2", given=call(), takes=takes, dynamic=dynamic)
    assert not list(tmp_path.iterdir())


def test_a_size_beside_what_is_given_is_refused(network, tmp_path):
    for settings in ({"img_size": 16}, {"batch": 3}):
        with pytest.raises(SubquadError, match="leave img_size and batch out; dynamic lets others be taken"):
            export(network, tmp_path / "n.pt2", format="pt2", given=call(), **settings)


class Few(nn.Module):
    """It goes another way for many images, as diffusers' upsampling does."""

    def forward(self, sample, time):
        if sample.shape[0] >= 64:
            sample = sample.contiguous()
        return sample * time[:, None, None, None]


def test_as_many_images_are_taken_as_a_network_has_one_way_for(tmp_path):
    given = {"sample": torch.randn(2, 3, 8, 8), "time": torch.rand(2)}
    written = export(Few(), tmp_path / "n.pt2", format="pt2", given=given, takes=list(given), dynamic="batch")
    assert written.most == 63
    assert taken_by(torch.export.load(tmp_path / "n.pt2"))[0]["sizes"][0] == [1, 63]
    many = {"sample": torch.randn(70, 3, 8, 8), "time": torch.rand(70)}
    with pytest.raises(SubquadError, match="has at most 63, got 70: leave batch out of what is dynamic"):
        export(Few(), tmp_path / "n.pt2", format="pt2", given=many, takes=list(given), dynamic="batch")
