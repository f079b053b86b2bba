"""transformers' plain encoders, converted, over some rows of tokens at a time give what they give of the whole."""

import json

import numpy as np
import pytest
import torch
from foreign import FOREIGN, teacher
from mechanisms import refuses

import subquad
from subquad import ATTENTION, SubquadError
from subquad.attention import traits_of
from subquad.large.transformers_hosts import HEADS, NETWORKS
from subquad.positions import MATRICES

transformers = pytest.importorskip("transformers", "5.0")

STREAMED = [name for name, cls in ATTENTION.items() if not traits_of(cls).no_streaming and not refuses(name, "prefix")]
ENCODERS = [f"transformers {name}" for name in ("ViT", "DINOv2", "DINOv2 with registers", "DINOv3")]
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IMAGES = {"image_size": 64, "patch_size": 16, "num_labels": 5}


def in_full(model, image):
    more = {"interpolate_pos_encoding": True} if "ViT" in type(model).__name__[:3] else {}
    with torch.no_grad():
        return model(image[None], **more)


def encoder(name):
    model = teacher(name)
    return model.vit if name == "transformers ViT" else model


def assert_same(found, expected, most=1e-5):
    found, expected = torch.as_tensor(found), expected.detach()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= most * expected.abs().max()


# each mechanism in one family, and each family with several
@pytest.mark.parametrize(
    ("name", "attention"), [(ENCODERS[place % len(ENCODERS)], other) for place, other in enumerate(STREAMED)]
)
def test_features_of_rows_at_a_time_are_those_of_the_whole(name, attention, tmp_path):
    model, image = subquad.convert(encoder(name), attention), torch.randn(3, 7 * 16 + 5, 5 * 16 + 3)
    streamed = subquad.stream(model, image, features=tmp_path / "features.npy", most_tokens=10)
    expected = in_full(model, image).last_hidden_state[0, -35:].unflatten(0, (7, 5))
    assert streamed.grid.shape == (7, 5) and not len(streamed.logits)
    assert_same(np.load(tmp_path / "features.npy"), expected)
    subquad.stream(subquad.optimize(model), image, features=tmp_path / "fused.npy", most_tokens=10)
    assert_same(np.load(tmp_path / "fused.npy"), expected, 1e-4)


def test_all_encoders_are_tried():
    assert {type(encoder(name)).__name__ for name in ENCODERS} == {name.rpartition(".")[2] for name in NETWORKS}
    assert set(HEADS) >= {type(teacher("transformers ViT")).__name__}


@pytest.mark.parametrize("name", HEADS)
def test_classifiers_give_what_they_give_of_the_whole(name, tmp_path):
    torch.manual_seed(0)
    config = {"ViTForImageClassification": transformers.ViTConfig}.get(name, transformers.Dinov2Config)
    if "Registers" in name:
        config = transformers.Dinov2WithRegistersConfig
    model = getattr(transformers, name)(config(**SIZES, **IMAGES)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model, image = subquad.convert(model, "linear"), torch.randn(3, 96, 80)
    expected = in_full(model, image).logits[0]
    assert_same(subquad.stream(model, image, most_tokens=10).logits, expected)
    if HEADS[name] == "token":
        streamed = subquad.stream(model, image, labels=tmp_path / "labels.npy", most_tokens=10)
        tokens = in_full(model.vit, image).last_hidden_state
        assert np.array_equal(np.load(tmp_path / "labels.npy").ravel(), model.classifier(tokens)[0, 1:].argmax(-1))
        assert_same(streamed.logits, expected)
    else:
        with pytest.raises(SubquadError, match="reads the first token beside the mean of all places, and none alone"):
            subquad.stream(model, image, labels=tmp_path / "labels.npy")


def test_a_student_of_a_folder_is_streamed(tmp_path):
    torch.manual_seed(0)
    transformers.Dinov2Model(transformers.Dinov2Config(**SIZES, **IMAGES)).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor"}))
    opened = subquad.open_trained(tmp_path)
    model, pixels = subquad.convert(opened.model, "linear"), np.random.default_rng(0).integers(0, 255, (96, 64, 3))
    subquad.stream(model, pixels.astype(np.uint8), features=tmp_path / "features.npy", most_tokens=5)
    normed = (torch.from_numpy(pixels).float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        expected = model(normed.permute(2, 0, 1)[None])[0, 1:]
    assert_same(np.load(tmp_path / "features.npy"), expected.view(6, 4, 48))


def test_what_can_not_be_streamed_says_so(tmp_path):
    names = [name for name in FOREIGN if name.startswith("transformers") and name not in ENCODERS]
    for model in (*map(teacher, names), encoder("transformers ViT")):
        converted = model if model.__class__.__name__ == "ViTModel" else subquad.convert(model, "linear")
        with pytest.raises(SubquadError, match="can't be streamed"):
            subquad.stream(converted, torch.randn(3, 64, 64), features=tmp_path / "features.npy")
    model = subquad.convert(encoder("transformers ViT"), "linear")
    model.embeddings.register_forward_hook(lambda module, given, y: 2 * y)
    with pytest.raises(SubquadError, match="ViTEmbeddings has a hook or a forward of its own"):
        subquad.stream(model, torch.randn(3, 64, 64), features=tmp_path / "features.npy")
    with pytest.raises(SubquadError, match="an image of 8×64 px has no patch of"):
        subquad.stream(subquad.convert(encoder("transformers ViT"), "linear"), torch.randn(3, 8, 64), features="f.npy")


@pytest.mark.parametrize("new", [3, 7, 8, 20])
def test_bicubic_resampling_as_a_matrix_is_that_of_pytorch(new):
    image = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    rows = MATRICES["sharp bicubic"](8, new, image)
    expected = torch.nn.functional.interpolate(image, (new, new), mode="bicubic")
    torch.testing.assert_close(rows @ image @ rows.T, expected)
