"""Networks of further packages, built of classes of their own: stand-ins for all, themselves where installed."""

import copy
from types import SimpleNamespace

import pytest
import torch
from foreign import difference, draw
from foreign_packages import (
    CALLED,
    PACKAGES,
    DepthAnything3,
    LikeSam3,
    OfMonai,
    OfMonaiCrossing,
    like_monai,
    like_rf_detr,
    like_vit_pytorch,
)
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import align, converted_layers, load_converted, save_delta
from subquad.conversion.towers import find_tower
from subquad.grid import TokenGrid
from subquad.positions import GridTable

NETWORKS = [(package, name) for package, networks in PACKAGES.items() for name in networks]


def of(package, name):
    pytest.importorskip(package)
    make, shapes = PACKAGES[package][name]
    torch.manual_seed(0)
    model = make().eval()
    draw(model)
    return model, [torch.randn(2, *shape) for shape in shapes]


# of what the packages themselves call
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@torch.no_grad()
@pytest.mark.parametrize(("package", "name"), NETWORKS)
def test_a_network_of_the_package_itself_is_the_same_with_softmax_and_kept_with_others(package, name, tmp_path):
    model, images = of(package, name)
    # of networks of views each is an image
    size = {"img_size": tuple(images[0].shape[(3 if package == "depth_anything_3" else 2) :])}
    student = subquad.convert(model, "softmax", **size)
    for x in images:
        assert difference(student(x), model(x)) < 1e-6
    student = subquad.convert(model, "agent", num_agents=4, **size)
    for x in images:
        assert difference(student(x), model(x)) > 1e-5
    save_delta(student, tmp_path / "delta.safetensors", teacher=model)
    again = load_converted(tmp_path / "delta.safetensors", model)
    assert torch.equal(again(images[0]), student(images[0]))


@torch.no_grad()
def test_maps_of_a_volume_stand_below_one_another(tmp_path):
    model = like_monai(nn.Conv3d, (8, 16, 16), 2 * 4 * 4, channels=1).eval()
    with pytest.raises(SubquadError, match="does not say which images it is made for: give img_size"):
        subquad.convert(model, "softmax")
    student = subquad.convert(model, "focused", img_size=(16, 64, 64))
    assert converted_layers(student)[0].inner.positions.grid == TokenGrid(8, 4)
    save_delta(student, tmp_path / "delta.safetensors", teacher=model)
    again = load_converted(tmp_path / "delta.safetensors", model)
    assert converted_layers(again)[0].inner.positions.grid == TokenGrid(8, 4)
    student = subquad.convert(model, "softmax", img_size=(16, 64, 64))
    x = torch.randn(2, 1, 16, 64, 64)
    assert difference(student(x), model(x)) < 1e-6
    with pytest.raises(
        SubquadError, match=r"takes images \(b, 1, depth, height, width\), got \(1, 16, 64, 64\): x\[None"
    ):
        student(x[0])
    with pytest.raises(SubquadError, match="images of 4×64×64 px hold no patch of 8×16×16"):
        student(x[:, :, :4])


@torch.no_grad()
def test_cubes_and_squares_are_known_by_their_positions_and_three_sides_are_for_volumes():
    cube = like_monai(nn.Conv3d, 8, 4**3, channels=1)
    assert converted_layers(subquad.convert(cube, "focused"))[0].inner.positions.grid == TokenGrid(16, 4)
    square = like_vit_pytorch()
    assert converted_layers(subquad.convert(square, "focused"))[0].inner.positions.grid == TokenGrid(4, 4, 1)
    with pytest.raises(SubquadError, match=r"img_size has 3 sides, \(16, 64, 64\), and this network takes images"):
        subquad.convert(square, "linear", img_size=(16, 64, 64))


@torch.no_grad()
def test_copies_of_a_student_know_where_patches_stand():
    """Those of an einops layer have none of its hooks."""
    student, x = subquad.convert(like_vit_pytorch(), "inline").eval(), torch.randn(2, 3, 64, 64)
    assert torch.equal(copy.deepcopy(student)(x), student(x))


@torch.no_grad()
def test_masks_of_monai_are_those_of_absent_tokens():
    layer = OfMonai().eval()
    student = subquad.convert(like_monai(), "softmax")
    ours = converted_layers(student)[0]
    ours.load_state_dict(layer.state_dict(), strict=False)
    x, there = torch.randn(2, 16, 48), torch.ones(2, 16)
    there[1, 9:] = 0
    student(torch.randn(2, 3, 64, 64))
    assert difference(ours(x, there)[there > 0], layer(x, there)[there > 0]) < 1e-6


@pytest.mark.parametrize(
    ("says", "named"), [("causal", "in front of them alone"), ("save_attn", "keeps its attention map .save_attn")]
)
def test_what_monais_layers_do_beside_is_refused(says, named):
    model = like_monai()
    for block in model.layers:
        setattr(block[0], says, True)
    with pytest.raises(SubquadError, match=named):
        subquad.convert(model, "linear")


def test_attention_to_other_tokens_in_monais_blocks_stays():
    """Earlier versions of MONAI have it in every block, and do not call it."""
    model = like_monai()
    for block in model.layers:
        block.append(OfMonaiCrossing())
    assert list(converted_layers(subquad.convert(model, "linear"))) == [0, 1]
    assert isinstance(model.layers[1][2], OfMonaiCrossing)


def test_layers_in_blocks_that_are_lists_are_of_one_stage():
    """Each was a stage of its own, of which settings and shares of products were told."""
    assert find_tower(like_vit_pytorch()).depths == [2]


@torch.no_grad()
def test_what_is_no_batch_of_images_is_refused_by_its_shape():
    student = subquad.convert(like_vit_pytorch(), "linear")
    with pytest.raises(SubquadError, match=r"takes images \(b, c, height, width\), got \(1, 3, 2, 64, 64\)$"):
        student(torch.randn(1, 3, 2, 64, 64))


@torch.no_grad()
def test_a_block_of_roboflows_rf_detr_is_not_taken_for_another_kind():
    student = subquad.convert(like_rf_detr(), "linear")
    student.config = SimpleNamespace(window_block_indexes=(0, 1, 2))
    with pytest.raises(SubquadError, match="sees whole images, and is called for windows"):
        student(torch.randn(1, 3, 64, 64))


def test_windows_of_roboflows_rf_detr_stay_and_registers_are_refused():
    student = subquad.convert(like_rf_detr(), "focused")
    assert {n: one.inner.positions.grid for n, one in converted_layers(student).items()} == {1: TokenGrid(4, 4, 4)}
    with pytest.raises(SubquadError, match=r"layer\.2 sees windows, and stays as it is"):
        subquad.convert(like_rf_detr(), "linear", blocks=[1, 2])
    with pytest.raises(SubquadError, match="registers in its windows can't be converted"):
        subquad.convert(like_rf_detr(registers=2), "linear")


def test_sam_3_of_meta_says_in_its_layers_how_large_images_are():
    model = LikeSam3()
    assert find_tower(model).grid == TokenGrid(4, 4)
    assert list(converted_layers(subquad.convert(model, "agent", num_agents=4))) == [1]
    for more, what in (({"cls_token": True}, "class tokens"), ({"use_rel_pos": True}, "relative positions")):
        with pytest.raises(SubquadError, match=f"an encoder of SAM 3 with {what} can't be converted"):
            subquad.convert(LikeSam3(**more), "linear")


@torch.no_grad()
def test_views_stand_below_one_another_behind_their_class_tokens():
    model = DepthAnything3(views=3).eval()
    student = subquad.convert(model, "softmax")
    grids, seen = [], []

    def see(inner, _, given):
        grids.append(given["grid"])
        seen.append(given["v"])

    for layer in converted_layers(student).values():
        layer.inner.register_forward_pre_hook(see, with_kwargs=True)
    tokens = []
    layer = converted_layers(student)[1]
    layer.register_forward_pre_hook(lambda _, given: tokens.extend(given))
    student(torch.randn(2, 3, 32, 96))
    assert grids == [TokenGrid(2, 2, 1), TokenGrid(6, 2, 3)]
    # of both images: three views of a class token and four patches each
    class_tokens, patches = tokens[0].unflatten(1, (3, 5)).split([1, 4], dim=2)
    wanted = torch.cat([class_tokens.flatten(1, 2), patches.flatten(1, 2)], dim=1)
    torch.testing.assert_close(seen[-1], layer.split(layer.projections(wanted)[2]))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["agent", "focused", "pola"])
def test_positions_are_made_for_one_view_and_class_tokens_share_theirs(attention):
    model, images = DepthAnything3(views=2).eval(), torch.randn(2, 3, 64, 128)
    student = subquad.convert(model, attention)
    with_one, inner = student(images), converted_layers(student)[1].inner
    table = next(one for one in inner.modules() if isinstance(one, GridTable))
    (table.prefix if attention == "agent" else table.table[:, :1]).normal_()
    assert difference(student(images), with_one) > 1e-4
    places = table(TokenGrid(8, 4, 2)).movedim(-1 if attention == "agent" else -2, 0)
    assert len(places) == 2 + 8 * 4
    assert torch.equal(places[0], places[1]) and not torch.equal(places[1], places[2])


@torch.no_grad()
def test_layers_of_views_refuse_masks_and_parts_of_views():
    student = subquad.convert(DepthAnything3().eval(), "linear")
    student(torch.randn(1, 3, 64, 64))
    layer = converted_layers(student)[1]
    with pytest.raises(SubquadError, match="takes no attn_mask: call Depth Anything 3 without one"):
        layer(torch.randn(1, 18, 48), attn_mask=torch.ones(1, 18, 18))
    with pytest.raises(SubquadError, match="17 tokens are not those of the last image"):
        layer(torch.randn(1, 17, 48))


def test_layers_of_all_views_are_aligned():
    torch.manual_seed(0)
    model = DepthAnything3(views=3).eval()
    draw(model)
    student = subquad.convert(model, "linear")
    fitted = align(student, lambda update: torch.randn(2, 3, 32, 96), teacher=model, updates=40, lr=3e-3)
    assert fitted.after[1] < fitted.before[1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@torch.no_grad()
@pytest.mark.parametrize(("package", "name"), [(package, name) for package, some in CALLED.items() for name in some])
def test_u_nets_and_autoencoders_of_the_package_itself_are_the_same_with_softmax(package, name):
    pytest.importorskip(package)
    make, call, sizes = CALLED[package][name]
    torch.manual_seed(0)
    model = make().eval()
    draw(model)

    def answers(network, given):
        y = network(**given)
        return y if isinstance(y, torch.Tensor) else y[1]

    same, other = (subquad.convert(model, kind, given=call(*sizes[0])) for kind in ("softmax", "linear"))
    for size in sizes:
        given = call(*size)
        assert difference(answers(same, given), answers(model, given)) < 1e-5
        assert difference(answers(other, given), answers(model, given)) > 1e-5
