import pytest
import torch
from timm.loss import LabelSmoothingCrossEntropy

from subquad.errors import SubquadError
from subquad.models import create_model
from subquad.training import Recipe, load_recipe
from subquad.training.optim import Objective, learning_rates, make_optimizer, make_scheduler


def model():
    return create_model("deit_tiny", img_size=8, patch_size=4, embed_dim=16, depths=(2,), num_heads=2, num_classes=3)


def test_learning_rates_of_the_papers_scale_with_the_batch():
    rates = learning_rates(load_recipe("deit"), 1024)
    assert (rates.warmup, rates.peak, rates.end) == pytest.approx((1e-6, 1e-3, 1e-5))


def test_the_ends_of_soft_do_not_scale():
    rates = learning_rates(load_recipe("soft"), 2048)
    assert (rates.warmup, rates.peak, rates.end) == pytest.approx((1e-6, 2e-3, 5e-5))


def test_a_learning_rate_that_is_given_is_taken():
    assert learning_rates(load_recipe("deit").replace(lr=3e-4), 4096).peak == 3e-4


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
    optimizer = make_optimizer(load_recipe("cifar10"), model(), 3e-4)
    assert type(optimizer) is torch.optim.Adam
    assert not optimizer.defaults.get("decoupled_weight_decay", False)


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


def test_a_batch_with_a_gap_is_mixed_without_the_odd_image():
    images, _ = Objective(Recipe(mixup=0.8), 3).mix(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2]))
    assert len(images) == 2


def test_without_mixing_the_labels_are_smoothed():
    objective, logits, labels = Objective(Recipe(smoothing=0.2), 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    target = objective.mix(torch.rand(4, 3, 8, 8), labels)[1]
    torch.testing.assert_close(objective.loss(logits, target), LabelSmoothingCrossEntropy(0.2)(logits, labels))
