"""The numbers that conversion measures and moves, on small cases that are reckoned by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from foreign import sharp, teacher
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError
from subquad.conversion import compare_networks, converted_layers, distil, trade_off
from subquad.conversion.aligning import relative_error
from subquad.conversion.distilling import agreeing, answers_of, divergence
from subquad.conversion.families.sam_attention import Sam2Attention, distances
from subquad.conversion.families.windowed_blocks import as_cosines, continuous_bias, window_bias
from subquad.conversion.grid_recorder import GridRecorder
from subquad.conversion.hybrids import HybridRow, blocks_for, sensitivity
from subquad.conversion.labelled_features import LabelledJudge, pooled_features
from subquad.grid import TokenGrid

PICTURES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_errors_are_shares_of_what_was_wanted_image_by_image():
    target = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert relative_error(2 * target, target).item() == 1
    assert relative_error(torch.tensor([[1.0, 1.0], [0.0, 4.0]]), target).item() == 0.5


def test_divergence_is_that_of_the_student_from_the_teacher():
    ours, theirs = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert divergence(ours.log(), theirs.log()).item() == pytest.approx(expected, rel=1e-5)


def test_places_of_an_image_agree_by_their_share():
    ours, theirs = torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2)
    ours[0, 1, 0, 0] = theirs[0, 1, 0] = 1
    assert agreeing({"logits": ours}, {"logits": theirs}) == 0.75


def test_answers_that_are_no_numbers_agree_with_nothing():
    """The largest of NaN is the first class: a student that has diverged agreed wherever its teacher says that one."""
    ours, theirs = torch.zeros(3, 2), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    ours[0], ours[1, 0] = torch.nan, 1
    assert agreeing({"logits": ours}, {"logits": theirs}) == 1
    assert agreeing({"logits": ours[:1]}, {"logits": ours[:1]}) == 0
    places = torch.zeros(1, 2, 2, 2)
    places[0, 1, 0] = torch.nan
    assert agreeing({"logits": places}, {"logits": torch.zeros(1, 2, 2, 2)}) == 0.5


def test_batches_of_any_size_count_by_their_images():
    model = sharp("timm ViT")
    student = subquad.convert(model, "linear")
    whole = compare_networks(student, model, [(PICTURES, None)])
    parts = compare_networks(student, model, [(PICTURES[:1], None), (PICTURES[1:], None)])
    assert parts.error == pytest.approx(whole.error, rel=1e-5)
    assert parts.cosine == pytest.approx(whole.cosine, rel=1e-5)
    alike = sensitivity(student, model, [PICTURES]), sensitivity(student, model, [PICTURES[:1], PICTURES[1:]])
    assert [row.damage for row in alike[0]] == pytest.approx([row.damage for row in alike[1]], rel=1e-5)


def test_tokens_of_zeros_in_both_are_alike():
    model = Answers(lambda y: y[:, None] * torch.tensor([0.0, 1.0])[:, None])
    assert compare_networks(model, model, [(PICTURES, None)]).cosine == pytest.approx(1)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_cosines_and_means_are_of_the_channels_of_tokens(layout):
    class Gives(nn.Module):
        output_fmt = layout

        def __init__(self, tokens):
            super().__init__()
            self.weight = nn.Parameter(tokens)

        def forward(self, x):
            return self.weight.expand(len(x), -1, -1, -1) if layout == "NHWC" else self.weight.permute(0, 3, 1, 2)

    ours, theirs = torch.randn(2, 1, 4, 4, 3, generator=torch.Generator().manual_seed(0))
    found = compare_networks(Gives(ours), Gives(theirs), [(PICTURES[:1], None)])
    assert found.cosine == pytest.approx(torch.cosine_similarity(ours, theirs, dim=-1).mean().item(), rel=1e-4)
    assert torch.allclose(pooled_features(Gives(ours), PICTURES[:1])[0], ours.mean((1, 2)), atol=1e-6)


class Answers(nn.Module):
    """A network of one's own around a backbone."""

    def __init__(self, answer):
        super().__init__()
        self.backbone, self.answer = sharp("timm ViT"), answer

    def forward(self, x, times=1.0):
        return self.answer(times * self.backbone(x))


MAPS = {
    "depth of a library": lambda y: {"predicted_depth": y},
    "a map of the image's size": lambda y: y,
    "one channel": lambda y: y[:, None],
}


@pytest.mark.parametrize("kind", MAPS)
def test_maps_of_one_number_for_each_place_are_compared_image_by_image(kind):
    class Depth(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.depth = nn.Parameter(depth)

        def forward(self, x):
            return MAPS[kind](self.depth)

    side = 5 if kind == "depth of a library" else 64
    ours, theirs = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    found = compare_networks(Depth(ours), Depth(theirs), [(PICTURES, None)])
    expected = torch.cosine_similarity(ours.flatten(1), theirs.flatten(1)).mean().item()
    assert found.cosine == pytest.approx(expected, rel=1e-4) and abs(expected) < 0.2
    assert torch.allclose(pooled_features(Depth(ours), PICTURES)[0], ours.mean((1, 2))[:, None], atol=1e-6)


ANSWERS = {
    "a number for each image": lambda y: y[:, 0],
    "a loss beside it": lambda y: {"out": y, "loss": y.square().mean(), "none": None},
    "one name in two parts": lambda y: {"a": {"y": y}, "b": {"y": y[:, :1]}},
    "classes of tokens": lambda y: {"logits": y[:, None].expand(-1, 3, -1)},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_any_shape_are_compared(name):
    model = Answers(ANSWERS[name])
    student = subquad.convert(model, "linear")
    distil(student, PICTURES, teacher=model, updates=1, batch_size=2)
    found = compare_networks(student, model, [(PICTURES, None)])
    assert found.images == 3
    assert found.agreement is None
    assert -1 <= found.cosine <= 1
    assert all(math.isfinite(row.damage) for row in sensitivity(student, model, [PICTURES]))
    assert len(answers_of(model, PICTURES)) == (2 if "two parts" in name else 1)


def test_answers_that_can_not_be_compared_are_refused():
    model = Answers(lambda y: y.argmax(1))
    student = subquad.convert(model, "linear")
    for fit in (
        lambda: distil(student, PICTURES, teacher=model, updates=1),
        lambda: compare_networks(student, model, [(PICTURES, None)]),
        lambda: sensitivity(student, model, [PICTURES]),
    ):
        with pytest.raises(SubquadError, match="Answers answers with no tensor"):
            fit()


def test_batches_by_name_count_by_their_images():
    model = Answers(lambda y: {"features": y, "logits": y})
    student = subquad.convert(model, "linear")
    named = {"x": PICTURES, "times": torch.tensor(1.0)}
    rows, plain = sensitivity(student, model, [named]), sensitivity(student, model, [PICTURES])
    assert rows == plain
    assert trade_off(student, model, [named], rows) == trade_off(student, model, [PICTURES], rows)
    assert compare_networks(student, model, [(named, None)]) == compare_networks(student, model, [(PICTURES, None)])


def test_the_fewest_blocks_that_are_fast_enough_are_chosen():
    rows = [HybridRow(tuple(range(count)), 0.1, None, 12.0 / (1 + count)) for count in range(4)]
    assert blocks_for(rows, speedup=2) == (0,)
    assert blocks_for(rows, speedup=2.5) == (0, 1)
    # timed, all of them may be slower than some
    with pytest.raises(SubquadError, match=r"converting 1 of 2 blocks, the quickest of all, .* 4\.00 times as fast"):
        blocks_for(
            [HybridRow((), 0, None, 8.0), HybridRow((0,), 0, None, 2.0), HybridRow((0, 1), 0, None, 4.0)], speedup=5
        )


def test_negative_numbers_count_blocks_from_the_end():
    assert list(converted_layers(subquad.convert(teacher("timm ViT"), "linear", blocks=[-2]))) == [0]


def test_agreement_is_with_the_teacher():
    """Of two images, of which the student tells one as the teacher does, and the other right."""
    images = [(torch.full((3, 2, 2), float(place)), place % 2) for place in range(4)]
    sets = dict.fromkeys(("train", "validation"), LabelledImages(images))

    class Tells(nn.Module):
        def __init__(self, *classes):
            super().__init__()
            self.num_classes, self.weight, self.classes = 2, nn.Parameter(torch.zeros(1)), classes

        def forward(self, x):
            return nn.functional.one_hot(torch.tensor([self.classes[int(one[0, 0, 0])] for one in x]), 2).float()

    judge = LabelledJudge(sets, Tells(0, 0, 0, 0), ("even", "odd"))
    told = judge.note("swapped", Tells(0, 1, 0, 1))
    assert (judge.comparison.teacher.agreement, judge.comparison.teacher.head) == (1, 0.5)
    assert (told.agreement, told.head) == (0.5, 1)


class LabelledImages(list):
    """A data set."""

    name, classes = "four", ("even", "odd")


class Asked(nn.Module):
    """A mechanism that keeps what it is asked."""

    inputs = ("q", "v", "x", "rotation")

    def forward(self, *, grid, kv_grid, **asked):
        self.asked = asked
        return asked["v"]


def test_a_mechanism_that_turns_its_queries_itself_gets_them_as_they_were_projected():
    student = subquad.convert(teacher("timm DINOv3"), "linear")
    layer = converted_layers(student)[0]
    layer.inner, seen = Asked(), []
    layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    student(PICTURES)
    assert layer.inner.asked["rotation"] is not None
    assert torch.equal(layer.inner.asked["q"], layer.split(layer.projections(seen[0])[0]))


def test_a_mechanism_that_asks_for_tokens_gets_them_before_the_norm_where_there_are_such():
    layer = converted_layers(subquad.convert(teacher("timm ViT"), "linear"))[0]
    layer.inner = Asked()
    heads, tokens = torch.randn(1, 4, 6, 12), torch.randn(1, 6, 48)
    for unnormed, expected in ((None, tokens), (2 * tokens, 2 * tokens)):
        layer.mix(heads, heads, heads, tokens, grid=TokenGrid(2, 3), unnormed=unnormed)
        assert torch.equal(layer.inner.asked["x"], expected)


def test_biases_of_a_window_that_is_not_square():
    window = TokenGrid(2, 3)
    table = torch.arange(15.0)[:, None]
    bias = window_bias(table, window)[0]
    for one in range(6):
        for other in range(6):
            down, right = one // 3 - other // 3, one % 3 - other % 3
            assert bias[one, other] == (down + 1) * 5 + right + 2


def test_continuous_biases_lie_between_0_and_16():
    # of the neighbour to the right, the place itself, the neighbour to the left
    known = torch.tensor([0.0, 50.0, -50.0])[None, None, :, None]
    bias = continuous_bias(nn.Identity(), known, TokenGrid(1, 2))
    torch.testing.assert_close(bias[0], torch.tensor([[16.0, 8.0], [0.0, 16.0]]))


def test_cosines_have_a_scale_of_at_most_100():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    for learned, scale in ((math.log(10), 10), (9.0, 100)):
        one, other = as_cosines(q, k, torch.full((2, 1, 1), learned))
        # softmax attention divides by the root of four channels
        logits = one @ other.mT / 2
        expected = scale * nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_distances_of_another_size_lie_on_lines_between_the_known_ones():
    table = torch.tensor([0.0, 1.0, 2.0])[:, None]
    far = distances(table, 3)[:, :, 0]
    assert far[0, 0] == 1
    assert far[1, 0] == pytest.approx(1.6)
    assert torch.equal(distances(table, 2)[:, :, 0], torch.tensor([[1.0, 0.0], [2.0, 1.0]]))


def test_maps_of_patches_that_overlap_are_reckoned_as_the_convolution_does():
    for patches in (nn.Conv2d(3, 4, 7, stride=4, padding=3), nn.Conv2d(3, 4, 4, stride=4)):
        for size in ((64, 64), (61, 87)):
            image = torch.zeros(1, 3, *size)
            assert GridRecorder.map_from(patches, size) == tuple(patches(image).shape[-2:])


@pytest.mark.parametrize("attention", sorted(name for name, cls in ATTENTION.items() if cls.traits.start_quietly))
def test_mechanisms_start_as_their_files_say(attention):
    """Told so once more nothing changes in them."""
    layer = converted_layers(subquad.convert(teacher("timm ViT"), attention))[0]
    before = {name: tensor.clone() for name, tensor in layer.inner.state_dict().items()}
    with torch.no_grad():
        ATTENTION[attention].traits.start_quietly(layer.inner)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.inner.state_dict().items())


def test_rows_and_columns_of_an_image_are_not_mixed_up():
    student = subquad.convert(teacher("timm ViT"), "linear")
    student(torch.zeros(1, 3, 32, 96))
    recorder = converted_layers(student)[0].recorder
    assert recorder.grid_of(torch.zeros(1, 13, 48)) == TokenGrid(2, 6, 1)
    assert recorder.map_of(torch.zeros(1, 12, 48)) == TokenGrid(2, 6)


def test_stages_of_sam_2_are_pooled_as_often_as_blocks_do_it():
    grid, grids = TokenGrid(16, 25), []
    for stride in ((), (2, 2), (), (2, 2), ()):
        grid = Sam2Attention.grid_behind(SimpleNamespace(query_stride=stride), grid)
        grids.append(grid.shape)
    assert grids == [(16, 25), (8, 12), (8, 12), (4, 6), (4, 6)]
