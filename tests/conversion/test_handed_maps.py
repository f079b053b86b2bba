"""Hybrids of timm whose attention layers are handed maps: FastViT, Visformer, VOLO, MobileNetV4, CoAtNet."""

from copy import deepcopy

import pytest
import timm
import torch
from foreign import answer, difference, images
from foreign_maps import ANY, HANDED_MAPS
from foreign_more import teacher
from test_pyramids import sharp
from timm.utils import reparameterize_model
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import converted_layers, load_converted, save_delta
from subquad.conversion.towers import find_tower


def steady(name):
    """A teacher whose queries choose, with norms that know the images: else maps grow from stage to stage."""
    model = sharp(name).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model(images(number=8))
    return model.eval()


ANY_SIZE = [name for name, (_, sizes) in HANDED_MAPS.items() if sizes == ANY]


@pytest.mark.parametrize("name", HANDED_MAPS)
def test_positions_are_made_for_the_map_that_reaches_each_layer(name):
    side = 128 if name in ANY_SIZE else 64
    tower = find_tower(teacher(name), img_size=(side, side))
    seen, model = {}, teacher(name)
    for layer in tower.layers:
        model.get_submodule(layer.path).register_forward_pre_hook(
            lambda module, called, path=layer.path: seen.update({path: called[0].shape[-3:]})
        )
    answer(model, images(side))
    for layer in tower.layers:
        assert tuple(layer.grid.shape) in (seen[layer.path][1:], seen[layer.path][:2])
    focused = subquad.convert(teacher(name), "focused", img_size=(side, side))
    grids = {layer.path: layer.grid for layer in tower.layers}
    for path, layer in zip(focused.subquad_conversion.paths.values(), converted_layers(focused).values(), strict=True):
        assert layer.inner.positions.grid == grids[path]


def test_images_that_a_network_is_not_made_for_are_refused_with_what_it_says():
    for name in ("timm Visformer", "timm VOLO", "timm CoAtNet"):
        with pytest.raises(SubquadError, match=r"can't be run for images of 96×64 px, to see where its tokens stand: "):
            subquad.convert(teacher(name), "linear", img_size=(96, 64))


def test_layers_that_are_not_called_are_converted_beside_those_that_are():
    model = teacher("timm FastViT")
    model.spare = nn.ModuleList([deepcopy(model.stages[3].blocks[0])])
    student = subquad.convert(model, "focused")
    assert list(student.subquad_conversion.paths.values())[-1] == "spare.0.token_mixer"
    assert student.spare[0](torch.randn(2, 64, 3, 5)).shape == (2, 64, 3, 5)
    model.forward = lambda x: x
    with pytest.raises(SubquadError, match=r"stages\.2\.blocks\.0\.token_mixer is not called where a FastVit is run"):
        subquad.convert(model, "focused")


def test_windows_of_volo_stay():
    student = subquad.convert(teacher("timm VOLO"), "linear")
    assert list(converted_layers(student)) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(SubquadError, match=r"network\.0\.0\.attn sees windows, and stays as it is"):
        subquad.convert(teacher("timm VOLO"), "linear", blocks=[0])


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_branches_are_fused_in_a_student_as_in_its_teacher(attention):
    student = subquad.convert(steady("timm FastViT"), attention)
    before = answer(student, images(96, 64))
    fused = reparameterize_model(student)
    assert sum(1 for _ in fused.modules()) < sum(1 for _ in student.modules())
    assert difference(answer(fused, images(96, 64)), before) < 1e-5
    # and a teacher whose branches are fused is converted
    again = subquad.convert(reparameterize_model(steady("timm FastViT")), attention)
    assert difference(answer(again, images(96, 64)), before) < 1e-5


@pytest.mark.parametrize(("name", "first"), [("timm MobileNetV4", 0), ("timm MobileNetV4, same padding", 1)])
def test_keys_of_fewer_places_are_among_those_of_all(name, first):
    model = steady(name)
    layers = converted_layers(subquad.convert(model, "linear")).values()
    fewer_keys = [one for one in layers if hasattr(one.original.key, "down_conv")]
    assert len(fewer_keys) == 2
    for layer in fewer_keys:
        x = torch.randn(2, 48, 8, 12)
        for part in ("key", "value"):
            fewer, every = (module.get_submodule(part)(x) for module in (layer.original, layer))
            assert every.shape[-2:] == x.shape[-2:]
            assert torch.allclose(every[..., first::2, first::2], fewer, atol=1e-5)


def test_layers_that_have_no_place_for_a_mechanism_are_refused_with_what_to_do():
    model = teacher("timm MobileNetV4")
    block = next(module for module in model.modules() if hasattr(module, "attn"))
    block.attn = type(block.attn)(48, num_heads=4, query_strides=2)
    with pytest.raises(SubquadError, match=r"its queries stand \(2, 2\) places apart, .* leave its block out"):
        subquad.convert(model, "linear")
    assert len(converted_layers(subquad.convert(model, "linear", blocks=[1, 2]))) == 2
    block.attn = type(block.attn)(48, num_heads=4, key_dim=8, value_dim=12)
    with pytest.raises(SubquadError, match=r"its keys have 8 channels and its values 12: .* leave its block out"):
        subquad.convert(model, "linear")


def test_masks_are_refused():
    for name in ("timm MobileNetV4", "timm MobileNetV4, heads apart"):
        (layer, *_) = converted_layers(subquad.convert(teacher(name), "linear")).values()
        width = 48 if name == "timm MobileNetV4" else 64
        with pytest.raises(SubquadError, match="takes no attn_mask"):
            layer(torch.randn(1, width, 4, 4), torch.zeros(16, 16))


# timm's interpolation does what PyTorch warns of
@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", ["timm CoAtNet", "timm CoAtNet, biases of a network"])
def test_a_coatnet_is_made_for_other_images_by_timms_own_call(name):
    model = steady(name)
    if not hasattr(model, "set_input_size"):
        pytest.skip("timm's has none in 1.0.26")
    students = {attention: subquad.convert(model, attention) for attention in ("softmax", "linear")}
    # without biases any size will do
    assert answer(students["linear"], images(96, 160)).isfinite().all()
    for one in (model, *students.values()):
        one.set_input_size((64, 96))
    expected = answer(model, images(64, 96))
    assert difference(answer(students["softmax"], images(64, 96)), expected) < 2e-6
    assert answer(students["linear"], images(64, 96)).isfinite().all()
    assert not any("rel_pos" in key for key in students["linear"].state_dict())
    assert torch.equal(answer(subquad.restore(students["linear"], strict=False), images(64, 96)), expected)


@pytest.mark.parametrize("name", ["timm FastViT", "timm MobileNetV4", "timm CoAtNet"])
def test_gradients_are_the_same_where_stages_are_computed_again(name):
    student, gradients = subquad.convert(steady(name), "inline"), []
    for again in (False, True):
        student.set_grad_checkpointing(again)
        student.zero_grad()
        student(images()).square().mean().backward()
        gradients.append(torch.cat([one.grad.flatten() for one in student.parameters()]))
    assert torch.equal(*gradients)


def test_a_delta_file_makes_the_student_again(tmp_path):
    model = steady("timm MobileNetV4")
    student = subquad.convert(model, "pola")
    for layer in converted_layers(student).values():
        for parameter in layer.parameters():
            parameter.data.mul_(1.1)
    save_delta(student, tmp_path / "student.safetensors")
    again = load_converted(tmp_path / "student.safetensors", model)
    assert torch.equal(answer(again, images(64, 96)), answer(student, images(64, 96)))


def test_where_heads_have_another_width_than_tokens_inline_reads_the_values():
    student = subquad.convert(steady("timm MobileNetV4"), "inline")
    told = []
    for layer in converted_layers(student).values():
        for parameter in layer.inner.parameters():
            nn.init.normal_(parameter, std=0.1)
        layer.inner.register_forward_pre_hook(lambda module, called, named: told.append(named), with_kwargs=True)
    assert answer(student, images()).isfinite().all()
    assert len(told) == 3
    assert all(torch.equal(named["x"], named["v"].transpose(1, 2).flatten(2)) for named in told)
    student(images()).square().mean().backward()
    assert all(one.grad.any() for layer in converted_layers(student).values() for one in layer.inner.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "agent"])
# of the others PyTorch can't make a program, with or without our layers, or not in minutes (padding like TensorFlow's)
@pytest.mark.parametrize("name", ["timm FastViT", "timm MobileNetV4", "timm MobileNetV4, heads apart"])
@pytest.mark.thinned(2)
def test_it_is_written_for_images_of_any_size(name, attention, tmp_path):
    student = subquad.convert(steady(name), attention)
    written = subquad.export(student, tmp_path / "n.pt2", format="pt2", img_size=128, dynamic="batch,size")
    program = torch.export.load(written.path).module()
    for size in ((128, 192), (160, 128)):
        assert difference(program(images(*size)), answer(student, images(*size))) < 1e-5


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.thinned(12)
@pytest.mark.parametrize(
    ("engine", "format", "file"), [("onnxruntime", "onnx", "n.onnx"), ("openvino", "openvino", "n.xml")]
)
@pytest.mark.parametrize("name", HANDED_MAPS)
def test_engines_answer_as_pytorch_does(name, engine, format, file, tmp_path):
    pytest.importorskip(engine)
    student = subquad.convert(steady(name), "agent")
    assert subquad.export(student, tmp_path / file, format=format, img_size=64, dynamic="batch").difference < 1e-4


def test_networks_of_features_are_converted():
    model = timm.create_model("fastvit_sa12", features_only=True, pretrained=False).eval()
    student = subquad.convert(model, "softmax", img_size=(64, 96))
    with torch.no_grad():
        for found, wanted in zip(student(images(64, 96)), model(images(64, 96)), strict=True):
            assert difference(found, wanted) < 1e-6
