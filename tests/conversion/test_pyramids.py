"""Foreign pyramids that convolutions lead through: SegFormer, PVTv2, GLPN, CAFormer; hybrids that are handed maps."""

import pytest
import timm
import torch
from foreign import Answer, answer, difference, images
from foreign_maps import HANDED_MAPS
from foreign_more import PYRAMIDS, teacher
from safetensors.torch import save_file
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import align, converted_layers, relative_errors
from subquad.runs import open_trained
from subquad.runs.timm_classifiers import make_timm
from subquad.runs.untrained_networks import maker_of

BOTH = PYRAMIDS | HANDED_MAPS
REDUCING = [name for name in PYRAMIDS if "CAFormer" not in name]


def sharp(name):
    """A teacher whose queries choose among the keys, so that it shows where keys are others."""
    model = teacher(name)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", BOTH)
def test_queries_that_choose_find_the_keys_of_the_teacher(name):
    model = sharp(name)
    student, other = subquad.convert(model, "softmax"), subquad.convert(model, "linear")
    for size in [(64, 64), *BOTH[name][1]]:
        expected = answer(model, images(*size))
        assert difference(answer(student, images(*size)), expected) < 2e-6
        if name in PYRAMIDS:
            assert difference(answer(other, images(*size)), expected) > 1e-2
        # of the layers themselves, squared: in hybrids there is a lot else behind them
        assert max(relative_errors(other, model, images(*size)).values()) > 1e-4


@pytest.mark.parametrize("name", PYRAMIDS)
def test_positions_are_made_for_the_map_of_each_stage(name):
    student = subquad.convert(teacher(name), "focused", img_size=(64, 96))
    grids = [tuple(layer.inner.positions.grid.shape) for layer in converted_layers(student).values()]
    if "CAFormer" in name:
        assert grids == [(4, 6), (4, 6), (2, 3)]
    else:
        assert grids == [(16, 24), (8, 12), (4, 6), (2, 3), (2, 3)]


@pytest.mark.parametrize("name", BOTH)
def test_one_image_without_a_batch_is_called_so(name):
    student = subquad.convert(teacher(name), "linear")
    with pytest.raises(SubquadError, match=r"got \(3, 64, 64\): x\[None\] makes a batch of one image"):
        student(torch.randn(3, 64, 64))


class Two(nn.Module):
    """A pyramid beside a plain network."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.first(x), self.second(x)


def test_of_two_networks_the_first_is_converted():
    plain = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=2, num_heads=4)
    pyramid = teacher("timm PVTv2")
    for model, layers in ((Two(pyramid, plain), 5), (Two(plain, pyramid), 2)):
        with pytest.warns(UserWarning, match="^second.* of this Two, .* stays as it is"):
            assert len(converted_layers(subquad.convert(model, "linear"))) == layers


def test_what_a_pyramid_has_not_is_refused():
    with pytest.raises(SubquadError, match=r"no tokens stand in front of the maps .* leave prefix out"):
        subquad.convert(teacher("timm CAFormer"), "linear", prefix=1)
    student = subquad.convert(teacher("transformers SegFormer"), "linear")
    (layer, *_), tokens = converted_layers(student).values(), torch.randn(1, 16, 16)
    if not hasattr(layer, "q_proj"):
        pytest.skip("layers of older transformers take no mask")
    with pytest.raises(SubquadError, match="takes no attention_mask"):
        layer(tokens, 4, 4, torch.zeros(1, 1, 16, 16))


@pytest.mark.parametrize("name", REDUCING)
def test_what_reduces_keys_stays_with_a_quadratic_mechanism_alone(name):
    model = teacher(name)
    student = subquad.convert(model, {0: "softmax", 1: "linear"})
    kept = {number: layer.reduces for number, layer in converted_layers(student).items()}
    assert kept == {0: True, 1: False}
    weights = [dict(layer.named_modules()) for layer in converted_layers(student).values()]
    assert any(isinstance(part, nn.Conv2d) for part in weights[0].values())
    assert not any(isinstance(part, nn.Conv2d) for name, part in weights[1].items() if "inner" not in name)


def test_twins_windows_stay():
    model = teacher("timm Twins-SVT")
    assert list(converted_layers(subquad.convert(model, "linear"))) == [1, 3, 5, 7]
    with pytest.raises(SubquadError, match=r"blocks\.0\.0\.attn sees windows, and stays as it is"):
        subquad.convert(model, "linear", blocks=[0])


def test_a_caformer_has_the_same_gradient_where_its_stages_are_computed_again():
    student = subquad.convert(sharp("timm CAFormer"), "inline")
    gradients = []
    for again in (False, True):
        student.set_grad_checkpointing(again)
        student.zero_grad()
        student(images(64, 96)).square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in student.parameters()]))
    assert torch.equal(*gradients)


def segmenter():
    transformers = pytest.importorskip("transformers")
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]}
    model = transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=3)
    )
    return model.eval()


def test_a_segmenter_is_converted_below_its_decoder():
    student = subquad.convert(segmenter(), "pola")
    assert len(converted_layers(student)) == 4
    with torch.no_grad():
        logits = student(images(96, 160)).logits
    assert logits.shape == (2, 3, 24, 40)
    assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pvt_v2_b0", "caformer_s18"])
def test_timms_own_are_opened_for_images_of_a_size_that_they_are_not_told(name, tmp_path):
    trained = timm.create_model(name, num_classes=3)
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    opened = open_trained(f"timm/{name}={tmp_path / 'trained.safetensors'}", img_size=(64, 96))
    assert opened.input.img_size == (64, 96)
    # as long as timm takes and ignores them, in 1.0.26, it is told more
    creation = {key: value for key, value in opened.made["note"]["creation"].items() if key != "task"}
    assert creation["num_classes"] == 3
    again = make_timm(name, **creation).eval()
    again.load_state_dict(trained.state_dict())
    expected = answer(trained.eval(), images(64, 96))
    assert torch.equal(answer(opened.model, images(64, 96)), expected)
    assert torch.equal(answer(again, images(64, 96)), expected)
    assert expected.shape == (2, 3)
    assert type(maker_of(f"timm/{name}")((64, 96))) is type(trained)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_a_segmenter_is_written_for_images_of_any_size(attention, tmp_path):
    student = Answer(subquad.convert(segmenter(), attention))
    written = subquad.export(student, tmp_path / "n.pt2", format="pt2", img_size=64, dynamic="batch,size")
    # two places of the coarsest map, which lie 32 px apart
    assert written.least == 33


@pytest.mark.parametrize("name", ["timm CAFormer", "timm PVTv2", "transformers SegFormer"])
def test_it_learns_from_its_teacher(name):
    model = sharp(name)
    student = subquad.convert(model, "inline")
    aligned = align(student, images(number=8), teacher=model, updates=10, batch_size=4)
    assert sum(aligned.after.values()) < sum(aligned.before.values())


@pytest.mark.parametrize("name", [name for name in PYRAMIDS if name.startswith("transformers")])
def test_maps_of_attention_are_refused_however_a_layer_is_asked_for_them(name):
    student = subquad.convert(teacher(name), "linear")
    network = next(part for part in student.modules() if hasattr(part, "config"))
    with pytest.raises(SubquadError, match="a converted layer forms no attention maps"):
        network(images(64, 64), output_attentions=True)
