"""The learning rates of dense recipes are those that they name."""

import pytest
import torch

from subquad import SubquadError
from subquad.tasks.classification import Recipe
from subquad.training.optim import learning_rates, make_optimizer, make_scheduler


def rates_of(updates_per_epoch=10, **fields):
    """The learning rate at each update."""
    recipe = Recipe(opt="adamw", lr=1.0, min_lr=0.0, warmup_epochs=0, **fields)
    rates = learning_rates(recipe, 8)
    optimizer = make_optimizer(recipe, torch.nn.Linear(2, 2), rates.peak)
    scheduler, epochs = make_scheduler(recipe, optimizer, rates, updates_per_epoch)
    found = []
    for update in range(epochs * updates_per_epoch):
        scheduler.step_update(update)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_several_steps_divide_by_ten_at_their_epochs():
    found = rates_of(epochs=12, sched="multistep", decay_epochs=(8, 11))
    assert found[0] == 1 and found[78] == 1
    assert found[82] == pytest.approx(0.1) and found[112] == pytest.approx(0.01)


@pytest.mark.parametrize("updates", [1, 3, 10, 7330])
def test_steps_come_after_the_last_update_of_their_epochs(updates):
    found = rates_of(updates, epochs=5, sched="multistep", decay_epochs=(2, 4))
    expected = [10.0 ** -((t >= 2 * updates) + (t >= 4 * updates)) for t in range(5 * updates)]
    assert found == pytest.approx(expected)


def test_poly_falls_as_its_power_says():
    for power in (0.9, 1.0):
        found = rates_of(epochs=4, sched="poly", sched_power=power)
        assert found == pytest.approx([(1 - t / 40) ** power for t in range(40)])


def test_a_warm_up_may_be_given_in_updates():
    found = rates_of(epochs=4, sched="poly", warmup_updates=5, warmup_lr=0.1)
    assert found[:5] == pytest.approx([0.1, 0.28, 0.46, 0.64, 0.82])
    assert found[5] == pytest.approx(1 - 5 / 40)


def test_a_schedule_may_begin_behind_the_warm_up():
    found = rates_of(epochs=4, sched="poly", warmup_updates=5, warmup_lr=0.1, warmup_prefix=True)
    assert found[:5] == pytest.approx([0.1, 0.28, 0.46, 0.64, 0.82])
    assert found[5:] == pytest.approx([1 - t / 35 for t in range(35)])


def test_steps_and_their_epochs_belong_together():
    for fields in ({"sched": "multistep"}, {"sched": "cosine", "decay_epochs": (1,)}):
        with pytest.raises(SubquadError, match="decay_epochs: give both or neither"):
            Recipe(**fields)


def test_steps_keep_their_epochs_behind_a_warm_up_that_stands_before_the_schedule():
    """They came as much later as it is long, and the last one never."""
    settings = {"epochs": 12, "sched": "multistep", "decay_epochs": (8, 11), "warmup_updates": 10}
    plain, behind = rates_of(**settings), rates_of(**settings, warmup_prefix=True)
    assert behind[10:] == pytest.approx(plain[10:])
    assert behind[79] == 1 and behind[80] == pytest.approx(0.1) and behind[110] == pytest.approx(0.01)
