import re

import pytest
import torch
from hosts import small
from timm.loss import LabelSmoothingCrossEntropy

from subquad.errors import SubquadError
from subquad.models import HOSTS, create_model
from subquad.optimizers import OPTIMIZERS, optimizer_of
from subquad.tasks import load_recipe
from subquad.tasks.classification import Recipe
from subquad.tasks.classification.mixed_loss import Objective
from subquad.training.optim import learning_rates, make_optimizer, make_scheduler


def model():
    return create_model("deit_tiny", img_size=8, patch_size=4, embed_dim=16, depths=(2,), num_heads=2, num_classes=3)


def test_learning_rates_of_the_papers_scale_with_the_batch():
    rates = learning_rates(load_recipe("deit", Recipe), 1024)
    assert (rates.warmup, rates.peak, rates.end) == pytest.approx((1e-6, 1e-3, 1e-5))


def test_the_ends_of_soft_do_not_scale():
    rates = learning_rates(load_recipe("soft", Recipe), 2048)
    assert (rates.warmup, rates.peak, rates.end) == pytest.approx((1e-6, 2e-3, 5e-5))


def test_a_learning_rate_that_is_given_is_taken():
    assert learning_rates(load_recipe("deit", Recipe).replace(lr=3e-4), 4096).peak == 3e-4


def test_the_schedule_warms_up_falls_and_cools_down():
    recipe = Recipe(epochs=4, warmup_epochs=1, cooldown_epochs=1, lr=1.0, warmup_lr=0.1, min_lr=0.01)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, epochs = make_scheduler(recipe, optimizer, learning_rates(recipe, 1), updates_per_epoch=10)
    rates = [optimizer.param_groups[0]["lr"]]
    for update in range(1, 50):
        scheduler.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    assert epochs == 5
    assert rates[0] == 0.1
    # the cosine has begun below the warm-up, as the papers do it
    assert max(rates) == rates[9] == pytest.approx(0.91)
    assert rates[10] == pytest.approx(0.855, abs=1e-3)
    assert rates[40:] == pytest.approx([0.01] * 10)


def test_biases_norms_and_positions_are_not_decayed():
    groups = make_optimizer(Recipe(weight_decay=0.1), model(), 1e-3).param_groups
    decayed = [p for group in groups if group["weight_decay"] for p in group["params"]]
    net = model()
    plain = sum(p.ndim > 1 and name not in net.no_weight_decay() for name, p in net.named_parameters())
    assert len(decayed) == plain


def test_adam_adds_its_decay_to_the_gradient():
    optimizer = make_optimizer(load_recipe("cifar10", Recipe), model(), 3e-4)
    assert type(optimizer) is torch.optim.Adam
    assert not optimizer.defaults.get("decoupled_weight_decay", False)


def test_what_the_optimizer_is_told_is_what_the_recipe_says():
    adam = make_optimizer(Recipe(opt_betas=(0.8, 0.7), opt_eps=1e-3, weight_decay=0.1), model(), 1e-3)
    assert {(group["betas"], group["eps"]) for group in adam.param_groups} == {((0.8, 0.7), 1e-3)}
    assert {group["weight_decay"] for group in adam.param_groups} == {0.0, 0.1}
    sgd = make_optimizer(Recipe(opt="momentum", momentum=0.3), model(), 1e-3)
    assert {group["momentum"] for group in sgd.param_groups} == {0.3}


def test_ends_that_scale_stay_where_they_are_beside_a_rate_that_is_given():
    recipe = Recipe(lr_scale_ends=True, warmup_lr=1e-6, min_lr=1e-5)
    scaled, given = learning_rates(recipe, 1024), learning_rates(recipe.replace(lr=1e-3), 1024)
    assert (scaled.warmup, scaled.end) == pytest.approx((2e-6, 2e-5))
    assert (given.warmup, given.end) == (1e-6, 1e-5)


@pytest.mark.parametrize("host", HOSTS)
def test_layer_decay_rises_from_the_image_to_the_head_in_every_host(host):
    network = small(host)
    rates = {
        id(parameter): group["lr_scale"]
        for group in make_optimizer(Recipe(layer_decay=0.5), network, 1.0).param_groups
        for parameter in group["params"]
    }
    named = {name: rates[id(parameter)] for name, parameter in network.named_parameters()}
    places = {}
    for name, rate in named.items():
        if found := re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", name):
            places.setdefault((int(found[1]), int(found[2])), set()).add(rate)
    in_order = [places[place] for place in sorted(places)]
    # one rate a block, half of that of the next one
    assert all(len(found) == 1 for found in in_order)
    flat = [next(iter(found)) for found in in_order]
    assert flat == pytest.approx([flat[-1] * 0.5**k for k in reversed(range(len(flat)))])
    assert named["head.weight"] == 1 >= flat[-1]
    first = [rate for name, rate in named.items() if name.startswith("stages.0.embed")]
    assert first and max(first) <= flat[0]
    for name, rate in named.items():
        # what leads from stage to stage learns as the first block behind it does
        if found := re.match(r"stages\.([1-9])\.(?:embed|pos_embed|prefix_tokens)", name):
            assert {rate} == places[int(found[1]), 0]
    # timm counts the last norm to the last block
    assert {rate for name, rate in named.items() if name.startswith("norm.")} <= {flat[-1]}


def test_layer_decay_slows_the_lower_layers_down():
    groups = make_optimizer(Recipe(layer_decay=0.5), model(), 1.0).param_groups
    assert {group["lr_scale"] for group in groups} == {1.0, 0.5, 0.25, 0.125}


def test_an_unknown_optimizer_suggests_the_nearest():
    with pytest.raises(SubquadError, match="unknown opt 'adamv': did you mean adam "):
        make_optimizer(Recipe(opt="adamv"), model(), 1e-3)


def test_mixed_targets_are_distributions():
    objective = Objective(Recipe(mixup=0.8, cutmix=1.0, smoothing=0.1), 3)
    images, target = objective.mix(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    assert images.shape == (4, 3, 8, 8)
    torch.testing.assert_close(target.sum(1), torch.ones(4))


@pytest.mark.parametrize(("field", "blended"), [("mixup", True), ("cutmix", False)])
def test_mixup_blends_pixels_and_cutmix_takes_them_from_either_image(field, blended):
    black_and_white = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)])
    found = {
        value
        for _ in range(8)
        for value in Objective(Recipe(**{field: 1.0}), 2)
        .mix(black_and_white, torch.tensor([0, 1]))[0]
        .unique()
        .tolist()
    }
    assert any(0 < value < 1 for value in found) == blended


def test_mixing_is_as_frequent_and_as_smooth_as_asked_for():
    images, labels = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    mixed, target = Objective(Recipe(mixup=1.0, mixup_prob=0.0, smoothing=0.3), 3).mix(images.clone(), labels)
    assert torch.equal(mixed, images)
    torch.testing.assert_close(target[0], torch.tensor([0.8, 0.1, 0.1]))


def test_a_loss_of_half_precision_is_computed_in_fp32():
    objective, logits, labels = Objective(Recipe(), 3), torch.randn(4, 3).bfloat16(), torch.tensor([0, 1, 2, 0])
    loss = objective.loss(logits, labels)
    assert loss.dtype == torch.float32 and torch.equal(loss, objective.loss(logits.float(), labels))


def test_a_batch_with_a_gap_is_mixed_without_the_odd_image():
    images, _ = Objective(Recipe(mixup=0.8), 3).mix(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2]))
    assert len(images) == 2


def test_without_mixing_the_labels_are_smoothed():
    objective, logits, labels = Objective(Recipe(smoothing=0.2), 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    target = objective.mix(torch.rand(4, 3, 8, 8), labels)[1]
    torch.testing.assert_close(objective.loss(logits, target), LabelSmoothingCrossEntropy(0.2)(logits, labels))


@pytest.mark.filterwarnings("ignore:It is highly recommended")
@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_no_optimizer_draws_from_the_numbers_of_dropout(opt):
    """Which are others in each process: copies of a network would drift apart."""
    weights = []
    for numbers in (0, 1):
        torch.manual_seed(7)
        layer = torch.nn.Linear(4, 4)
        try:
            optimizer = optimizer_of(layer, opt, lr=1e-2)
        except SubquadError as missing:
            # of bitsandbytes and APEX, which this machine can't have
            assert "CUDA required" in str(missing)
            pytest.skip(str(missing))
        torch.manual_seed(numbers)
        # kron compiles its steps
        with torch.compiler.set_stance("force_eager"):
            for _ in range(3):
                optimizer.zero_grad()
                layer(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)
