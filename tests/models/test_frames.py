"""Frames of one scene as one sequence: attention sees all of them, and one frame is what an image was."""

import copy
import pickle

import pytest
import torch
from hosts import SMALL, small
from timm.models import create_feature_extractor
from timm.models._manipulate import group_parameters

import subquad
from subquad import ATTENTION, SubquadError
from subquad.models.vit import ViT

PLAIN = [kind for kind in SMALL if type(small(kind)) is ViT]


def scenes(frames=3, number=2, height=24, width=40):
    return torch.randn(number, frames, 3, height, width)


def features_of_frames(model, x):
    """(b, f, n, c) of the map."""
    features = model.forward_features(x)
    tokens = features[:, model.prefix :] if features.dim() == 3 else features.flatten(1, 2)
    return tokens.unflatten(1, (x.shape[1], -1))


@pytest.mark.parametrize("host", PLAIN)
def test_one_frame_is_what_an_image_was(host):
    model = small(host, "linear").eval()
    x = scenes(1)
    with torch.no_grad():
        expected = model(x[:, 0])
        framed = subquad.join_frames(copy.deepcopy(model), 4)
        torch.testing.assert_close(framed(x), expected)
    assert set(framed.state_dict()) - set(model.state_dict()) == {"stages.0.frame_embed"}


@pytest.mark.parametrize("attention", ATTENTION)
def test_attention_sees_all_frames(attention):
    model = subquad.join_frames(small("vit", attention)).eval()
    x = scenes(3, 1).requires_grad_()
    for frame in range(3):
        (seen,) = torch.autograd.grad(features_of_frames(model, x)[:, frame].square().sum(), x)
        assert (seen.abs().amax(dim=(0, 2, 3, 4)) > 0).all()


@pytest.mark.parametrize("host", [kind for kind in PLAIN if small(kind).blocks[0].cpe is None])
def test_frames_have_the_same_positions_until_their_numbers_say_more(host):
    """Linear attention knows no order of keys: frames in another order have the same features in that order."""
    model = subquad.join_frames(small(host, "linear:local=false")).eval()
    x, order = scenes(), [2, 0, 1]
    with torch.no_grad():
        there, here = features_of_frames(model, x[:, order]), features_of_frames(model, x)[:, order]
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
        torch.nn.init.normal_(model.stages[0].frame_embed)
        assert not torch.allclose(features_of_frames(model, x[:, order]), features_of_frames(model, x)[:, order])


def test_blocks_in_chunks_and_computed_again_take_frames():
    model = subquad.join_frames(small("dinov3", "mlla")).train()
    chunked = subquad.chunk_blocks(copy.deepcopy(model), 20)
    chunked.set_grad_checkpointing()
    for network in (model, chunked):
        network(scenes(number=1).fill_(0.3)).square().sum().backward()
    for (name, one), other in zip(chunked.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_mistakes_are_one_line():
    model = subquad.join_frames(small("vit", "linear"), 2)
    for words, call in (
        ("1 to 2 frames", lambda: model(scenes(3))),
        (r"x\[:, None\]", lambda: model(scenes()[:, 0])),
        ("takes images", lambda: model(torch.zeros(1, 1, 4, 8, 8))),
        ("1 to 2 frames .* as a tensor, got list", lambda: model([scenes(2)])),
        (r"1 to 2 frames .* as a tensor, got .* x\.to_dense", lambda: model(scenes(2).to_sparse())),
        ("no pixels", lambda: model(scenes(2, height=0))),
        (r"images\.to\(torch\.bfloat16", lambda: subquad.optimize(copy.deepcopy(model), torch.bfloat16)(scenes(2))),
        (r"timm\.models\.create_feature_extractor", lambda: torch.fx.symbolic_trace(model)),
        ("takes frames already", lambda: subquad.join_frames(model)),
        ("can't take frames", lambda: subquad.join_frames(small("pvt", "linear"))),
        ("stream them one by one", lambda: subquad.stream(model, torch.zeros(3, 64, 64))),
    ):
        with pytest.raises(SubquadError, match=words) as refusal:
            call()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("host", PLAIN)
def test_numbers_of_frames_are_positions_to_those_who_train_and_trace(host):
    model = subquad.join_frames(small(host, "linear"), 4).eval()
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups["stages.0.frame_embed"] == groups["stages.0.embed.proj.weight"] == min(groups.values())
    assert "stages.0.frame_embed" in model.no_weight_decay() > small(host, "linear").no_weight_decay()
    x = scenes()
    assert torch.equal(create_feature_extractor(model, ["head"])(x)["head"], model(x))


def test_networks_of_frames_and_of_chunks_are_pickled_and_copied():
    torch.manual_seed(0)
    for change, x in (
        (lambda model: subquad.join_frames(model, 3), torch.randn(2, 2, 3, 64, 64)),
        (lambda model: subquad.chunk_mlps(subquad.chunk_mlps(model, 99), 16), torch.randn(2, 3, 64, 64)),
    ):
        model = change(small("vit", "linear").eval())
        for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert torch.equal(again(x), model(x)) and type(again).__name__ == type(model).__name__
            kinds = [
                [base.__name__ for module in one.modules() for base in type(module).mro()] for one in (again, model)
            ]
            assert kinds[0] == kinds[1]
