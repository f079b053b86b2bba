"""MLPs in chunks compute what they do whole, and hold less."""

import copy

import pytest
import torch
from hosts import small

from subquad.benchmarks.memory import peak_memory_mb
from subquad.errors import SubquadError
from subquad.large import chunk_mlps


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
