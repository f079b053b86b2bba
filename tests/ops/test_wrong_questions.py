"""What operations are asked for and can't do is said in one line, and the same by every backend."""

import pytest
import torch
from torch.testing import assert_close

from subquad import SubquadError, TokenGrid, ops
from subquad.rope import Rotation

GRID = TokenGrid(2, 3)


def tokens(count=3, width=8):
    return torch.randn(count, 1, 2, GRID.num_tokens, width).unbind(0)


def turned(name, q, k, v, rotation, backend):
    torch.manual_seed(1)
    more = {"polapp_attention": (torch.ones(2, 1, 16),) * 2, "ttt_unit": (torch.randn(2, 8, 8),) * 2}
    return getattr(ops, name)(q, k, v, *more.get(name, ()), rotation=rotation, backend=backend)


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "name", ["mala_attention", "mlla_attention", "rala_attention", "nala_attention", "polapp_attention", "ttt_unit"]
)
def test_tables_of_any_width_turn_alike_by_every_backend_or_are_refused(name, width):
    (q, k, v), angles = tokens(), torch.randn(GRID.num_tokens, width)
    rotation = Rotation(angles.cos(), angles.sin(), True)
    try:
        expected = turned(name, q, k, v, rotation, "eager")
    except SubquadError as error:
        assert str(error) == "a rotation of 16 channels can't turn features of 8"
        with pytest.raises(SubquadError, match="a rotation of 16 channels can't turn features of 8"):
            turned(name, q, k, v, rotation, "auto")
    else:
        assert_close(turned(name, q, k, v, rotation, "auto"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_names_and_numbers_that_are_none_are_refused(backend):
    (q, k, v), grids = tokens(), {"grid": GRID, "kv_grid": GRID, "pieces": (2, 2)}
    mixing, scale = torch.rand(4, 4), torch.rand(2, 1, 8)
    with pytest.raises(SubquadError, match="unknown feature_map 'nala'"):
        ops.linear_attention(q, k, v, feature_map="nala", backend=backend)
    with pytest.raises(SubquadError, match="unknown feature_map 'gelu'"):
        ops.linear_weights(q, k, feature_map="gelu")
    with pytest.raises(SubquadError, match="unknown normaliser 'releasd': did you mean released"):
        ops.mhla_attention(q, k, v, mixing, scale, scale, **grids, normaliser="releasd")
    with pytest.raises(SubquadError, match="unknown normaliser 'releasd'"):
        ops.mhla_weights(q, k, mixing, scale, scale, **grids, normaliser="releasd")
    with pytest.raises(SubquadError, match="some steps or none, got -1"):
        ops.newton_inverse(torch.eye(3), steps=-1)


def test_one_number_starts_all_inverses():
    grams = torch.eye(4) + 0.1 * torch.rand(2, 4, 4).abs()
    assert_close(ops.newton_inverse(grams, 0.3), ops.newton_inverse(grams, torch.full((2, 1, 1), 0.3)))


def test_bins_have_no_prefix():
    (x,), bins = tokens(1), TokenGrid(2, 2, 1)
    pooled = [ops.pool_tokens(x, GRID, bins, backend=backend) for backend in ("eager", "auto")]
    assert pooled[0].shape == (1, 2, 4, 8)
    assert_close(*pooled)


@pytest.mark.parametrize("inverse", ops.INVERSES)
def test_idle_landmarks_are_left_out_without_padding_too(inverse):
    q, v = tokens(2)
    landmarks, idle = torch.randn(1, 2, 4, 8), torch.tensor([[False, True, False, True]])
    expected = ops.soft_attention(q, landmarks[:, :, ~idle[0]], v, inverse=inverse)
    assert_close(ops.soft_attention(q, landmarks, v, idle=idle, inverse=inverse), expected, rtol=1e-3, atol=1e-4)


def test_signs_that_are_only_written_down_are_read():
    (q, k, v), queries = tokens(), torch.zeros(2, GRID.num_tokens, 4)
    bias = torch.randn(2, 4, GRID.num_tokens, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    y = ops.agent_attention(q, k[:, :, :4], k, v, bias, queries)
    assert_close(y, ops.agent_attention(q, k[:, :, :4], k, v, bias.resolve_neg(), queries))
