"""Matching, merging and attention on merged tokens are those of the released code, and hold what they promise."""

import json
from pathlib import Path

import pytest
import torch
from made_weights import make_input, make_state_dict
from torch.testing import assert_close

from subquad import SubquadError, TokenGrid
from subquad.diffusion.processor import merged_agent_attention
from subquad.ops import merging
from subquad.ops.merging import match

GOLDEN = Path(__file__).parents[1] / "golden"
MATCHING = json.loads((GOLDEN / "agentsd_matching.json").read_text())["cases"]
ATTENTION = json.loads((GOLDEN / "agentsd_attention.json").read_text())["cases"]


def agree(tensor, golden):
    """As recorded: shape, moments, and numbers at some places."""
    assert list(tensor.shape) == golden["shape"]
    values = torch.tensor(golden["value"], dtype=torch.float64)
    assert_close(tensor.flatten()[torch.tensor(golden["index"])], values, rtol=2e-8, atol=1e-8)
    assert tensor.mean().item() == pytest.approx(golden["mean"], abs=1e-8)


def owners_of(merge, matching):
    """By token the place of its group's destination, or its own where nothing was merged."""
    owner = torch.arange(matching.num_tokens).repeat(len(merge.groups), 1)
    kept = merge.count - len(matching.destinations)
    inside = merge.groups >= kept
    owner[inside] = matching.destinations[(merge.groups - kept)[inside]]
    return owner


def by_owner(merge, matching, x):
    """The groups' means in increasing order of their owners."""
    owner = owners_of(merge, matching)
    means = merge.merge(x)
    return torch.stack([means[b, [merge.groups[b, n] for n in owner[b].unique()]] for b in range(len(x))])


@pytest.mark.parametrize("case", MATCHING, ids=lambda case: "{h}x{w} cells {sy}x{sx} r {r}".format(**case["settings"]))
def test_matching_and_merging_are_those_of_the_release(case):
    given = case["settings"]
    grid = TokenGrid(given["h"], given["w"])
    x = make_input((given["batch"], grid.num_places, given["dim"]), name="tokens")
    matching = match(x, grid, (given["sy"], given["sx"]))
    assert matching.destinations.tolist() == case["dst"]
    cuts = {"feature": given["r"], "agent": given["agent_r"]}
    for name, count in cuts.items():
        if case[f"{name}_owner"] is None:
            continue
        merge = matching.cut(count)
        assert merge.count == case[f"{name}_tokens"]
        assert owners_of(merge, matching).tolist() == case[f"{name}_owner"]
        agree(by_owner(merge, matching, x), case["outputs"][f"{name}_by_owner"])
    merge = matching.cut(given["r"])
    agree(merge.unmerge(merge.merge(x)), case["outputs"]["unmerge_of_feature"])


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: "{heads} heads {agents} agents".format(**case["settings"]))
def test_attention_is_that_of_the_release(case):
    given, weights = case["settings"], make_state_dict(case["state_dict"])
    x = make_input((2, given["tokens"], given["dim"]), "x")
    agents = make_input((2, given["agents"], given["dim"]), "agent")

    def heads(x, name):
        return (x @ weights[f"{name}.weight"].T).unflatten(2, (given["heads"], -1)).transpose(1, 2)

    def out(y):
        return y.transpose(1, 2).flatten(2) @ weights["to_out.0.weight"].T + weights["to_out.0.bias"]

    q, k, v = (heads(x, name) for name in ("to_q", "to_k", "to_v"))
    plain = out(torch.nn.functional.scaled_dot_product_attention(q, k, v))
    agree(plain, case["outputs"]["softmax_y"])
    if given["agent_used"]:
        settings = q.shape[-1] ** -0.5, given["k_scale2"], given["k_shortcut"]
        agree(out(merged_agent_attention(q, k, v, heads(agents, "to_q"), *settings)), case["outputs"]["y"])
    else:
        agree(plain, case["outputs"]["y"])


def test_a_merge_of_nothing_changes_nothing_and_one_of_all_leaves_the_destinations():
    x = torch.randn(2, 35, 4)
    matching = match(x, TokenGrid(5, 7), (2, 3))
    nothing, all_of_them = matching.cut(0), matching.cut(1000)
    assert nothing.count == 35 and torch.equal(nothing.unmerge(nothing.merge(x)), x)
    assert all_of_them.count == len(matching.destinations) == 4


def test_destinations_may_be_any_token_of_their_cells():
    offsets = torch.tensor([[0, 5], [4, 2]])
    matching = match(torch.randn(1, 35, 4), TokenGrid(5, 7), (2, 3), offsets)
    assert matching.destinations.tolist() == [0, 7 + 5, 14 + 7 + 1, 14 + 3 + 2]
    assert sorted([*matching.sources[0].tolist(), *matching.destinations.tolist()]) == list(range(35))


def test_chunks_do_not_change_the_matching(monkeypatch):
    x = torch.randn(2, 64, 8)
    whole = match(x, TokenGrid(8, 8), (2, 2))
    monkeypatch.setattr(merging, "CHUNK", {"cpu": 100})
    parts = match(x, TokenGrid(8, 8), (2, 2))
    assert torch.equal(whole.sources, parts.sources) and torch.equal(whole.owners, parts.owners)


def test_autocast_does_not_decide_whose_a_token_is():
    torch.manual_seed(0)
    x, grid = torch.randn(2, 256, 32) + 2 * torch.randn(32), TokenGrid(16, 16)
    whole = match(x, grid, (4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        lowered = match(x, grid, (4, 4))
    assert torch.equal(lowered.sources, whole.sources) and torch.equal(lowered.owners, whole.owners)


def test_no_images_are_merged_to_none():
    matching = match(torch.zeros(0, 64, 8), TokenGrid(8, 8), (2, 2))
    merge = matching.cut(20)
    assert merge.unmerge(merge.merge(torch.zeros(0, 64, 8))).shape == (0, 64, 8) and merge.count == 44


def test_a_token_of_zeros_is_alike_to_none():
    x = torch.randn(1, 16, 4)
    x[0, 5] = 0
    matching = match(x, TokenGrid(4, 4), (2, 2))
    assert matching.cut(6).merge(x).isfinite().all()


def test_maps_without_a_cell_are_not_matched_and_what_does_not_fit_is_said():
    assert match(torch.randn(1, 6, 4), TokenGrid(2, 3), (4, 4)) is None
    assert match(torch.randn(1, 6, 4), TokenGrid(2, 3), (1, 1)) is None
    with pytest.raises(SubquadError, match="6 tokens do not stand on a map of 2×2"):
        match(torch.randn(1, 6, 4), TokenGrid(2, 2), (2, 2))
    with pytest.raises(SubquadError, match="at least one row and one column, got 0×2"):
        match(torch.randn(1, 6, 4), TokenGrid(2, 3), (0, 2))
