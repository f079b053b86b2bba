"""Calls of operators of whole mechanisms, and their definitions: explicit weights and what stands around them."""

import torch
from operator_numbers import (
    GRID,
    HEADS,
    MAP,
    PIECES,
    SCALE,
    block_features,
    branched,
    draw,
    halved,
    rotation_tables,
    tokens_of_heads,
)

from subquad import TokenGrid, ops
from subquad.ops.mhla_formula import blocks_of
from subquad.positions import BiasTables
from subquad.rope import rotation_of


def _inline_mixer(width):
    def definition(q, k, v, x, first, first_bias, second, second_bias):
        hidden = x.mean(dim=1).unflatten(-1, (HEADS, width))
        hidden = torch.einsum("bhi,hji->bhj", hidden, first.view(HEADS, width, width)) + first_bias.view(HEADS, width)
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        taps = torch.einsum("bhi,hji->bhj", hidden, second.view(HEADS, 9 * width, width))
        taps = (taps + second_bias.view(HEADS, -1)).reshape(len(x), HEADS * width, 1, 3, 3)
        y = ops.inline_weights(q, k) @ v
        images = [branched(y[b : b + 1], v[b : b + 1], taps[b], None, "channel") for b in range(len(x))]
        return torch.cat(images)

    channels = HEADS * width
    mlp = draw(channels, width, 1), draw(channels), draw(9 * channels, width, 1) / width**0.5, draw(9 * channels)
    return (*tokens_of_heads(width, 3), draw(2, GRID.num_tokens, channels), *mlp), (list(GRID.shape),), definition


def _agent_mixer(width):
    bins = TokenGrid(2, 2)

    def definition(q, k, v, *rest):
        *tables, weight, bias = rest
        means = torch.nn.functional.adaptive_avg_pool2d(GRID.to_map(q), bins.shape)
        agents = bins.to_heads(means, HEADS)
        y = ops.agent_weights(q, agents, k, BiasTables(*tables[:4]), BiasTables(*tables[4:])) @ v
        return branched(y, v, weight, bias, "channel")

    def tables():
        sizes = (7, 7), (GRID.height,), (GRID.width,), (GRID.prefix,)
        return (draw(HEADS, 4, *size) for size in sizes)

    branch = draw(HEADS * width, 1, 3, 3), draw(HEADS * width)
    return (
        (*tokens_of_heads(width, 3), *tables(), *tables(), *branch),
        (list(GRID.shape), [2, 2], "channel"),
        definition,
    )


def _pola_mixer(width):
    def definition(q, k, v, g, power, temperature, positions, weight, bias):
        learned = 1 + 3 * torch.sigmoid(power), None, torch.log(1 + torch.exp(temperature)), positions
        y = halved(v, *ops.pola_weights(q, k, *learned, eps=1e-6).unbind(2))
        return branched(y, v, weight, bias, "head_channel") * g

    learned = *(draw(HEADS, 1, width) for _ in range(2)), draw(HEADS, GRID.num_tokens, width)
    branch = draw(width, 1, 5, 5), draw(width)
    return (*tokens_of_heads(width, 4), *learned, *branch), (list(GRID.shape), 3.0, 1e-6, "head_channel"), definition


def _soft_mixer(width):
    def definition(q, v, windows, norm_weight, norm_bias, weight, bias):
        images = GRID.to_map(q).unflatten(1, (HEADS, width)).flatten(0, 1)
        landmarks = torch.nn.functional.conv2d(images, windows, stride=(3, 4)).unflatten(0, (2, HEADS)).flatten(3).mT
        landmarks = torch.nn.functional.layer_norm(SCALE * landmarks, (width,), norm_weight, norm_bias, 1e-5)
        landmarks = torch.nn.functional.gelu(landmarks)
        return branched(ops.soft_weights(SCALE * q, landmarks) @ v, v, weight, bias, "head")

    parameters = draw(width, width, 3, 4) / width**0.5, 1 + 0.1 * draw(width), 0.1 * draw(width)
    branch = draw(HEADS, 1, 3, 3), None
    settings = list(GRID.shape), 20, SCALE, 1e-5, 0.01, 1.8, "head"
    return (*tokens_of_heads(width, 2), *parameters, *branch), settings, definition


def _focused_mixer(width):
    def definition(q, k, v, temperature, positions, weight, bias):
        q, k = (_focus(x, torch.log(1 + torch.exp(temperature))) for x in (q, k + positions))
        scores = q @ k.mT / k.shape[2]
        y = scores @ v / (scores.sum(dim=-1, keepdim=True) + 1e-6)
        return branched(y, v, weight, bias, "head_channel")

    learned = draw(HEADS, 1, width), draw(HEADS, GRID.num_tokens, width)
    branch = draw(width, 1, 5, 5), draw(width)
    return (*tokens_of_heads(width, 3), *learned, *branch), (list(GRID.shape), 2.5, 1e-6, "head_channel"), definition


def _focus(x, temperature):
    y = (x.clamp(min=0) + 1e-6) / temperature
    norms = (part.square().sum(dim=(1, 3), keepdim=True).sqrt() for part in (y, y**2.5))
    return y**2.5 * next(norms) / next(norms)


def _polapp_mixer(width):
    *tables, interleaved = rotation_tables(width, features=2)

    def definition(q, k, v, g, same, opposite, cos, sin, weight, bias):
        turn = rotation_of(cos, sin, interleaved)
        spikiness = (1 / (1 + torch.exp(-x)) for x in (same, opposite))
        y = halved(v, *ops.polapp_weights(q, k, *spikiness, rotation=turn).unbind(2))
        return branched(y, v, weight, bias, "channel") * g

    learned, branch = (draw(HEADS, 1, 2 * width) for _ in range(2)), (draw(HEADS * width, 1, 5, 5), None)
    settings = list(GRID.shape), interleaved, 1e-6, "channel"
    return (*tokens_of_heads(width, 4), *learned, *tables, *branch), settings, definition


def _ttt_mixer(width):
    *tables, interleaved = rotation_tables(width, "mlla")
    # of the units' heads
    tables, units = [table if table is None else table[: HEADS - 1] for table in tables], HEADS - 1

    def definition(q, k, v, w1, w2, w3, cos, sin):
        turn = rotation_of(cos, sin, interleaved)
        (q, filter_q), (k, filter_k), (v, filter_v) = (x.split([units, 1], dim=1) for x in (q, k, v))
        q, k = (q, k) if turn is None else map(turn.turn, (q, k))

        def unit(x, w1, w2):
            return x @ w1 * torch.nn.functional.silu(x @ w2)

        w1, w2 = (w.expand(len(q), *w.shape) for w in (w1, w2))
        y = unit(q, *_trained(lambda *w: (unit(k, *w) * v).sum() * 0.3 / k.shape[2], w1, w2, of_output=-2))
        filters = w3.flatten(2).expand(len(q), *w3.flatten(2).shape)

        def filtered(x, filters):
            maps, kernels = GRID.to_map(x).flatten(0, 1)[None], filters.unflatten(2, (3, 3))
            image = torch.nn.functional.conv2d(maps, kernels.flatten(0, 1)[:, None], padding=1, groups=maps.shape[1])
            return image.unflatten(1, (len(x), -1))[0]

        values = GRID.to_map(filter_v)
        loss = lambda w: (filtered(filter_k, w[:, :, 0]) * values).sum() * 0.3 / GRID.num_places  # noqa: E731
        (trained,) = _trained(loss, filters, of_output=-1)
        answers = GRID.to_heads(filtered(filter_q, trained[:, :, 0]), 1)
        return torch.cat([y, answers], dim=1)

    weights = *(draw(units, width, width) / width**0.5 for _ in range(2)), draw(width, 1, 3, 3)
    return (*tokens_of_heads(width, 3), *weights, *tables), (list(GRID.shape), interleaved, 0.3), definition


def _trained(agreement, *weights, of_output):
    """Weights a step of gradient ascent on, damped for each of their outputs."""
    weights = [w.detach().requires_grad_() for w in weights]
    steps = torch.autograd.grad(agreement(*weights), weights)
    lengths = (step.square().sum(dim=of_output, keepdim=True).sqrt() for step in steps)
    return [w + step / (length + 1) for w, step, length in zip(weights, steps, lengths, strict=True)]


def _circulant_mixer(width):
    def definition(q, k, v, g):
        y = (ops.circulant_weights(q, k, grid=MAP) @ v.mT[..., None]).squeeze(-1).mT.contiguous()
        return y * g / (1 + torch.exp(-g))

    return tokens_of_heads(width, 4, MAP.num_tokens), (list(MAP.shape),), definition


def _mhla_mixer(width):
    def definition(q, k, v, mixing, q_scale, k_scale, weight, bias):
        q, k, blocks = block_features(q, q_scale), block_features(k, k_scale), blocks_of(GRID, PIECES, q.device)
        scores = q @ k.mT * mixing.clamp(min=0.2)[blocks][:, blocks]
        y = scores @ v / (scores.sum(dim=-1, keepdim=True) + 1e-6)
        return branched(y, v, weight, bias, "channel")

    count = PIECES[0] * PIECES[1] + 1
    learned = torch.rand(count, count, dtype=torch.float64), *(1 + 0.1 * draw(HEADS, 1, width) for _ in range(2))
    branch = draw(HEADS * width, 1, 5, 5), draw(HEADS * width)
    settings = list(GRID.shape), list(PIECES), 0.2, "channel"
    return (*tokens_of_heads(width, 3), *learned, *branch), settings, definition


MIXERS = {
    "inline_mixer": _inline_mixer,
    "agent_mixer": _agent_mixer,
    "pola_mixer": _pola_mixer,
    "soft_mixer": _soft_mixer,
    "focused_mixer": _focused_mixer,
    "polapp_mixer": _polapp_mixer,
    "ttt_mixer": _ttt_mixer,
    "circulant_mixer": _circulant_mixer,
    "mhla_mixer": _mhla_mixer,
}
"""By the names of the operators."""
