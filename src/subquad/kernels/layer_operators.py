"""Operators of what lies around attention in a block, and in front of all blocks.

Letters: b batch, n tokens, c channels, m hidden channels, h heads, d channels of a head.
"""

from typing import Any

import torch

from subquad.kernels.declaring import operator

MLP = {"x": "b n c", "norm_weight": "c", "norm_bias": "c"} | {"first": "m c", "first_bias": "m"}
MLP |= {"second": "c m", "second_bias": "c", "scale": "c"}


def _mlp(x: Any, norm_weight: Any, norm_bias: Any, first: Any, *rest: Any) -> int:
    """Two products of every token."""
    return 4 * x[0] * x[1] * x[2] * first[0]


# x + scale · (second activation(first norm(x)))
mlp = operator(
    "an MLP with its norm and residual",
    "mlp(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor first, Tensor first_bias, Tensor second, "
    "Tensor second_bias, Tensor? scale, str activation, float eps)",
    MLP,
    _mlp,
    shape=lambda x, *rest: x.new_empty(x.shape),
    needs_all_tokens=False,
)

TABLES = {"cos": "n d|h n d", "sin": "n d|h n d"}

turned_gradient = operator(
    "the gradient of a rotation of tokens",
    "turned_gradient(Tensor grad, Tensor x, Tensor cos, Tensor sin, bool interleaved)",
    {"grad": "b h n d", "x": "b h n d"} | TABLES,
    needs_all_tokens=False,
)

# x cos + its partner's x sin, see subquad.rope: pairs are neighbours where they are `interleaved`, or of two halves
turned = operator(
    "a rotation of tokens",
    "turned(Tensor x, Tensor cos, Tensor sin, bool interleaved)",
    {"x": "b h n d"} | TABLES,
    gradient=turned_gradient,
    backward=lambda gradient, grad, tensors, settings: (gradient(grad, *tensors, *settings), None, None),
    needs_all_tokens=False,
)

NORM = {"norm_weight": "c", "norm_bias": "c"}


def empty_states(x: Any, num_heads: int) -> Any:
    """Room for the sums (b, h, d, d + 1) of tokens (b, n, c)."""
    width = x.shape[2] // num_heads
    return x.new_empty(x.shape[0], num_heads, width, width + 1, dtype=torch.float32)


# of some tokens [φ(k)ᵀ v, Σ φ(k)] of the keys and values that `weight` projects, (b, h, d, d + 1)
linear_branch_sums = operator(
    "linear attention with its norm, projections and residual",
    "linear_branch_sums(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, int num_heads, "
    "str feature_map, float norm_eps)",
    {"x": "b n c"} | NORM | {"weight": "2*c c", "bias": "2*c"},
    lambda x, norm, norm_bias, weight, bias, heads, *rest: 2 * x[0] * x[1] * x[2] * (2 * x[2] + x[2] // heads),
    shape=lambda x, norm, norm_bias, weight, bias, num_heads, *rest: empty_states(x, num_heads),
    gives_fp32=True,
    needs_all_tokens=False,
)

# x + scale · (proj y + proj_bias) of some tokens, y their answers from such sums over `count` keys
linear_branch_answers = operator(
    "linear attention with its norm, projections and residual",
    "linear_branch_answers(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, Tensor sums, "
    "Tensor proj, Tensor? proj_bias, Tensor? scale, int count, str feature_map, float norm_eps, float eps)",
    {"x": "b n c"}
    | NORM
    | {"weight": "c c", "bias": "c", "sums": "b h d d+1", "proj": "c h*d", "proj_bias": "c", "scale": "c"},
    lambda x, norm, norm_bias, weight, bias, sums, *rest: 2 * x[0] * x[1] * x[2] * (2 * x[2] + sums[2]),
    shape=lambda x, *rest: x.new_empty(x.shape),
    needs_all_tokens=False,
)


def empty_projection(x: Any, weight: Any, keeps: bool) -> Any:
    """Room for what `weight` (m, c) makes of tokens (b, n, c), and for c channels more of each token, if it `keeps`."""
    return x.new_empty(*x.shape[:2], weight.shape[0] + keeps * x.shape[2])


# activation(weight norm(x) + bias), and behind it norm(x) where it `keeps` that: (b, n, m) or (b, n, m + c); without a
# norm it is x that is projected
norm_projection = operator(
    "a projection with the norm in front of it, if there is one",
    "norm_projection(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias, float eps, "
    "bool keeps, str activation)",
    {"x": "b n c"} | NORM | {"weight": "m c", "bias": "m"},
    lambda x, norm, norm_bias, weight, *rest: 2 * x[0] * x[1] * weight[0] * weight[1],
    shape=lambda x, norm, norm_bias, weight, bias, eps, keeps, activation: empty_projection(x, weight, keeps),
    needs_all_tokens=False,
)

# x + scale · (weight y + bias)
projection_residual = operator(
    "a projection with the residual behind it",
    "projection_residual(Tensor x, Tensor y, Tensor weight, Tensor? bias, Tensor? scale)",
    {"x": "b n c", "y": "b n m", "weight": "c m", "bias": "c", "scale": "c"},
    lambda x, y, weight, *rest: 2 * x[0] * x[1] * weight[0] * weight[1],
    shape=lambda x, *rest: x.new_empty(x.shape),
    needs_all_tokens=False,
)


def patch_count(image: Any, weight: Any) -> int:
    """How many patches an image (b, i, y, x) has, with sides as the weight's (c, i, p, p), the last ones filled up."""
    count: int = -(-image[2] // weight[2]) * -(-image[3] // weight[2])
    return count


def _patch_tokens(image: Any, weight: Any, bias: Any, prefix: Any, positions: Any) -> int:
    return 2 * image[0] * patch_count(image, weight) * weight[0] * weight[1] * weight[2] ** 2


def empty_patch_tokens(image: Any, weight: Any, prefix: Any) -> Any:
    """Room for the tokens (b, m + n, c), behind m = 0 or more of a prefix (1, m, c)."""
    before = 0 if prefix is None else prefix.shape[1]
    return image.new_empty(image.shape[0], before + patch_count(image.shape, weight.shape), weight.shape[0])


# [prefix; weight patches + bias] + positions
patch_tokens = operator(
    "patches projected to tokens",
    "patch_tokens(Tensor image, Tensor weight, Tensor? bias, Tensor? prefix, Tensor? positions)",
    {"image": "b i y x", "weight": "c i p p", "bias": "c", "prefix": "1 m c", "positions": "1 t c"},
    _patch_tokens,
    shape=lambda image, weight, bias, prefix, positions: empty_patch_tokens(image, weight, prefix),
    needs_all_tokens=True,
)
