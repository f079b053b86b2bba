"""What blocks share where it is asked for: matchings that are used again, and merges that serve the MLP too."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny

from subquad import SubquadError
from subquad.diffusion import apply_agent_attention, apply_token_merging, processor


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


@pytest.fixture
def matched(monkeypatch):
    """The number of tokens of each matching that is made."""
    made = []

    def match(tokens, *rest):
        made.append(tokens.shape[1])
        return original(tokens, *rest)

    original = processor.match
    monkeypatch.setattr(processor, "match", match)
    return made


# the levels of 6 steps are 831, 665, 499, 333, 167 and 1: the first two have cells of another size
@pytest.mark.parametrize(("reuse", "matchings"), [(0, 6 * 3), (1, 6), (2, 3), (3, 3), (100, 2)])
def test_a_matching_holds_for_the_steps_that_are_asked_for(pipe, matched, reuse, matchings):
    with apply_agent_attention(pipe, reuse=reuse) as handle:
        assert len(handle.processors) == 3
        first = tiny.latents(pipe, steps=6)
        assert len(matched) == matchings
        # and never for another image
        assert torch.equal(tiny.latents(pipe, steps=6), first) and len(matched) == 2 * matchings


def test_matchings_of_other_sizes_are_their_own(pipe, matched):
    with apply_agent_attention(pipe, reuse=1):
        tiny.latents(pipe, 32, 24, steps=2)
        tiny.latents(pipe, 48, 24, steps=2)
    assert matched == [16 * 12] * 2 + [24 * 12] * 2


def test_matchings_of_two_levels_of_one_network_are_their_own(pipe, matched):
    with apply_token_merging(pipe, reuse=1, max_downsample=2) as handle:
        tiny.latents(pipe, 32, 24, steps=2)
        assert {processor.grid.shape for processor in handle.processors.values()} == {(16, 12), (8, 6)}
    assert sorted(matched) == [8 * 6] * 2 + [16 * 12] * 2


def test_calls_of_one_step_share_what_is_drawn(pipe):
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    with apply_agent_attention(pipe.unet, random=True), torch.no_grad():
        first, again = (pipe.unet(x, 900, text).sample for _ in range(2))
        later = pipe.unet(x, 899, text).sample
        same_level = pipe.unet(x, 900, text).sample
    assert torch.equal(first, again)
    assert not torch.equal(same_level, first) and (later - first).abs().max() > 1e-4


def test_the_mlp_runs_on_the_merged_tokens(pipe):
    before, rows = tiny.latents(pipe), []
    feed = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].ff
    with apply_agent_attention(pipe, ratio=0.4):
        attention_only = tiny.latents(pipe)
    counting = feed.net[0].register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    with apply_agent_attention(pipe, ratio=0.4, merge_mlp=True):
        both = tiny.latents(pipe)
    counting.remove()
    assert set(rows) == {192 - int(0.4 * 192)}
    assert not torch.equal(both, attention_only) and torch.equal(tiny.latents(pipe), before)
    assert not any(module._forward_hooks for module in pipe.unet.modules())
    with apply_agent_attention(pipe, ratio=0.0, merge_mlp=True):
        assert torch.equal(tiny.latents(pipe), before)


def test_what_does_not_go_together_is_said(pipe):
    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.set_chunk_feed_forward(2, dim=1)
    try:
        with pytest.raises(SubquadError, match=r"merge_mlp does not work in chunks: .* down_blocks\.0\."):
            apply_agent_attention(pipe, merge_mlp=True)
    finally:
        block.set_chunk_feed_forward(None, dim=0)
    with apply_agent_attention(pipe, merge_mlp=True):
        for dim in (0, 1):
            block.set_chunk_feed_forward(1, dim=dim)
            try:
                with pytest.raises(SubquadError, match=r"merge_mlp does not work in chunks: .* disable_forward_chunk"):
                    tiny.latents(pipe)
            finally:
                block.set_chunk_feed_forward(None, dim=0)


@pytest.mark.long
@pytest.mark.slow
def test_what_is_shared_compiles_without_a_break(pipe):
    graphs = []
    compiled = torch.compile(pipe.unet, backend=lambda graph, _: graphs.append(1) or graph, fullgraph=True)
    x, text = torch.randn(1, 4, 16, 12), torch.randn(1, 7, 32)
    with apply_agent_attention(compiled, reuse=2, merge_mlp=True), torch.no_grad():
        found = [compiled(x, torch.tensor(level), text).sample for level in (900, 800, 700, 620)]
    assert len(graphs) == 2, "one that matches and one that is given the matching"
    with apply_agent_attention(pipe.unet, reuse=2, merge_mlp=True), torch.no_grad():
        for level, got in zip((900, 800, 700, 620), found, strict=True):
            torch.testing.assert_close(got, pipe.unet(x, torch.tensor(level), text).sample)
