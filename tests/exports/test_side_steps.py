"""Networks that take images of certain steps alone are written for all of these."""

import pytest
import torch
from torch import nn

from subquad import SubquadError, export
from subquad.exports import export as export_with_notes
from subquad.exports import open_exported
from subquad.exports.checking import answer_of, multiples_from
from subquad.exports.programs import program_of
from subquad.exports.side_steps import STEPS, least_taken, step_of_sides
from subquad.exports.taken_sizes import check_taken, taken_by


class Halving(nn.Module):
    """A decoder that adds maps of several resolutions, and says what it takes as such do."""

    def __init__(self, step, img_size=None):
        super().__init__()
        self.step, self.img_size = step, img_size
        self.down, self.up = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)

    def forward(self, x):
        height, width = x.shape[-2:]
        if height % self.step or width % self.step:
            raise RuntimeError(f"sides {height} and {width} are no multiples of {self.step}")
        if self.img_size and (height, width) != self.img_size:
            raise AssertionError(f"positions are for {self.img_size}")
        return x + self.up(self.down(x))


def test_sides_of_a_step_are_no_multiples_of_a_larger_one():
    assert multiples_from((54, 103), 1) == (54, 103)
    for step in STEPS[1:]:
        sides = multiples_from((54, 103), step)
        assert all(side % step == 0 and side % (2 * step) and side % (7 * step) for side in sides)
        assert sides[0] >= 54 and sides[1] >= 103 and sides[0] != sides[1]


@pytest.mark.parametrize("step", [1, 2, 8, 14, 32])
def test_the_step_of_a_network_is_found(step):
    model = Halving(step) if step > 1 else nn.Conv2d(3, 4, 1)

    def taken_by_it(size):
        answer_of(model, torch.zeros(1, 3, *size))

    assert step_of_sides(model, taken_by_it, 17) == (step, step * -(-17 // step))


def test_the_first_square_that_is_taken_is_found():
    def run(size):
        if min(size) < 9:
            raise SubquadError("too small")

    assert [least_taken(run, least, step) for least, step in ((9, 1), (3, 1), (4, 4), (2, 7))] == [9, 9, 12, 9]
    assert least_taken(lambda size: answer_of(Halving(999), torch.zeros(1, 3, *size)), 3, 2) == 3


@pytest.mark.parametrize("step", [8, 14])
def test_a_network_of_steps_is_written_for_all_of_them(step, tmp_path):
    model = Halving(step)
    written = export(model, tmp_path / "n.pt2", format="pt2", img_size=4 * step, dynamic="batch,size")
    assert written.step == written.least == step
    assert written.shapes[1] == (3, *multiples_from((step + 37, step + 86), step))
    run = torch.export.load(tmp_path / "n.pt2").module()
    x = torch.randn(2, 3, 5 * step, 6 * step)
    assert torch.allclose(run(x), model(x), atol=1e-6)


@pytest.mark.parametrize(("format", "suffix"), [("onnx", "onnx"), ("openvino", "xml")])
def test_files_refuse_what_they_were_not_written_for(format, suffix, tmp_path):
    """Engines run it, as far as shapes go, and answer something else where windows do not shrink with their map."""
    model = Halving(8)
    file = tmp_path / f"n.{suffix}"
    export_with_notes(model, file, format=format, img_size=32, dynamic=["size"], notes={"a": "b"})
    run = open_exported(file)
    x = torch.randn(1, 3, 24, 40)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    for wrong, message in (
        (
            torch.zeros(1, 3, 24, 12),
            r"written for images of torch.float32, batch 1, .* in steps of 8, got 1 × 3 × 24 × 12",
        ),
        (torch.zeros(2, 3, 24, 24), "batch 1, channels 3"),
        (x.half(), "images of torch.float32"),
    ):
        with pytest.raises(SubquadError, match=message):
            run(wrong)
    with pytest.raises(SubquadError, match="written for 1 tensor, got 2"):
        run(x, x)
    if format == "openvino":
        file.with_suffix(".bin").unlink()
        with pytest.raises(SubquadError, match=r"there is no \S+n.bin, which holds the weights of n.xml: move both"):
            open_exported(file)


def test_a_place_that_is_none_is_refused():
    with pytest.raises(SubquadError, match=r"path must be .*, got 3"):
        export(Halving(8), 3, format="pt2", img_size=32)


class Unfolding(nn.Module):
    """Patches without a convolution, of which nobody says how large they are."""

    def forward(self, x):
        return nn.functional.unfold(x, 8, stride=8).mean(dim=-1)


def test_a_network_that_takes_larger_images_alone_is_written_for_those(tmp_path):
    written = export(Unfolding(), tmp_path / "n.pt2", format="pt2", img_size=12, dynamic="batch,size")
    assert written.least == 8
    run = torch.export.load(tmp_path / "n.pt2").module()
    for size in ((8, 9), (33, 50)):
        x = torch.randn(2, 3, *size)
        assert torch.allclose(run(x), Unfolding()(x), atol=1e-6)


def test_a_package_says_of_which_numbers_sides_are_multiples():
    takes = taken_by(program_of(Halving(8), (torch.zeros(1, 3, 32, 32),), ("batch", "size"), least=16, step=8))
    assert takes["sizes"] == [[1, 4096], [3, 3], [16, 16384, 8], [16, 16384, 8]]
    check_taken(torch.zeros(2, 3, 24, 48), takes, "images")
    with pytest.raises(SubquadError, match=r"height 16 to 16384 in steps of 8, width .*, got 2 × 3 × 24 × 50"):
        check_taken(torch.zeros(2, 3, 24, 50), takes, "images")


class UpTo(nn.Module):
    """Positions for so many patches of 8, of which fewer are cut: it takes smaller images, and no larger ones."""

    def forward(self, x):
        patches = nn.functional.avg_pool2d(x, 8).flatten(2)
        if x.shape[-1] % 8 or x.shape[-2] % 8:
            raise RuntimeError("no whole patches")
        return patches + torch.zeros(64)[: patches.shape[-1]]


def test_a_network_of_small_images_alone_is_told_so_at_the_sides_that_are_compared(tmp_path):
    with pytest.raises(SubquadError, match=r"does not take images of .* leave size out of what is dynamic"):
        export(UpTo(), tmp_path / "n.pt2", format="pt2", img_size=64, dynamic="size")


def test_a_network_of_one_size_is_refused_by_what_it_says_itself(tmp_path):
    with pytest.raises(SubquadError, match=r"does not take images of 1 × 3 × 41 × 90: .*no multiples of 8"):
        export(Halving(8, (32, 32)), tmp_path / "n.pt2", format="pt2", dynamic="size")
    assert not list(tmp_path.iterdir())
