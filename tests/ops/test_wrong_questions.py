"""What operations are asked for and can't do is said in one line, and the same by every backend."""

import numpy as np
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


@pytest.mark.parametrize("wrong", [3, np.zeros((1, 2, 6, 8), np.float32)], ids=["number", "array"])
@pytest.mark.parametrize(
    "name", ["softmax_attention", "linear_attention", "pola_weights", "soft_attention", "mlp_branch"]
)
def test_what_is_no_tensor_is_said_in_one_line(name, wrong):
    """It ended in PyTorch's words, 'str' object has no attribute 'type'."""
    count = 7 if name == "mlp_branch" else 4 if name == "pola_weights" else 3
    with pytest.raises(SubquadError, match=r"^[^\n]*(takes tensors|is a tensor), got [^\n]*(3|array)[^\n]*$"):
        getattr(ops, name)(*[wrong] * count)


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


SEVERAL_TOKENS = {
    "linear_attention": (),
    "softmax_attention": (),
    "inline_attention": (),
    "mala_attention": (),
    "mlla_attention": (),
    "rala_attention": (),
    "nala_attention": (),
    "circulant_attention": (),
    "pola_attention": ((2, 1, 8),),
    "polapp_attention": ((2, 1, 16), (2, 1, 16)),
    "ttt_unit": ((2, 8, 8), (2, 8, 8)),
}
"""Operations of q, k and v, and the shapes of their parameters."""


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("low", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("name", SEVERAL_TOKENS)
def test_tokens_of_several_precisions_are_taken_by_every_backend(name, low, backend):
    given = [*tokens(), *map(torch.rand, SEVERAL_TOKENS[name])]
    given[low] = given[low].bfloat16()
    settings = {"grid": GRID} if name == "circulant_attention" else {}
    got = getattr(ops, name)(*given, **settings, backend=backend)
    expected = getattr(ops, name)(*(x.double() for x in given), **settings, backend="eager")
    assert got.dtype == given[0].dtype
    assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("low", range(4))
def test_agents_may_have_another_precision_than_tokens(low, backend):
    (q, k, v), biases = tokens(), (torch.randn(2, 3, GRID.num_tokens), torch.randn(2, GRID.num_tokens, 3))
    given = [q, torch.randn(1, 2, 3, 8), k, v]
    given[low] = given[low].bfloat16()
    got = ops.agent_attention(*given, *biases, backend=backend)
    expected = ops.agent_attention(*(x.double() for x in (*given, *biases)), backend="eager")
    assert got.dtype == given[0].dtype
    assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)
