"""InLine's propositions: what tells queries apart, and counterexamples where nothing does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import SubquadError
from subquad.analysis.injectivity import confused_by, tells_apart, weights_of

sizes = given(seed=st.integers(0, 2**31), dim=st.integers(1, 8), more=st.integers(1, 8))


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@sizes
def test_with_enough_keys_softmax_and_inline_tell_queries_apart(seed, dim, more):
    keys = draw(seed, dim + more, dim)
    assert tells_apart(keys)
    queries = draw(seed + 1, 6, dim)
    for kind in ("softmax", "inline"):
        assert confused_by(kind, keys) is None
        rows = weights_of(kind, queries, keys)
        apart, distance = torch.cdist(rows, rows), torch.cdist(queries, queries)
        assert (apart[distance > 0] > 0).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), dim=st.integers(2, 8), few=st.integers(1, 8))
def test_with_too_few_keys_they_do_not(seed, dim, few):
    keys = draw(seed, min(few, dim), dim)
    assert not tells_apart(keys)
    for kind in ("softmax", "inline"):
        one, other = confused_by(kind, keys)
        assert (one - other).norm() > 0.5
        rows = weights_of(kind, torch.stack([one, other]), keys)
        assert torch.allclose(rows[0], rows[1], atol=1e-9)


@settings(max_examples=25, deadline=None)
@sizes
def test_linear_attention_confuses_queries_whatever_the_keys(seed, dim, more):
    keys = draw(seed, dim + more, dim)
    keys[0, 0] = keys[0, 0].abs() + 0.1
    one, other = confused_by("linear", keys)
    assert (one - other).norm() > 0.05
    rows = weights_of("linear", torch.stack([one, other, 7 * one]), keys)
    assert torch.allclose(rows[0], rows[1], atol=1e-12) and torch.allclose(rows[0], rows[2], atol=1e-12)
    rows = weights_of("inline", torch.stack([one, other]), keys)
    assert not torch.allclose(rows[0], rows[1], atol=1e-9)


@settings(max_examples=25, deadline=None)
@sizes
def test_keys_on_a_plane_tell_nothing_across_it(seed, dim, more):
    keys = draw(seed, dim + more + 1, dim + 1)
    keys[:, -1] = 0.3
    assert not tells_apart(keys)
    one, other = confused_by("inline", keys)
    assert torch.allclose((one - other)[:-1], torch.zeros(()).double(), atol=1e-6)


def test_complaints_are_one_line():
    with pytest.raises(SubquadError, match="no key has a positive entry"):
        confused_by("linear", -torch.ones(3, 2))
    with pytest.raises(SubquadError, match="unknown kind of attention 'agent'"):
        confused_by("agent", torch.ones(3, 2))
