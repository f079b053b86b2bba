"""Rotary positions: what turns, by how much, and who turns it."""

import math

import pytest
import torch
from mechanisms import without_refused_prefix
from torch import nn

from subquad import ATTENTION, SubquadError, TokenGrid, use_backend
from subquad.models.layers import SelfAttention
from subquad.ops.turning import turned_tokens
from subquad.rope import COORDINATES, ROPES, AxialRope, Rotation, rope_of

CPU = torch.device("cpu")
every_rope = pytest.mark.parametrize("name", ROPES)


def angles_of(rotation):
    """Of each token and pair, (n, d/2) or (h, n, d/2), between -π and π."""
    cos, sin = rotation.cos, rotation.sin
    half = cos.shape[-1] // 2
    pairs = (cos[..., 1::2], sin[..., 1::2]) if rotation.interleaved else (cos[..., half:], sin[..., half:])
    return torch.atan2(pairs[1], pairs[0])


@every_rope
def test_a_pair_of_channels_is_turned_as_a_complex_number(name):
    grid = TokenGrid(3, 5, 2)
    rotation = rope_of(name, 8, 3)(grid, CPU)
    x = torch.randn(2, 3, grid.num_tokens, 8)
    first, second = (x[..., ::2], x[..., 1::2]) if rotation.interleaved else x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.exp(1j * angles_of(rotation))
    parts = turned.real, turned.imag
    expected = torch.stack(parts, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(parts, dim=-1)
    torch.testing.assert_close(rotation.turn(x), expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [(), (3,)], ids=["one table", "a table a head"])
@pytest.mark.parametrize("width", [2, 6, 16, 40, 64])
def test_whoever_turns_tokens_they_are_turned_alike(width, heads, interleaved):
    tokens = torch.randn(2, 70, 5, 3, width)[:, :, 1].transpose(1, 2).requires_grad_()
    rotation = Rotation(*torch.randn(2, *heads, 70, width), interleaved)
    exact = Rotation(rotation.cos.double(), rotation.sin.double(), interleaved).turn(tokens.double())
    turned = turned_tokens(rotation, tokens)
    torch.testing.assert_close(turned, exact.float(), rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(turned)
    found, wanted = (torch.autograd.grad(y, tokens, grad.to(y.dtype)) for y in (turned, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # which a kernel knows nothing of: features of two pieces, tables that learn, and more digits
    twice = torch.cat([tokens, tokens], dim=-1).detach()
    torch.testing.assert_close(turned_tokens(rotation, twice), torch.cat([turned, turned], dim=-1).detach())
    cos = rotation.cos.clone().requires_grad_()
    assert torch.autograd.grad(turned_tokens(rotation._replace(cos=cos), tokens).sum(), cos)[0].any()
    assert turned_tokens(rotation, tokens.double()).dtype == torch.float64


def test_other_numbers_of_tokens_than_a_rotation_has_are_one_line():
    rotation = rope_of("dinov3", 8)(TokenGrid(2, 3), CPU)
    with pytest.raises(SubquadError, match="6 tokens have a rotation, and 7 are to be turned"):
        turned_tokens(rotation, torch.randn(1, 2, 7, 8))


@every_rope
def test_prefix_tokens_do_not_turn_and_none_changes_its_length(name):
    grid, x = TokenGrid(4, 3, 5), torch.randn(1, 2, 17, 12)
    turned = rope_of(name, 12)(grid, CPU).turn(x)
    assert torch.equal(turned[:, :, :5], x[:, :, :5])
    assert not torch.isclose(turned[:, :, 6:], x[:, :, 6:]).all(dim=-1).any()
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@every_rope
def test_products_depend_on_how_far_apart_tokens_stand(name):
    grid = TokenGrid(5, 4)
    q, k = torch.randn(2, 1, 8).expand(2, 20, 8).unbind(0)
    rotation = rope_of(name, 8)(grid, CPU)
    scores = (rotation.turn(q) @ rotation.turn(k).mT).view(5, 4, 5, 4)
    torch.testing.assert_close(scores[1:, 1:, 1:, 1:], scores[:-1, :-1, :-1, :-1], rtol=1e-4, atol=1e-4)
    assert not torch.isclose(scores[0, 0], scores[0, 0, 0, 0], atol=1e-3).flatten()[1:].any()


def test_half_of_the_pairs_turns_with_the_row_and_half_with_the_column():
    rope = AxialRope(8, temperature=100, coordinates="index", interleaved=True)
    angles = angles_of(rope(TokenGrid(3, 4), CPU)).view(3, 4, 4)
    rows, columns = torch.arange(3.0)[:, None, None], torch.arange(4.0)[:, None]
    slower = torch.tensor([1.0, 0.1])
    torch.testing.assert_close(angles[..., :2], (rows * slower).expand(3, 4, 2))
    torch.testing.assert_close(angles[..., 2:], (columns * slower).expand(3, 4, 2))


def test_grids_are_stretched_to_the_reference():
    settings = {"temperature": 100, "coordinates": "index", "interleaved": True}
    same = AxialRope(4, **settings)(TokenGrid(4, 4), CPU)
    stretched = AxialRope(4, **settings, reference=(4, 4))(TokenGrid(8, 2), CPU)
    torch.testing.assert_close(stretched.cos.view(8, 2, 4)[::2], same.cos.view(4, 4, 4)[:, ::2])


@pytest.mark.parametrize(("coordinates", "divisors"), [("separate", (2, 4)), ("min", (2, 2)), ("max", (4, 4))])
def test_places_are_between_minus_one_and_one(coordinates, divisors):
    rope = AxialRope(4, temperature=100, coordinates=coordinates, interleaved=False)
    angles = angles_of(rope(TokenGrid(2, 4), CPU)).view(2, 4, 2)
    for axis, (size, divisor) in enumerate(zip((2, 4), divisors, strict=True)):
        places = 2 * (torch.arange(size) + 0.5) / divisor - 1
        expected = torch.exp(2j * math.pi * places).angle()
        line = angles[:, 0, 0] if axis == 0 else angles[0, :, 1]
        torch.testing.assert_close(torch.exp(1j * line), torch.exp(1j * expected), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_said_in_one_line():
    with pytest.raises(SubquadError, match="heads of a multiple of 4 channels, got 6"):
        rope_of("dinov3", 6)
    with pytest.raises(SubquadError, match="unknown rope 'dinov4': did you mean dinov3"):
        rope_of("dinov4", 8)
    with pytest.raises(SubquadError, match="unknown coordinates 'separat': did you mean separate"):
        AxialRope(8, temperature=1, coordinates="separat", interleaved=True)
    rotation = rope_of("mlla", 8, 2)(TokenGrid(3, 4), CPU)
    for heads in (3, 4):
        with pytest.raises(SubquadError, match=f"a rotation of 2 heads.* can't turn tokens of {heads}:"):
            rotation.turn(torch.zeros(1, heads, 12, 8))
    assert {row["coordinates"] for row in ROPES.values()} <= set(COORDINATES)


class Rotating(nn.Module):
    """Rotates for itself, as its inputs say; keeps what it was given."""

    inputs = ("q", "k", "v", "rotation")

    def __init__(self, dim, num_heads, *, grid, kv_grid):
        super().__init__()

    def forward(self, q, k, v, rotation=None, *, grid, kv_grid):
        self.seen = q, k, rotation
        return v


class Seeing(Rotating):
    """Leaves it to the host."""

    inputs = ("q", "k", "v")

    def forward(self, q, k, v, *, grid, kv_grid):
        return super().forward(q, k, v, grid=grid, kv_grid=kv_grid)


def test_the_host_turns_queries_and_keys_unless_the_mechanism_says_that_it_does():
    grid, x = TokenGrid(2, 3, 1), torch.randn(2, 7, 16)
    rotation = rope_of("eva02", 8)(grid, CPU)
    left, own = (SelfAttention(16, 2, kind, grid=grid) for kind in (Seeing, Rotating))
    own.load_state_dict(left.state_dict())
    with use_backend("eager"):
        for layer in (left, own):
            layer(x, grid=grid, rotation=rotation)
    (q, k, _), (bare_q, bare_k, handed_over) = left.inner.seen, own.inner.seen
    assert handed_over is rotation
    assert torch.equal(q, rotation.turn(bare_q)) and torch.equal(k, rotation.turn(bare_k))
    own(x, grid=grid)
    assert own.inner.seen[2] is None


@pytest.mark.parametrize("name", ATTENTION)
def test_every_mechanism_answers_differently_where_its_queries_turn(name):
    grid = without_refused_prefix(name, TokenGrid(4, 4, 1))
    x = torch.randn(1, grid.num_tokens, 16)
    layer = SelfAttention(16, 2, ATTENTION[name], grid=grid)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    turned = layer(x, grid=grid, rotation=rope_of("dinov3", 8)(grid, CPU))
    assert turned.isfinite().all() and not torch.allclose(turned, layer(x, grid=grid), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_half_precision_are_turned_in_fp32(dtype):
    grid, x = TokenGrid(3, 3), torch.randn(1, 1, 9, 8).to(dtype)
    rotation = rope_of("eva02", 8)(grid, CPU)
    assert torch.equal(rotation.turn(x), rotation.turn(x.float()).to(dtype))


def test_across_heads_the_first_half_of_them_turns_with_rows_and_the_second_with_columns():
    one, several = rope_of("mlla", 16), rope_of("mlla", 4, 4)
    grid = TokenGrid(3, 4)
    angles = angles_of(several(grid, CPU))
    torch.testing.assert_close(angles.transpose(0, 1).flatten(1), angles_of(one(grid, CPU))[0])
    rows, columns = angles[:2].view(2, 3, 4, 2), angles[2:].view(2, 3, 4, 2)
    assert (rows == rows[:, :, :1]).all() and (columns == columns[:, :1]).all()


def test_the_slowest_pair_is_slower_by_the_temperature_if_both_ends_are_included():
    angles = angles_of(rope_of("mala", 16)(TokenGrid(2, 1), CPU))[1, :4]
    torch.testing.assert_close(angles, 10_000.0 ** (-torch.arange(4.0) / 3))
    torch.testing.assert_close(angles_of(rope_of("mala", 4)(TokenGrid(2, 1), CPU))[1, 0], torch.tensor(1.0))


def test_only_exact_ropes_follow_float64_tokens():
    for name, settings in ROPES.items():
        rotation = rope_of(name, 8)(TokenGrid(2, 3), CPU, torch.float64)
        assert rotation.cos.dtype == (torch.float64 if settings.get("exact") else torch.float32)
        half = rope_of(name, 8)(TokenGrid(2, 3), CPU, torch.float16)
        assert half.cos.dtype == half.sin.dtype == torch.float32


@every_rope
def test_wider_features_have_angles_of_their_own_or_are_turned_piece_by_piece(name):
    grid, rope, x = TokenGrid(3, 4, 1), rope_of(name, 8, 2), torch.randn(1, 2, 13, 16)
    narrow, wide = rope(grid, CPU), rope(grid, CPU, feature_width=2)
    torch.testing.assert_close(narrow.turn(x), torch.cat([narrow.turn(x[..., :8]), narrow.turn(x[..., 8:])], dim=-1))
    assert wide.cos.shape[-1] == 16 and not torch.allclose(wide.turn(x), narrow.turn(x))


def test_heads_across_are_pairs_of_neighbours():
    with pytest.raises(SubquadError, match="interleaved=True"):
        AxialRope(8, 2, temperature=100, coordinates="index", interleaved=False, across_heads=True)
