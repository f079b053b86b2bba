"""Every backbone gives four normed maps of any image, and dense heads of every kind stand on them."""

import pytest
import torch
from hosts import small

import subquad
from subquad import ATTENTION, SubquadError
from subquad.models import HOSTS, restore, save_weights
from subquad.models.pyramid import Pyramid
from subquad.tasks.classification import Recipe
from subquad.tasks.conventions import CONVENTIONS, pyramid_of
from subquad.tasks.detection.detectors import DETECTORS, Detector, build_detector
from subquad.tasks.segmentation import SEGMENTERS, Segmenter, build_segmenter
from subquad.training.optim import make_optimizer

STRIDES = (4, 8, 16, 32)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("size", [(64, 64), (45, 83)])
def test_maps_of_every_host_stand_at_four_strides(host, size):
    pyramid = Pyramid(small(host, num_classes=0)).eval()
    with torch.no_grad():
        maps = pyramid(torch.randn(2, 3, *size))
    assert [list(m.shape) for m in maps] == [
        [2, c, -(-size[0] // s), -(-size[1] // s)] for c, s in zip(pyramid.channels, STRIDES, strict=True)
    ]
    names = [name for name, _ in pyramid.named_parameters()]
    assert not any("head" in name for name in names)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", ["segmenter", "detector"])
def test_optimizers_treat_a_backbone_under_a_head_as_they_treat_it_alone(host, kind):
    backbone = small(host, num_classes=0)
    if kind == "segmenter":
        made = Segmenter(Pyramid(backbone), head="linear", num_classes=3)
    else:
        made = Detector(
            DETECTORS["retinanet"](Pyramid(backbone, strides=STRIDES[1:]), 64, {"num_classes": 3}), "retinanet"
        )

    def groups(network):
        groups = make_optimizer(Recipe(layer_decay=0.5, weight_decay=0.1), network, 1.0).param_groups
        return {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}

    alone, under, own = groups(backbone), groups(made), {id(parameter) for parameter in backbone.parameters()}
    # alone its last layer has no head above it
    assert {key: (scale / 2, decay) for key, (scale, decay) in alone.items()} == {key: under[key] for key in own}
    assert {scale for key, (scale, _) in under.items() if key not in own} == {1.0}


def test_a_layer_decay_that_would_do_nothing_is_refused():
    with pytest.raises(SubquadError, match=r"layer_decay 0\.5 .* Linear has no group_matcher"):
        make_optimizer(Recipe(layer_decay=0.5), torch.nn.Linear(2, 2), 1.0)


@pytest.mark.parametrize("host", [name for name, host in HOSTS.items() if not host.is_plain])
def test_maps_of_stages_are_normed_each_by_itself(host):
    pyramid = Pyramid(small(host, num_classes=0)).eval()
    with torch.no_grad():
        for image in pyramid(torch.randn(1, 3, 64, 64)):
            torch.testing.assert_close(image.mean(1), torch.zeros_like(image[:, 0]), atol=1e-5, rtol=0)
            assert image.var(1, correction=0).max() < 1.001


@pytest.mark.parametrize("host, normed", [("pvt", False), ("swin", True)])
def test_released_maps_are_normed_where_the_network_norms_its_last(host, normed):
    pyramid = pyramid_of(small(host, num_classes=0), "openmmlab", strides=STRIDES[1:])
    assert len(pyramid.norms) == 3 * normed and not pyramid.filled
    with torch.no_grad():
        for image in pyramid.eval()(torch.randn(1, 3, 64, 64)):
            assert (image.mean(1).abs().max() < 1e-5) == normed


def test_padding_below_and_on_the_right_is_all_that_odd_sizes_change():
    pyramid = Pyramid(small("pvt", num_classes=0)).eval()
    x = torch.zeros(1, 3, 64, 96)
    x[..., :40, :70] = torch.randn(1, 3, 40, 70)
    with torch.no_grad():
        whole, part = pyramid(x), pyramid(x[..., :40, :70])
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(a[..., : b.shape[-2], : b.shape[-1]], b)


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_frozen_stages_are_not_trained_and_stay_in_evaluation(frozen):
    pyramid = Pyramid(small("pvt", num_classes=0, drop_path_rate=0.5), frozen_stages=frozen).train()
    for number, stage in enumerate(pyramid.backbone.stages):
        assert stage.training == (number >= frozen)
        assert all(p.requires_grad == (number >= frozen) for p in stage.parameters())
    sum(m.sum() for m in pyramid(torch.randn(1, 3, 64, 64))).backward()


def test_what_is_no_pyramid_is_said():
    with pytest.raises(SubquadError, match="frozen_stages=5: the backbone has 4"):
        Pyramid(small("pvt", num_classes=0), frozen_stages=5)
    two = subquad.create_model("pvt_tiny", depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), num_classes=0)
    with pytest.raises(SubquadError, match="made of four stages or of one, and this backbone has 2"):
        Pyramid(two)


@pytest.mark.parametrize("conventions", CONVENTIONS)
@pytest.mark.parametrize("head", SEGMENTERS)
def test_logits_stand_at_every_pixel_of_any_size(head, conventions):
    pyramid = pyramid_of(small("pvt", num_classes=0), conventions)
    model = Segmenter(pyramid, head=head, num_classes=4, head_channels=64, conventions=conventions)
    x = torch.randn(2, 3, 47, 70)
    with torch.no_grad():
        trained, judged = model.train()(x), model.eval()(x)
    several = trained if isinstance(trained, tuple) else (trained,)
    assert len(several) == (2 if model.auxiliary is not None else 1)
    assert all(logits.shape == (2, 4, 47, 70) for logits in (*several, judged))


@pytest.mark.parametrize("head", SEGMENTERS)
def test_logits_of_an_odd_size_are_those_of_the_padded_image(head):
    model = Segmenter(Pyramid(small("pvt", num_classes=0)), head=head, num_classes=4, head_channels=64).eval()
    x = torch.zeros(1, 3, 64, 96)
    x[..., :47, :70] = torch.randn(1, 3, 47, 70)
    with torch.no_grad():
        torch.testing.assert_close(model(x[..., :47, :70]), model(x)[..., :47, :70])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
def test_large_oblong_images_run_with_every_mechanism(attention):
    size = (800, 1216)
    # SOFT's landmarks are as many as the size that it is made for needs
    backbone = small("pvt", attention, num_classes=0, img_size=size)
    model = Segmenter(Pyramid(backbone), head="fpn", num_classes=3, head_channels=64).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).isfinite().all()


def test_a_width_that_a_decoder_can_not_have_is_said():
    with pytest.raises(SubquadError, match="head_channels is a multiple of 64, got 32"):
        Segmenter(Pyramid(small("pvt", num_classes=0)), head="fpn", num_classes=3, head_channels=32)


@pytest.mark.parametrize("host, conventions", [("pvt", "own"), ("vit", "own"), ("pvt", "openmmlab")])
def test_a_segmenter_is_restored_from_its_file(host, conventions, tmp_path):
    backbone = small(host, "agent", num_agents=4, num_classes=0).creation
    made = build_segmenter(backbone, head="fpn", num_classes=3, frozen_stages=1, conventions=conventions).eval()
    save_weights(made, tmp_path / "a.safetensors", {"classes": ["a", "b", "c"]})
    again, note = restore(tmp_path / "a.safetensors", "segment", build_segmenter)
    x = torch.randn(1, 3, 40, 56)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), made(x))
    assert note["classes"] == ["a", "b", "c"] and again.pyramid.frozen_stages == 1
    with pytest.raises(SubquadError, match=r"is a classifier \(`subquad eval`, .*, not for `subquad segment`"):
        save_weights(small(host), tmp_path / "b.safetensors")
        restore(tmp_path / "b.safetensors", "segment", build_segmenter)


@pytest.mark.parametrize("host", HOSTS)
def test_a_segmenter_whose_backbone_moved_to_another_size_is_restored_as_it_is(host, tmp_path):
    made = build_segmenter(small(host, img_size=64, num_classes=0).creation, head="linear", num_classes=3).eval()
    for name, table in made.state_dict().items():
        if "bias" in name or "pos_embed" in name:
            torch.nn.init.normal_(table)
    made.pyramid.backbone.set_input_size((64, 96))
    save_weights(made, tmp_path / "moved.safetensors")
    again, _ = restore(tmp_path / "moved.safetensors", "segment", build_segmenter)
    assert again.pyramid.backbone.img_size == (64, 96) and again.creation == made.creation
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), made(x))


def test_a_detector_whose_backbone_moved_to_another_size_says_so():
    backbone = small("pvt", "agent", num_agents=4, num_classes=0).creation
    made = build_detector(backbone, head="retinanet", num_classes=2, head_channels=16)
    made.pyramid.backbone.set_input_size((64, 96))
    assert build_detector(**{name: value for name, value in made.creation.items() if name != "task"}).pyramid
    assert made.creation["backbone"]["img_size"] == [64, 96]


def test_a_backbone_starts_from_a_classifiers_weights(tmp_path):
    classifier = small("pvt", "pola", num_classes=7)
    save_weights(classifier, tmp_path / "best.safetensors")
    arguments = small("pvt", "pola", num_classes=0).creation
    for source in (tmp_path / "best.safetensors", tmp_path):
        made = build_segmenter({**arguments, "checkpoint": str(source)}, head="fpn", num_classes=3)
        theirs, own = classifier.state_dict(), made.pyramid.backbone.state_dict()
        assert own and all(torch.equal(own[name], theirs[name]) for name in own)
        assert "checkpoint" not in made.creation["backbone"]
