"""Operators of all that lies between a layer's projections: a mechanism with what is around its core, in one call.

Each is the composition of others, of the core, means, the local branch; where no kernel has it, these are called one by
one. It knows queries and keys of one grid, no padding and no gradient, which its parts have.

Letters: b batch, h heads, n tokens, d channels of a head, f filters of w × w taps, a agents. `shape` is (height, width)
of the map; tokens in front of it are its prefix. `filters` says whose the f filters are: see FILTERS.
"""

from typing import Any

from subquad.kernels.declaring import operator
from subquad.kernels.grid_operators import transform_flops
from subquad.kernels.state_operators import WIDE_TABLES

FILTERS = ("channel", "head_channel", "head")
"""Whose a depthwise filter is: one of the h·d channels', one of a head's d channels' in all heads, or a head's."""

QKV = {"q": "b h n d", "k": "b h n d", "v": "b h n d"}
LOCAL = {"weight": "f 1 w w", "bias": "f"}


def _branch(q: Any, weight: Any) -> int:
    """A depthwise convolution of the map."""
    b, h, n, d = q
    return 2 * b * h * n * d * weight[-1] * weight[-2]


def _core(q: Any, depth: int) -> int:
    """Two products of each token, with `depth` numbers for each of its channels."""
    b, h, n, d = q
    return 4 * b * h * n * d * depth


# the local branch's taps are what an MLP for each head makes of the mean token
inline_mixer = operator(
    "InLine attention",
    "inline_mixer(Tensor q, Tensor k, Tensor v, Tensor x, Tensor first, Tensor first_bias, Tensor second, "
    "Tensor second_bias, int[] shape)",
    QKV | {"x": "b n h*d", "first": "h*d d 1", "first_bias": "h*d", "second": "9*h*d d 1", "second_bias": "9*h*d"},
    lambda q, k, v, x, *rest: _core(q, q[3]) + _branch(q, (3, 3)) + 20 * q[0] * q[1] * q[3] ** 2,
    sums_in_fp32=True,
)

# agents are means of the queries over bins, biases sums of tables, see agent_attention_of_tables
agent_mixer = operator(
    "agent attention",
    "agent_mixer(Tensor q, Tensor k, Tensor v, "
    "Tensor key_block, Tensor key_rows, Tensor key_columns, Tensor? key_prefix, "
    "Tensor query_block, Tensor query_rows, Tensor query_columns, Tensor? query_prefix, "
    "Tensor weight, Tensor? bias, int[] shape, int[] bins, str filters)",
    QKV
    | {"key_block": "h a s s", "key_rows": "h a y", "key_columns": "h a x", "key_prefix": "h a p"}
    | {"query_block": "h a t t", "query_rows": "h a y", "query_columns": "h a x", "query_prefix": "h a p"}
    | LOCAL,
    lambda q, k, v, block, *rest: 2 * _core(q, block[1]) + _branch(q, rest[7]),
)

# power and temperature are what is learned: powers are 1 + alpha·sigmoid, temperatures softplus of it
pola_mixer = operator(
    "PolaFormer's attention",
    "pola_mixer(Tensor q, Tensor k, Tensor v, Tensor g, Tensor power, Tensor temperature, Tensor positions, "
    "Tensor weight, Tensor? bias, int[] shape, float alpha, float eps, str filters)",
    QKV | {"g": "b h n d", "power": "h 1 d", "temperature": "h 1 d", "positions": "h n d"} | LOCAL,
    lambda q, k, v, g, power, temperature, positions, weight, *rest: 2 * _core(q, q[3]) + _branch(q, weight),
    sums_in_fp32=True,
)


def _soft(q: Any, v: Any, windows: Any, norm_weight: Any, norm_bias: Any, weight: Any, *rest: Any) -> int:
    _, (height, width), steps, *_ = rest
    b, h, _, d = q
    landmarks = height // windows[2] * (width // windows[3])
    few = 2 * b * h * landmarks**2 * (2 * steps * landmarks + 2 * d)
    return 2 * _core(q, landmarks) + 2 * b * h * height * width * d * d + few + _branch(q, weight)


# landmarks are gelu(norm(scale · convolved windows)), and their kernel is inverted by Newton's steps from
# `start` / (largest row sum)² of it, with `ridge` on its diagonal
soft_mixer = operator(
    "softmax-free attention",
    "soft_mixer(Tensor q, Tensor v, Tensor windows, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, "
    "int[] shape, int steps, float scale, float norm_eps, float ridge, float start, str filters)",
    {"q": "b h n d", "v": "b h n d", "windows": "d d i j", "norm_weight": "d", "norm_bias": "d"} | LOCAL,
    _soft,
    sums_in_fp32=True,
)

# keys have positions added, and tokens are divided by softplus(temperature)
focused_mixer = operator(
    "focused attention",
    "focused_mixer(Tensor q, Tensor k, Tensor v, Tensor temperature, Tensor positions, Tensor weight, Tensor? bias, "
    "int[] shape, float power, float eps, str filters)",
    QKV | {"temperature": "h 1 d", "positions": "h n d"} | LOCAL,
    lambda q, k, v, temperature, positions, weight, *rest: _core(q, q[3]) + _branch(q, weight),
    sums_in_fp32=True,
)

# spikiness is the sigmoid of what is learned
polapp_mixer = operator(
    "PolaFormer++'s attention",
    "polapp_mixer(Tensor q, Tensor k, Tensor v, Tensor g, Tensor same, Tensor opposite, Tensor? cos, Tensor? sin, "
    "Tensor weight, Tensor? bias, int[] shape, bool interleaved, float eps, str filters)",
    QKV | {"g": "b h n d", "same": "h 1 2*d", "opposite": "h 1 2*d", "cos": WIDE_TABLES, "sin": WIDE_TABLES} | LOCAL,
    lambda q, k, v, g, same, opposite, cos, sin, weight, *rest: 2 * _core(q, q[3]) + _branch(q, weight),
    sums_in_fp32=True,
)


def _trained(q: Any, k: Any, v: Any, w1: Any, w2: Any, w3: Any, *rest: Any) -> int:
    b, _, n, d = q
    return 12 * b * w1[0] * n * d * d + 4 * b * n * w3[0] * 9


# the last of g heads, of c channels, train filters on their map, the h others units
ttt_mixer = operator(
    "test-time training",
    "ttt_mixer(Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor w3, Tensor? cos, Tensor? sin, int[] shape, "
    "bool interleaved, float loss_scale)",
    {"q": "b g n d", "k": "b g n d", "v": "b g n d"}
    | {"w1": "h d d", "w2": "h d d", "w3": "c 1 3 3", "cos": "n d|h n d", "sin": "n d|h n d"},
    _trained,
    sums_in_fp32=True,
)

# times SiLU of a gate; it knows no prefix
circulant_mixer = operator(
    "circulant attention",
    "circulant_mixer(Tensor q, Tensor k, Tensor v, Tensor g, int[] shape)",
    QKV | {"g": "b h n d"},
    lambda q, *rest: transform_flops(q, 6),
    sums_in_fp32=True,
)


def _of_blocks(q: Any, k: Any, v: Any, mixing: Any, *rest: Any) -> int:
    b, h, n, d = q
    return 2 * b * h * d * (d + 1) * (2 * n + mixing[0] ** 2) + _branch(q, rest[2])


# a state for each of i blocks, mixed for each of them; no number of the matrix is below `least`
mhla_mixer = operator(
    "MHLA",
    "mhla_mixer(Tensor q, Tensor k, Tensor v, Tensor mixing, Tensor q_scale, Tensor k_scale, Tensor weight, "
    "Tensor? bias, int[] shape, int[] pieces, float least, str filters)",
    QKV | {"mixing": "i i", "q_scale": "h 1 d", "k_scale": "h 1 d"} | LOCAL,
    _of_blocks,
    sums_in_fp32=True,
)
