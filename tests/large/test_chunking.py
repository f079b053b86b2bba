"""MLPs and whole blocks in chunks compute what they do whole, and hold less."""

import copy
import pickle

import pytest
import torch
from hosts import CLASSES, drawn, paired, small

import subquad
from subquad import ATTENTION
from subquad.attention import traits_of
from subquad.benchmarks.memory import peak_memory_mb
from subquad.errors import SubquadError
from subquad.large import chunk_blocks, chunk_mlps

STREAMED = [name for name, cls in ATTENTION.items() if not traits_of(cls).no_streaming]
SPREAD = [kind for kind, cls in CLASSES.items() if cls.spreads]


@pytest.mark.parametrize("host", ["vit", "pvt", "eva02"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_chunks_compute_what_the_whole_does(host, checkpointed):
    model = small(host, "linear", drop_path_rate=0).train()
    chunked = chunk_mlps(chunk_mlps(copy.deepcopy(model), 1000), 7)
    chunked.set_grad_checkpointing(checkpointed)
    assert chunked.state_dict().keys() == model.state_dict().keys()
    images = torch.randn(2, 3, 72, 40)
    torch.testing.assert_close(chunked(images), model(images))
    for network in (model, chunked):
        network(images).square().sum().backward()
    for (name, chunk), whole in zip(chunked.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(chunk.grad, whole.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_chunks_hold_less_in_a_step():
    def peak(model):
        model.set_grad_checkpointing()
        images = torch.empty(1, 3, 1024, 1024, device="meta")
        return peak_memory_mb(lambda: model(images).sum().backward(), torch.device("meta"))

    with torch.device("meta"):
        model = small("vit", "linear", drop_path_rate=0).train()
    whole = peak(model)
    assert peak(chunk_mlps(model, 1024)) < 0.7 * whole


def test_networks_without_such_mlps_say_so():
    with pytest.raises(SubquadError, match="has no MLP that looks at one token"):
        chunk_mlps(small("pvt_v2", "linear"))
    with pytest.raises(SubquadError, match="at least one token"):
        chunk_mlps(small("vit", "linear"), 0)


def assert_same_step(model, chunked, images, **tolerances):
    """Logits and gradients, of the same draws."""
    for network in (model, chunked):
        torch.manual_seed(1)
        logits = network(images)
        logits.square().sum().backward()
        network.logits = logits.detach()
    torch.testing.assert_close(chunked.logits, model.logits, **tolerances)
    for (name, chunk), whole in zip(chunked.named_parameters(), model.parameters(), strict=True):
        assert (chunk.grad is None) == (whole.grad is None)
        if chunk.grad is not None:
            torch.testing.assert_close(chunk.grad, whole.grad, msg=name, **tolerances)


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("host", "attention"), paired(SPREAD, STREAMED))
def test_blocks_in_chunks_compute_what_the_whole_does(host, attention):
    # SOFT's stochastic depth is of elements
    rate = 0 if host == "softnet" else 0.3
    model = small(host, attention, drop_path_rate=rate).train().double()
    chunked = chunk_blocks(chunk_blocks(copy.deepcopy(model), 1000), 24)
    assert chunked.state_dict().keys() == model.state_dict().keys()
    assert_same_step(model, chunked, torch.randn(2, 3, 64, 24).double(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("attention", STREAMED)
def test_in_fp32_and_copied_they_compute_the_same_but_for_roundings(attention):
    model = small("vit", attention, drop_path_rate=0).train()
    chunked = pickle.loads(pickle.dumps(copy.deepcopy(chunk_blocks(copy.deepcopy(model), 20))))
    chunked.set_grad_checkpointing()
    assert_same_step(model, chunked, torch.randn(2, 3, 72, 40), rtol=1e-3, atol=1e-4)


AGAIN = {
    "checkpointing": lambda model: model.set_grad_checkpointing(),
    "MLPs": lambda model: chunk_mlps(model, 7),
    "blocks": lambda model: chunk_blocks(model, 20),
}
"""What lets a network compute something again in the backward pass."""


@pytest.mark.parametrize(
    ("host", "how"), [*(("vit", how) for how in AGAIN), ("pvt_v2", "blocks"), ("lavit", "checkpointing")]
)
def test_parameters_that_a_call_is_handed_are_those_of_its_gradients(host, how):
    """`functional_call` has taken them away again when the backward pass computes what was not kept."""
    model = drawn(small(host, "linear", drop_path_rate=0, drop_rate=0)).train().double()
    again = copy.deepcopy(model)
    AGAIN[how](again)
    images, grads = torch.randn(1, 3, 64, 64).double(), []
    for network in (model, again):
        given = {name: (1.5 * x).detach().requires_grad_() for name, x in model.named_parameters()}
        loss = torch.func.functional_call(network, given, (images,)).square().mean()
        own = [*network.parameters()]
        # a second backward pass through what was computed again once
        torch.autograd.grad(loss, list(given.values()), allow_unused=True, retain_graph=True)
        grads.append(torch.autograd.grad(loss, list(given.values()), allow_unused=True))
        assert all(one is other for one, other in zip(own, network.parameters(), strict=True))
    for got, wanted in zip(*grads[::-1], strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_blocks_in_chunks_hold_less_than_blocks_computed_again():
    def peak(model):
        images = torch.empty(1, 3, 320, 320, device="meta")
        return peak_memory_mb(lambda: model(images).sum().backward(), torch.device("meta"))

    def made():
        with torch.device("meta"):
            return small("vit", "linear", drop_path_rate=0, cpe=True, local=True).train()

    again = made()
    again.set_grad_checkpointing()
    assert peak(chunk_blocks(made(), 200)) < 0.8 * peak(chunk_mlps(again, 200))


def test_without_gradients_they_compute_the_same():
    model = small("mavit", "inline").eval()
    chunked = chunk_blocks(copy.deepcopy(model), 20)
    images = torch.randn(2, 3, 72, 40)
    with torch.no_grad():
        torch.testing.assert_close(chunked(images), model(images))


def test_a_forward_of_ones_own_is_not_left_out():
    model = small("vit", "linear")
    block = model.stages[0].blocks[0]
    block.forward = lambda x, before=block.forward, **given: 2 * before(x, **given)
    with pytest.raises(SubquadError, match="has a forward of its own, which chunks leave out"):
        chunk_blocks(model, 5)


def test_networks_whose_blocks_cant_say_so():
    for model, words in (
        (small("vit", "softmax"), "softmax attention can't be streamed"),
        (small("swin", "linear"), "subquad.chunk_mlps is for others"),
        (torch.nn.Linear(2, 2), "has no blocks that could"),
    ):
        with pytest.raises(SubquadError, match=words):
            chunk_blocks(model)
    with pytest.raises(SubquadError, match="at least one token"):
        chunk_blocks(small("vit", "linear"), 0)
    model = small("vit", "linear")
    model.stages[0].blocks[0].norm2 = torch.nn.BatchNorm1d(24)
    with pytest.raises(SubquadError, match="has to see all rows"):
        chunk_blocks(model)
    assert subquad.chunk_blocks is chunk_blocks
