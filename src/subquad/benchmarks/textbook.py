"""Every mechanism as a textbook has it: the paper's formula line by line, as most released code computes it.

Biases are resized at every call, streams concatenated, matrices multiplied in the order they are written. These are
what the fast forms are measured against, and a test holds both equal; nothing else uses them.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from subquad.grid import TokenGrid

Supply = dict[str, Any]


def softmax(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """The whole matrix of weights written out, times V."""
    q, k, v = s["q"], s["k"], s["v"]
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def linear(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """φ(Q)(φ(K)ᵀV/n) / (φ(Q)·mean φ(K) + ε)."""
    q, k, v = F.relu(s["q"]), F.relu(s["k"]), s["v"]
    normalizer = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    n = k.shape[-2]
    return q @ ((k.transpose(-2, -1) * n**-0.5) @ (v * n**-0.5)) * normalizer


def focused(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Linear attention of focused features, norms over all channels."""
    scale = F.softplus(module.temperature)
    q, k = (F.relu(s["q"]) + 1e-6) / scale, (F.relu(s["k"] + module.positions(grid)) + 1e-6) / scale

    def focus(x: Tensor) -> Tensor:
        flat = rearrange(x, "b h n d -> b n (h d)")
        norm = flat.norm(dim=-1, keepdim=True)
        flat = flat**module.power
        flat = flat / flat.norm(dim=-1, keepdim=True) * norm
        return rearrange(flat, "b n (h d) -> b h n d", h=x.shape[1])

    y = linear(module, {"q": focus(q), "k": focus(k), "v": s["v"]}, grid)
    return y if module.local is None else y + _shared_conv(module.local, s["v"], grid)


def inline(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """(s/n) Q KᵀV + (1 − s q·k̄) v̄, and nine shifted products for the predicted kernels."""
    q, k, v, x = s["q"], s["k"], s["v"], s["x"]
    scale, n = q.shape[-1] ** -0.5, k.shape[-2]
    state = (k.transpose(-2, -1) * (scale / n) ** 0.5) @ (v * (scale / n) ** 0.5)
    mean_k, mean_v = k.mean(dim=-2, keepdim=True), v.mean(dim=-2, keepdim=True)
    y = q @ state + (1 - q @ mean_k.transpose(-2, -1) * scale) * mean_v
    if module.local is None:
        return y
    kernels = module.local(x)
    image = rearrange(v, "b h (y x) d -> b (h d) y x", y=grid.height)
    b, c = image.shape[:2]
    local = F.conv2d(image.reshape(1, b * c, *grid.shape), kernels.reshape(b * c, 1, 3, 3), padding=1, groups=b * c)
    return y + rearrange(local.reshape(b, c, *grid.shape), "b (h d) y x -> b h (y x) d", h=q.shape[1])


def agent(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Two softmax attentions, their biases put together and repeated over the batch at every call."""
    q, k, v = s["q"], s["k"], s["v"]
    b, h, scale = q.shape[0], q.shape[1], q.shape[-1] ** -0.5
    image = rearrange(q, "b h (y x) d -> b (h d) y x", y=grid.height)
    agents = rearrange(F.adaptive_avg_pool2d(image, module.agent_grid.shape), "b (h d) y x -> b h (y x) d", h=h)

    def bias(table: Any) -> Tensor:
        block = F.interpolate(table.block, grid.shape, mode="bilinear")
        block = repeat(block, "h a y x -> b h a (y x)", b=b)
        lines = repeat(table.rows[..., None] + table.columns[..., None, :], "h a y x -> b h a (y x)", b=b)
        return block + lines

    values = ((agents * scale) @ k.transpose(-2, -1) + bias(module.agent_bias)).softmax(dim=-1) @ v
    weights = ((q * scale) @ agents.transpose(-2, -1) + bias(module.query_bias).transpose(-2, -1)).softmax(dim=-1)
    if module.local is None:
        return weights @ values
    image = rearrange(v, "b h (y x) d -> b (h d) y x", y=grid.height)
    local = F.conv2d(image, module.local.weight, module.local.bias, padding=1, groups=image.shape[1])
    return weights @ values + rearrange(local, "b (h d) y x -> b h (y x) d", h=h)


def pola(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Both streams with concatenated features of their own, a power for each half."""
    scale, power = F.softplus(module.temperature), 1 + module.alpha * torch.sigmoid(module.power)
    q, k, v = s["q"] / scale, (s["k"] + module.positions(grid)) / scale, s["v"]
    q_pos, q_neg = F.relu(q) ** power, F.relu(-q) ** power
    k_pos, k_neg = F.relu(k) ** power, F.relu(-k) ** power
    q_same, q_opposite = torch.cat([q_pos, q_neg], dim=-1), torch.cat([q_neg, q_pos], dim=-1)
    k = torch.cat([k_pos, k_neg], dim=-1)
    n, outputs = k.shape[-2], []
    for queries, values in zip((q_same, q_opposite), v.chunk(2, dim=-1), strict=True):
        normalizer = 1 / (queries @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
        outputs.append(queries @ ((k.transpose(-2, -1) * n**-0.5) @ (values * n**-0.5)) * normalizer)
    y = torch.cat(outputs, dim=-1)
    return (y if module.local is None else y + _shared_conv(module.local, v, grid)) * s["g"]


def soft(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Gaussian kernels with the landmarks, 20 plain Newton steps, and the product from the left."""
    q, v = s["q"] * s["q"].shape[-1] ** -0.25, s["v"]
    h = q.shape[1]
    image = rearrange(q, "b h (y x) d -> (b h) d y x", y=grid.height)
    landmarks = rearrange(module.landmark(image), "(b h) d y x -> b h (y x) d", h=h)
    landmarks = F.gelu(module.landmark_norm(landmarks))

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = x.pow(2) @ torch.ones_like(y).transpose(-2, -1) + torch.ones_like(x) @ y.pow(2).transpose(-2, -1)
        return torch.exp(-0.5 * (squares - 2 * x @ y.transpose(-2, -1)))

    gram, wide = kernel(landmarks, landmarks), kernel(landmarks, q)
    alpha = 0.9 * 2 / gram.abs().sum(dim=-1).amax(dim=-1)[..., None, None] ** 2
    gram = gram + 0.01 * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse = alpha * gram
    for _ in range(20):
        inverse = 2 * inverse - inverse @ gram @ inverse
    y = (wide.transpose(-2, -1) @ inverse) @ (wide @ v)
    if module.local is None:
        return y
    maps = rearrange(v, "b h (y x) d -> (b d) h y x", y=grid.height)
    local = F.conv2d(maps, module.local.weight, padding=module.local.weight.shape[-1] // 2, groups=h)
    return y + rearrange(local, "(b d) h y x -> b h (y x) d", b=len(v))


def mala(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Features, their mean similarity, the state and the mean value one after the other, then branch and gate."""
    q, k, v = F.elu(s["q"]) + 1, F.elu(s["k"]) + 1, s["v"]
    n, scale = k.shape[-2], k.shape[-1] ** -0.5
    z = q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) * scale
    state = (k.transpose(-2, -1) * (scale / n) ** 0.5) @ (v * (scale / n) ** 0.5)
    y = q @ state * (1 + 1 / (z + 1e-6)) - z * v.mean(dim=-2, keepdim=True)
    return (y if module.local is None else y + _own_conv(module.local, v, grid)) * s["g"]


def rala(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """The mean query's softmax over the keys, n times it on the keys, linear attention, then branch and gate."""
    q, k, v = F.elu(s["q"]) + 1, F.elu(s["k"]) + 1, s["v"]
    n, scale = k.shape[-2], k.shape[-1] ** -0.5
    shares = (q.mean(dim=-2, keepdim=True) @ k.transpose(-2, -1) * scale).softmax(dim=-1)
    k = k * (shares * n).transpose(-2, -1)
    normalizer = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    y = q @ ((k.transpose(-2, -1) * n**-0.5) @ (v * n**-0.5)) * normalizer
    return (y if module.local is None else y + _own_conv(module.local, v, grid)) * s["g"]


def nala(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Directions to the power that their norms say, cubed keys, halves of either sign concatenated."""
    q, k, v = s["q"], s["k"], s["v"]
    norm = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + torch.tanh(norm))
    q = torch.cat([(F.relu(q) / norm) ** power, (F.relu(-q) / norm) ** power], dim=-1)
    k, n = torch.cat([F.relu(k) ** 3, F.relu(-k) ** 3], dim=-1), k.shape[-2]
    normalizer = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    y = q @ ((k.transpose(-2, -1) * n**-0.5) @ (v * n**-0.5)) * normalizer
    return y if module.local is None else y + _own_conv(module.local, v, grid)


def polapp(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Both streams with exponentials of concatenated halves."""
    q, k, v = s["q"], s["k"], s["v"]
    halves = torch.cat([F.relu(q), F.relu(-q)], dim=-1), torch.cat([F.relu(-q), F.relu(q)], dim=-1)
    k, n = torch.exp(torch.cat([F.relu(k), F.relu(-k)], dim=-1)) - 1, k.shape[-2]
    outputs = []
    for half, factor, values in zip(halves, module.spikiness(), v.chunk(2, dim=-1), strict=True):
        queries = torch.exp(factor * half) - 1
        normalizer = 1 / (queries @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
        outputs.append(queries @ ((k.transpose(-2, -1) * n**-0.5) @ (values * n**-0.5)) * normalizer)
    y = torch.cat(outputs, dim=-1)
    return (y if module.local is None else y + _own_conv(module.local, v, grid)) * s["g"]


def mlla(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Linear attention of ELU + 1, and the depthwise branch."""
    q, k, v = F.elu(s["q"]) + 1, F.elu(s["k"]) + 1, s["v"]
    n = k.shape[-2]
    normalizer = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    y = q @ ((k.transpose(-2, -1) * n**-0.5) @ (v * n**-0.5)) * normalizer
    return y if module.local is None else y + _own_conv(module.local, v, grid)


def ttt(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """One step of the gated units and of the filter, gradients written out, and what they then answer."""
    (q, filter_q), (k, filter_k), (v, filter_v) = (s[name].split([len(module.w1), 1], dim=1) for name in "qkv")
    n, straight, gate = k.shape[-2], k @ module.w1, k @ module.w2
    error, share = -v / (3 * n), torch.sigmoid(gate)
    first = k.transpose(-2, -1) @ (error * gate * share)
    second = k.transpose(-2, -1) @ (error * straight * share * (1 + gate * (1 - share)))
    first, second = (step / (step.norm(dim=-2, keepdim=True) + 1) for step in (first, second))
    y = (q @ (module.w1 - first)) * F.silu(q @ (module.w2 - second))
    q, k, v = (rearrange(x, "b 1 (y x) d -> 1 (b d) y x", y=grid.height) for x in (filter_q, filter_k, filter_v))
    around = F.pad(k, (1, 1, 1, 1)).unfold(2, grid.height, 1).unfold(3, grid.width, 1)
    step = (around * (-v / (3 * n))[:, :, None, None]).sum(dim=(-2, -1))[0]
    step = step / (step.flatten(1).norm(dim=1)[:, None, None] + 1)
    kernels = repeat(module.w3, "d 1 i j -> (b d) 1 i j", b=len(y)) - step[:, None]
    filtered = F.conv2d(q, kernels, padding=1, groups=len(kernels))
    return torch.cat([y, rearrange(filtered, "1 (b d) y x -> b 1 (y x) d", b=len(y))], dim=1)


def circulant(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """Two correlations by Fourier transforms, a softmax between them, then the gate."""
    # of half precision PyTorch has no transforms
    dtype = torch.promote_types(s["q"].dtype, torch.float32)
    q, k, v = (torch.fft.rfft2(s[name].unflatten(2, grid.shape).to(dtype), dim=(2, 3)) for name in "qkv")
    scores = torch.fft.irfft2(q.conj() * k, s=grid.shape, dim=(2, 3)) * grid.num_places**-0.5
    shares = scores.flatten(2, 3).softmax(dim=2).unflatten(2, grid.shape)
    y = torch.fft.irfft2(torch.fft.rfft2(shares, dim=(2, 3)).conj() * v, s=grid.shape, dim=(2, 3))
    return y.flatten(2, 3).to(s["g"].dtype) * F.silu(s["g"])


def mhla(module: Any, s: Supply, grid: TokenGrid) -> Tensor:
    """A state of each block after the other, their mixtures, and what each block's queries read of its own."""
    q, k = (
        F.relu(x * (x.square().mean(dim=(1, 3), keepdim=True) + torch.finfo(x.dtype).eps).rsqrt() * scale) + 1e-6
        for x, scale in ((s["q"], module.q_scale), (s["k"], module.k_scale))
    )
    v = torch.cat([s["v"], torch.ones_like(s["v"][..., :1])], dim=-1)
    rows, columns = ([i * size // n for i in range(n + 1)] for size, n in zip(grid.shape, module.pieces, strict=True))
    places = torch.arange(grid.num_places, device=q.device).view(grid.shape)
    blocks = [places[a:b, c:d].flatten() for a, b in pairwise(rows) for c, d in pairwise(columns)]
    states = torch.stack([k[:, :, block].transpose(-2, -1) @ v[:, :, block] for block in blocks])
    mixed = torch.einsum("ij,jbhde->ibhde", module.mixing.clamp(min=1e-6), states)
    read = torch.cat([q[:, :, block] @ state for block, state in zip(blocks, mixed, strict=True)], dim=2)
    read = read[:, :, torch.cat(blocks).argsort()]
    y = read[..., :-1] / (read[..., -1:] + 1e-6)
    return y if module.local is None else y + _own_conv(module.local, s["v"], grid)


def _own_conv(local: Any, v: Tensor, grid: TokenGrid) -> Tensor:
    """The depthwise convolution with a kernel for each channel."""
    image = rearrange(v, "b h (y x) d -> b (h d) y x", y=grid.height)
    image = F.conv2d(image, local.weight, local.bias, padding=local.weight.shape[-1] // 2, groups=image.shape[1])
    return rearrange(image, "b (h d) y x -> b h (y x) d", h=v.shape[1])


def _shared_conv(local: Any, v: Tensor, grid: TokenGrid) -> Tensor:
    """The depthwise convolution whose kernels the heads share, the heads as images of the batch."""
    maps = rearrange(v, "b h (y x) d -> (b h) d y x", y=grid.height)
    maps = F.conv2d(maps, local.weight, local.bias, padding=local.weight.shape[-1] // 2, groups=maps.shape[1])
    return rearrange(maps, "(b h) d y x -> b h (y x) d", h=v.shape[1])


TEXTBOOK: dict[str, Callable[[Any, Supply, TokenGrid], Tensor]] = {
    "softmax": softmax,
    "linear": linear,
    "focused": focused,
    "inline": inline,
    "agent": agent,
    "pola": pola,
    "soft": soft,
    "mala": mala,
    "rala": rala,
    "nala": nala,
    "polapp": polapp,
    "mlla": mlla,
    "ttt": ttt,
    "circulant": circulant,
    "mhla": mhla,
}
"""By mechanism: its module, its inputs and their grid (no prefix, no padding) to (b, h, n, d)."""
