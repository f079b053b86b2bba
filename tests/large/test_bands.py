"""A network over several processes computes what it does in one: logits, losses, gradients, whatever the bands."""

import copy

import pytest
import torch
from hosts import CLASSES, small
from threads import together

from subquad import ATTENTION
from subquad.attention import traits_of
from subquad.large.bands import band_rows, split_over

SPREADING = sorted(name for name in ATTENTION if traits_of(ATTENTION[name]).spreads)
SPREADING_HOSTS = sorted(kind for kind, host in CLASSES.items() if host.spreads)


def randomised(model):
    """All parameters random and away from zero, in float64, so that each of them counts."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels)


def alone(model, images, labels):
    logits = model(images)
    loss_of(logits, labels).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def in_bands(model, images, labels, heights):
    """The same by processes that hold bands of these heights, or of those that are as equal as may be."""
    copies = [copy.deepcopy(model) for _ in range(heights if isinstance(heights, int) else len(heights))]

    def one(index, exchange):
        mine = split_over(copies[index], exchange)
        if isinstance(heights, int):
            rows = band_rows(mine, images.shape[2])
        else:
            rows = slice(sum(heights[:index]), sum(heights[: index + 1]))
        logits = mine(images[:, :, rows])
        loss_of(logits, labels).backward()
        return logits.detach(), {name: p.grad for name, p in mine.named_parameters()}

    results = together(len(copies), one)
    for logits, _ in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=0)
    grads = {name: sum(grads[name] for _, grads in results) / len(results) for name in results[0][1]}
    return results[0][0], grads


def check_equal(model, images, heights):
    labels = torch.arange(len(images)) % model.num_classes
    logits, grads = alone(copy.deepcopy(model), images, labels)
    their_logits, their_grads = in_bands(model, images, labels, heights)
    torch.testing.assert_close(their_logits, logits, rtol=1e-9, atol=1e-10)
    assert grads.keys() == their_grads.keys()
    # a gradient of nearly zeros is as exact as what cancels in it
    largest = max(grad.abs().max().item() for grad in grads.values())
    for name, grad in grads.items():
        error = (their_grads[name] - grad).abs().max().item()
        assert error <= 1e-10 * max(grad.abs().max().item(), 1e-3 * largest), name


@pytest.mark.parametrize("attention", SPREADING)
def test_every_mechanism_that_spreads_computes_what_one_process_does(attention):
    model = randomised(small("vit", attention, depths=(2,), drop_path_rate=0))
    # five rows of patches in two bands, on a grid that is not that of the tables
    check_equal(model, torch.randn(2, 3, 40, 24, dtype=torch.float64), [24, 16])


@pytest.mark.parametrize("host", SPREADING_HOSTS)
@pytest.mark.parametrize("attention", ["linear", "agent"])
def test_every_host_that_spreads_computes_what_one_process_does(host, attention):
    model = randomised(small(host, attention, drop_path_rate=0))
    check_equal(model, torch.randn(2, 3, 109, 40, dtype=torch.float64), [32, 64, 13])
