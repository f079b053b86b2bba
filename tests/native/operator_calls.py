"""A call of every operator that the CPU has kernels for, and the definition that it must equal, in float64."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mixer_calls import MIXERS
from operator_numbers import (
    AGENTS,
    GRID,
    HEADS,
    MAP,
    PIECES,
    SCALE,
    block_features,
    draw,
    halved,
    rotation_tables,
    tokens_of_heads,
)
from torch import Tensor

from subquad import ops
from subquad.kernels import OPERATORS, Operator
from subquad.ops.mhla_formula import blocks_of
from subquad.positions import BiasTables
from subquad.rope import rotation_of

Tensors = tuple[Tensor | None, ...]
TURNED = sorted(
    name
    for name, one in OPERATORS.items()
    if list(one.shapes.texts) == ["q", "k", "v", "cos", "sin"] and one.has_gradient("native")
)
"""Operators of features that a rotation may turn, and of nothing else."""


@dataclass(frozen=True)
class OperatorCall:
    """An operator, its tensors in float64, its settings, and its definition of such tensors: explicit weights."""

    operator: Operator
    tensors: Tensors
    settings: tuple[Any, ...]
    definition: Callable[..., Tensor | tuple[Tensor | None, ...]]

    def exact(self, tensors: Tensors) -> list[Tensor]:
        """The results in float64."""
        results = self.definition(*tensors)
        return [results] if isinstance(results, Tensor) else [one for one in results if one is not None]

    def by_kernel(self, tensors: Tensors) -> list[Tensor]:
        """The results of the CPU kernel."""
        first = tensors[0].clone()
        results = self.operator(first, *tensors[1:], *self.settings, "native")
        if results is None:
            return [first]
        return [results] if isinstance(results, Tensor) else list(results)

    @property
    def of_tokens(self) -> list[bool]:
        """Which of the tensors are tokens, of each image; the others are parameters."""
        return [text.startswith("b ") for text in self.operator.shapes.texts.values()]


@functools.cache
def operator_calls(width: int, seed: int = 0) -> dict[str, OperatorCall]:
    """By the operators' names, with heads of `width` channels and numbers of a seed. They are made once."""
    made = {
        "linear_attention": _linear,
        "mlla_attention": _mlla,
        "mala_attention": lambda width: _turned(width, ops.mala_weights),
        "rala_attention": lambda width: _turned(width, lambda q, k, _, turn: ops.rala_weights(q, k, rotation=turn)),
        "nala_attention": lambda width: _turned(width, ops.nala_weights),
        "polapp_attention": _polapp,
        "mhla_sums": _mhla_sums,
        "mhla_answers": _mhla_answers,
        "circulant_attention": _circulant,
        "focused_attention": _focused,
        "ttt_unit": _unit,
        "inline_attention": _inline,
        "pola_attention": _pola,
        "agent_attention": _agent,
        "agent_attention_of_tables": _agent_of_tables,
        "softmax_attention": _softmax,
        "soft_gather": _gather,
        "soft_spread": _spread,
        "newton_inverse": _newton,
        "local_branch": _local_branch,
        "depthwise": _depthwise,
        "map_filter": _map_filter,
        "map_products": _map_products,
        "pool": _pool,
        "convolve_windows": _windows,
        "mlp": _mlp,
        "linear_branch_sums": _linear_branch_sums,
        "linear_branch_answers": _linear_branch_answers,
        "norm_projection": _norm_projection,
        "projection_residual": _projection_residual,
        "patch_tokens": _patch_tokens,
        "turned": _turned_alone,
        **MIXERS,
        "linear_sums": _linear_sums,
        "linear_answers": _linear_answers,
    }
    calls = {}
    for name, make in made.items():
        torch.manual_seed(seed)  # an operator's numbers, whichever others there are
        tensors, settings, definition = make(width)
        operator = OPERATORS[name]
        call = calls[name] = OperatorCall(operator, tensors, settings, definition)
        if operator.has_gradient("native"):
            calls[operator.gradient.name] = _gradient_of(call)
        if operator.keeping and "native" in operator.keeping.implementations:
            kept, gradient = KEPT[name]
            results = call.definition, kept
            calls[operator.keeping.name] = OperatorCall(
                operator.keeping, tensors, settings, _one_after_another(*results)
            )
            grad, found = torch.randn_like(call.definition(*tensors)), kept(*tensors)
            gradients = operator.keeping.gradient
            calls[gradients.name] = OperatorCall(gradients, (grad, *tensors, *found), settings, gradient)
    return calls


def _one_after_another(*definitions):
    """A definition that gives what several do."""

    def all_of_them(*tensors):
        results = [definition(*tensors) for definition in definitions]
        return tuple(x for one in results for x in ([one] if isinstance(one, Tensor) else one))

    return all_of_them


def _linear(width):
    def definition(q, k, v):
        return ops.linear_weights(q, k, feature_map="elu", eps=1e-6) @ v

    return tokens_of_heads(width, 3), ("elu", 1e-6), definition


def _turned(width, weights, name="mala"):
    """Features that a rotation turns; `weights` takes (q, k, padding, rotation)."""
    *tables, interleaved = rotation_tables(width, name)

    def definition(q, k, v, cos, sin):
        return weights(q, k, None, rotation_of(cos, sin, interleaved)) @ v

    return (*tokens_of_heads(width, 3), *tables), (interleaved, 1e-6), definition


def _turned_alone(width):
    """By tables of which nothing is known, of pairs of halves."""
    width += width % 2

    def definition(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([second, first], dim=-1) * sin

    return (*tokens_of_heads(width), draw(GRID.num_tokens, width), draw(GRID.num_tokens, width)), (False,), definition


def _mlla(width):
    return _turned(width, lambda q, k, _, turn: ops.mlla_weights(q, k, rotation=turn), "mlla")


def _polapp(width):
    *tables, interleaved = rotation_tables(width, features=2)

    def definition(q, k, v, same, opposite, cos, sin):
        turn = rotation_of(cos, sin, interleaved)
        return halved(v, *ops.polapp_weights(q, k, same, opposite, rotation=turn).unbind(2))

    spikiness = torch.rand(2, HEADS, 1, 2 * width, dtype=torch.float64).unbind(0)
    return (*tokens_of_heads(width, 3), *spikiness, *tables), (interleaved, 1e-6), definition


def _unit(width):
    *tables, interleaved = rotation_tables(width, "mlla")

    def definition(q, k, v, w1, w2, cos, sin):
        turn = rotation_of(cos, sin, interleaved)
        q, k = (q, k) if turn is None else map(turn.turn, (q, k))
        w1, w2 = (w.expand(len(q), *w.shape) for w in (w1, w2))
        w1, w2 = (w if w.requires_grad else w.detach().requires_grad_() for w in (w1, w2))
        loss = -(k @ w1 * torch.nn.functional.silu(k @ w2) * v).sum() * 0.3 / k.shape[2]
        steps = torch.autograd.grad(loss, (w1, w2), create_graph=True)
        w1, w2 = (
            w - step / (step.square().sum(dim=-2, keepdim=True).sqrt() + 1)
            for w, step in zip((w1, w2), steps, strict=True)
        )
        return q @ w1 * torch.nn.functional.silu(q @ w2)

    weights = (draw(HEADS, width, width) / width**0.5 for _ in range(2))
    return (*tokens_of_heads(width, 3), *weights, *tables), (interleaved, 0.3), definition


def _mhla_sums(width):
    def definition(k, v, scale):
        blocks, k = blocks_of(GRID, PIECES, k.device), block_features(k, scale)
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        own = [(k[:, :, blocks == i].mT @ v[:, :, blocks == i]) for i in range(math.prod(PIECES) + 1)]
        return torch.stack(own, dim=2)

    return (*tokens_of_heads(width, 2), 1 + 0.1 * draw(HEADS, 1, width)), (list(GRID.shape), list(PIECES)), definition


def _mhla_answers(width):
    def definition(q, states, scale):
        states = states[:, :, blocks_of(GRID, PIECES, q.device)]
        y = (block_features(q, scale)[..., None, :] @ states)[..., 0, :]
        return y[..., :-1] / (y[..., -1:] + 1e-6)

    states = draw(2, HEADS, math.prod(PIECES) + 1, width, width + 1).abs()
    # of a query without any feature above 0 a gradient is larger than all others together, and its rounding luck
    q = 1 + tokens_of_heads(width)[0]
    return (q, states, 1 + 0.1 * draw(HEADS, 1, width)), (list(GRID.shape), list(PIECES)), definition


def _circulant(width):
    def definition(q, k, v):
        return (ops.circulant_weights(q, k, grid=MAP) @ v.mT[..., None]).squeeze(-1).mT.contiguous()

    return tokens_of_heads(width, 3, MAP.num_tokens), (list(MAP.shape),), definition


def _focused(width):
    def focus(x, temperature):
        y = (x.clamp(min=0) + 1e-6) / temperature
        norms = (part.square().sum(dim=(1, 3), keepdim=True).sqrt() for part in (y, y**2.5))
        return y**2.5 * next(norms) / next(norms)

    def definition(q, k, v, temperature, positions):
        pairs = focus(q, temperature) @ focus(k + positions, temperature).mT
        return pairs @ v / (pairs.sum(dim=-1, keepdim=True) + k.shape[2] * 1e-6)

    temperature = 1 + torch.rand(HEADS, 1, width, dtype=torch.float64)
    tensors = *tokens_of_heads(width, 3), temperature, draw(HEADS, GRID.num_tokens, width)
    return tensors, (2.5, 1e-6), definition


def _inline(width):
    return tokens_of_heads(width, 3), (), lambda q, k, v: ops.inline_weights(q, k) @ v


def _pola(width):
    def definition(q, k, v, power, temperature, positions):
        return halved(v, *ops.pola_weights(q, k, power, None, temperature, positions, eps=1e-6).unbind(2))

    power, temperature = (1 + torch.rand(HEADS, 1, width, dtype=torch.float64) * most for most in (3, 1))
    return (*tokens_of_heads(width, 3), power, temperature, draw(HEADS, GRID.num_tokens, width)), (1e-6,), definition


def _softmax(width):
    forbidden = torch.rand(1, 1, GRID.num_tokens, GRID.num_tokens) < 0.5
    forbidden[0, 0, 3] = True  # a query that sees nothing

    def definition(q, k, v, bias, forbidden):
        return ops.softmax_weights(q, k, forbidden, bias[0]) @ v

    bias = draw(1, HEADS, GRID.num_tokens, GRID.num_tokens)
    return (*tokens_of_heads(width, 3), bias, forbidden), (), definition


def _agent(width):
    def definition(q, agents, k, v, key_bias, query_bias):
        return ops.agent_weights(q, agents, k, key_bias, query_bias.mT) @ v

    q, k, v = tokens_of_heads(width, 3)
    biases = (draw(HEADS, AGENTS, GRID.num_tokens) for _ in range(2))
    return (q, draw(2, HEADS, AGENTS, width), k, v, *biases), (), definition


def _agent_of_tables(width):
    def definition(q, agents, k, v, *tables):
        return ops.agent_weights(q, agents, k, BiasTables(*tables[:4]), BiasTables(*tables[4:])) @ v

    def tables():
        sizes = (7, 7), (GRID.height,), (GRID.width,), (GRID.prefix,)
        return (draw(HEADS, AGENTS, *size) for size in sizes)

    q, k, v = tokens_of_heads(width, 3)
    return (q, draw(2, HEADS, AGENTS, width), k, v, *tables(), *tables()), (), definition


def _collected(q, agents, k, v, *tables):
    """What agents collect, their largest logits and the sums of the exponentials."""
    logits = agents @ k.mT * q.shape[-1] ** -0.5 + BiasTables(*tables[:4]).written_out()
    most = logits.amax(dim=-1)
    return logits.softmax(dim=-1) @ v, most, (logits - most[..., None]).exp().sum(dim=-1)


def _gradients_of_collected(grad, q, agents, k, v, *rest):
    """From what was collected: the derivative of each of both softmaxes, P ∘ (dP - Σ P ∘ dP), and of their logits."""
    (values, most, total), scale = rest[8:], q.shape[-1] ** -0.5
    tables = [table.detach().requires_grad_() for table in rest[:8]]
    key_bias, query_bias = (BiasTables(*half).written_out() for half in (tables[:4], tables[4:]))
    collects = (agents @ k.mT * scale + key_bias - most[..., None]).exp() / total[..., None]
    spreads = (q @ agents.mT * scale + query_bias.mT).softmax(dim=-1)

    def of_logits(weights, slopes):
        return weights * (slopes - (weights * slopes).sum(dim=-1, keepdim=True))

    dvalues = spreads.mT @ grad
    of_spreads, of_collects = of_logits(spreads, grad @ values.mT), of_logits(collects, dvalues @ v.mT)
    dagents = (of_spreads.mT @ q + of_collects @ k) * scale
    biases = (key_bias, query_bias), tables, (of_collects.sum(dim=0), of_spreads.mT.sum(dim=0))
    of_tables = torch.autograd.grad(*biases)
    return of_spreads @ agents * scale, dagents, of_collects.mT @ agents * scale, collects.mT @ dvalues, *of_tables


KEPT = {"agent_attention_of_tables": (_collected, _gradients_of_collected)}
"""What operators keep for their gradients, and these from that."""


def _linear_sums(width):
    def definition(k, v):
        k = k.relu()
        return torch.cat([k.mT @ v, k.sum(dim=-2)[..., None]], dim=-1)

    return tokens_of_heads(width, 2), ("relu",), definition


def _linear_answers(width):
    def definition(q, sums):
        q = q.relu()
        return q @ sums[..., :-1] / (q @ sums[..., -1:] + 50 * 1e-6)

    (q,) = tokens_of_heads(width)
    return (q, draw(2, HEADS, width, width + 1).abs()), (50, "relu", 1e-6), definition


def _gather(width):
    def definition(q, landmarks, v):
        return ops.gaussian_kernel(landmarks, SCALE * q) @ v

    q, v = tokens_of_heads(width, 2)
    return (q, SCALE * draw(2, HEADS, AGENTS, width), v), (SCALE,), definition


def _spread(width):
    def definition(q, landmarks, u):
        return ops.gaussian_kernel(SCALE * q, landmarks) @ u

    (q,) = tokens_of_heads(width)
    return (q, SCALE * draw(2, HEADS, AGENTS, width), draw(2, HEADS, AGENTS, width)), (SCALE,), definition


def _newton(width):
    def definition(gram, alpha):
        # of three steps, written out: (1 - (1 - αA²)^8) / A of the symmetric A
        gram, identity = (gram + gram.mT) / 2, torch.eye(width, dtype=gram.dtype, device=gram.device)
        residual = identity - alpha * gram @ gram
        inverse = torch.linalg.solve(gram, identity - torch.linalg.matrix_power(residual, 8))
        return (inverse + inverse.mT) / 2

    points = 0.5 * draw(2, HEADS, width, 4)
    gram = ops.gaussian_kernel(points, points) + torch.eye(width, dtype=torch.float64)
    return (gram, 1 / gram.sum(dim=-1).amax(dim=-1)[..., None, None].square()), (3,), definition


def _convolved(v, weight, bias):
    image = torch.nn.functional.conv2d(GRID.to_map(v), weight[:, None], bias, padding=1, groups=len(weight))
    return GRID.to_heads(image, HEADS)


def _filters(width):
    return draw(HEADS * width, 3, 3), draw(HEADS * width)


def _local_branch(width):
    def definition(y, v, g, weight, bias):
        return (y + _convolved(v, weight, bias)) * g

    return (*tokens_of_heads(width, 3), *_filters(width)), (list(GRID.shape),), definition


def _depthwise(width):
    return (*tokens_of_heads(width), *_filters(width)), (list(GRID.shape),), _convolved


def _map_filter(width):
    def definition(x, weight, bias):
        image = torch.nn.functional.conv2d(GRID.to_image(x), weight[:, None], bias, padding=1, groups=len(weight))
        hidden = x[:, GRID.prefix :] + image.flatten(2).mT
        return torch.cat([x[:, : GRID.prefix], hidden * (1 + torch.erf(hidden / 2**0.5)) / 2], dim=1)

    weights = draw(width, 3, 3), draw(width)
    return (draw(2, GRID.num_tokens, width), *weights), (list(GRID.shape), True, "gelu"), definition


def _map_products(width):
    def definition(k, v):
        filled = torch.nn.functional.pad(GRID.to_map(k), (1, 1, 1, 1))
        windows = filled.unfold(2, GRID.height, 1).unfold(3, GRID.width, 1)
        return torch.einsum("bcijyx,bcyx->bijc", windows, GRID.to_map(v)).flatten(1, 2)

    return tokens_of_heads(width, 2), (3, list(GRID.shape)), definition


def _pool(width):
    bins = [4, 4]

    def definition(x):
        return torch.nn.functional.adaptive_avg_pool2d(GRID.to_map(x), bins).unflatten(1, (HEADS, width)).flatten(3).mT

    return tokens_of_heads(width), (list(GRID.shape), bins), definition


def _windows(width):
    def definition(x, weight):
        images = GRID.to_map(x).unflatten(1, (HEADS, width)).flatten(0, 1)
        return torch.nn.functional.conv2d(images, weight, stride=(2, 3)).unflatten(0, (2, HEADS)).flatten(3).mT

    return (*tokens_of_heads(width), draw(width, width, 2, 3)), tuple(GRID.shape), definition


def _normed(x, weight, bias):
    rest = x - x.mean(dim=-1, keepdim=True)
    return rest / (rest.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def _linear_branch_sums(width):
    channels = HEADS * width

    def definition(x, norm_weight, norm_bias, weight, bias):
        fused = _normed(x, norm_weight, norm_bias) @ weight.mT + bias
        k, v = fused.unflatten(-1, (2, HEADS, width)).permute(2, 0, 3, 1, 4)
        k = k.relu()
        return torch.cat([k.mT @ v, k.sum(dim=-2)[..., None]], dim=-1)

    weights = draw(2 * channels, channels) / channels**0.5, draw(2 * channels)
    tensors = draw(2, 70, channels), 1 + 0.1 * draw(channels), draw(channels), *weights
    return tensors, (HEADS, "relu", 1e-6), definition


def _linear_branch_answers(width):
    channels = HEADS * width

    def definition(x, norm_weight, norm_bias, weight, bias, sums, proj, proj_bias, scale):
        q = (_normed(x, norm_weight, norm_bias) @ weight.mT + bias).unflatten(-1, (HEADS, width)).transpose(1, 2)
        q = torch.where(q > 0, q + 1, q.exp())
        y = q @ sums[..., :-1] / (q @ sums[..., -1:] + 50 * 1e-6)
        return x + scale * (y.transpose(1, 2).flatten(2) @ proj.mT + proj_bias)

    weights = [(draw(channels, channels) / channels**0.5, draw(channels)) for _ in range(2)]
    sums = draw(2, HEADS, width, width + 1).abs()
    # narrow heads have many tokens for their channels, and are computed in another order
    tensors = draw(2, 200, channels), 1 + 0.1 * draw(channels), draw(channels), *weights[0], sums, *weights[1]
    return (*tensors, draw(channels)), (50, "elu", 1e-6, 1e-6), definition


def _norm_projection(width):
    def definition(x, norm_weight, norm_bias, weight, bias):
        normed = _normed(x, norm_weight, norm_bias)
        hidden = normed @ weight.mT + bias
        return torch.cat([hidden * (1 + torch.erf(hidden / 2**0.5)) / 2, normed], dim=-1)

    rows = 12 * width + 5  # more than one part of them
    weights = draw(rows, width) / width**0.5, draw(rows)
    return (draw(2, 70, width), 1 + 0.1 * draw(width), draw(width), *weights), (1e-6, True, "gelu"), definition


def _projection_residual(width):
    def definition(x, y, weight, bias, scale):
        return x + scale * (y @ weight.mT + bias)

    mixed = 2 * width
    weights = draw(width, mixed) / mixed**0.5, draw(width), draw(width)
    return (draw(2, 70, width), draw(2, 70, mixed), *weights), (), definition


def _patch_tokens(width):
    side, chans = 6, 3

    def definition(image, weight, bias, prefix, positions):
        rows = image.unflatten(2, (-1, side)).unflatten(4, (-1, side)).permute(0, 2, 4, 1, 3, 5)
        patches = rows.flatten(3).flatten(1, 2)
        tokens = patches @ weight.flatten(1).mT + bias
        return torch.cat([prefix.expand(len(image), -1, -1), tokens], dim=1) + positions

    count = GRID.num_tokens
    image = draw(2, chans, GRID.height * side, GRID.width * side)
    weight = draw(width, chans, side, side) / (chans * side**2) ** 0.5
    return (image, weight, draw(width), draw(1, GRID.prefix, width), draw(1, count, width)), (), definition


def _mlp(width):
    def definition(x, norm_weight, norm_bias, first, first_bias, second, second_bias, scale):
        normed = _normed(x, norm_weight, norm_bias)
        hidden = normed @ first.mT + first_bias
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        return x + scale * (hidden @ second.mT + second_bias)

    hidden = 3 * width + 1
    weights = draw(hidden, width) / width**0.5, draw(hidden), draw(width, hidden) / hidden**0.5, draw(width)
    return (draw(2, 70, width), 1 + 0.1 * draw(width), draw(width), *weights, draw(width)), ("gelu", 1e-6), definition


def _gradient_of(call: OperatorCall) -> OperatorCall:
    """The gradient's operator, whose definition is the derivative of the definition."""
    name = call.operator.gradient.name

    def definition(grad, *tensors):
        # a depthwise convolution's gradient asks for no bias
        rest = call.tensors[len(tensors) :]
        tensors = (*tensors, *(None if x is None else x.to(grad.device) for x in rest))
        tensors = [x if x is None or x.dtype == torch.bool else x.detach().requires_grad_() for x in tensors]
        # a rotation's tables learn nothing, nor does what may be seen
        learned = [
            tensor
            for name, tensor in zip(call.operator.shapes.texts, tensors, strict=True)
            if tensor is not None and name not in ("cos", "sin", "forbidden")
        ]
        grads = torch.autograd.grad(call.definition(*tensors), learned, grad)
        if name == "agent_attention_gradient":
            return *grads[:4], *(bias.mT for bias in grads[4:])
        # that to positions, which stand last, is the sum of the keys'
        return grads[:-1] if "positions" in call.operator.shapes.texts else grads

    grad = torch.randn_like(call.definition(*call.tensors))
    tensors = call.tensors[: len(call.operator.gradient.shapes.texts) - 1]
    return OperatorCall(call.operator.gradient, (grad, *tensors), call.settings, definition)
