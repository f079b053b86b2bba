"""What is no batch of images ends in one line that says what is wanted, in every host, however features are taken."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from hosts import drawn, small
from timm.models import create_feature_extractor

from subquad import SubquadError
from subquad.models import HOSTS


def nested(*images):
    with warnings.catch_warnings():
        # that this is a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(list(images))


WRONG = {
    "no batch axis": (torch.zeros(3, 64, 64), r"got \(3, 64, 64\): x\[None\] makes a batch"),
    "one channel": (
        torch.zeros(1, 1, 64, 64),
        r"\(b, 3, height, width\), got \(1, 1, 64, 64\): make it with in_chans=1",
    ),
    "channels last": (torch.zeros(1, 64, 64, 3), "channels stand in front of height and width"),
    "bytes": (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "of uint8: make them float"),
    "no pixels": (torch.zeros(1, 3, 64, 0), r"got \(1, 3, 64, 0\): they have no pixels"),
    "an array": (torch.zeros(1, 3, 64, 64).numpy(), "as a tensor .*, got ndarray"),
    "nested": (nested(torch.zeros(3, 64, 64), torch.zeros(3, 64, 32)), "nested one: stack images"),
    "ragged": (
        torch.nested.nested_tensor([torch.zeros(3, 64, 64)] * 2, layout=torch.jagged),
        "nested one: stack images",
    ),
    "sparse": (torch.zeros(1, 3, 64, 64).to_sparse(), r"sparse_coo: x\.to_dense\(\)"),
    "of oneDNN": (torch.zeros(1, 3, 64, 64).to_mkldnn(), r"_mkldnn: x\.to_dense\(\)"),
    "a vector": (torch.zeros(12), r"got \(12,\)"),
}
WAYS = {
    "logits": lambda model, x: model(x),
    "features": lambda model, x: model.forward_features(x),
    "maps": lambda model, x: model.forward_intermediates(x),
}


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_no_batch_of_images_is_refused_in_one_line(host):
    model = small(host).eval()
    for x, complaint in WRONG.values():
        for call in WAYS.values():
            with pytest.raises(SubquadError, match=complaint) as caught:
                call(model, x)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", HOSTS)
def test_levels_that_are_not_there_are_refused_in_one_line(host):
    model, x = small(host).eval(), torch.zeros(1, 3, 64, 64)
    count = len(model.feature_info)
    for indices in (0, count + 1, "a", 0.5, [count], [-count - 1], ["a"]):
        for call in (model.forward_intermediates, lambda _, indices: model.prune_intermediate_layers(indices)):
            with pytest.raises(SubquadError, match=rf"^indices is .*1 to {count}, or .*, -{count} to {count - 1}, got"):
                call(x, indices=indices)
    assert len(model.forward_intermediates(x, indices=[-count, count - 1])[1]) == 2


@pytest.mark.parametrize("host", HOSTS)
def test_torch_fx_is_told_what_can_trace(host):
    with pytest.raises(SubquadError, match=r"timm\.models\.create_feature_extractor"):
        torch.fx.symbolic_trace(small(host))


@pytest.mark.filterwarnings("ignore:NOTE. The nodes obtained")  # LaViT keeps its scores in training
@pytest.mark.parametrize("host", HOSTS)
def test_what_torch_fx_is_told_traces_every_host(host):
    model, x = drawn(small(host)), torch.randn(2, 3, 64, 64)
    extracted = create_feature_extractor(model, [f"stages.{len(model.stages) - 1}", "head"]).eval()(x)
    (tokens, grid, *_), logits = extracted.values()
    assert tokens.shape == (2, grid.num_tokens, model.feature_info[-1]["num_chs"])
    assert torch.equal(logits, model(x))
