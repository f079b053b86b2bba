"""The released networks of the newer mechanisms, written out from their papers' facts: layouts, and what they compute.

A layout is {entry: shape}, its buffers marked by `KEPT`; a network is a function of such a state dict and an image. All
weights are explicit (n×n) but those of softmax and of inner models. Nothing here is ours but the spelling: it is what
networks of every size are held against of which no reference numbers are at hand.
"""

import math
import re

import torch
import torch.nn.functional as F

KEPT = re.compile(r"num_batches_tracked$|RoPE(_linear)?\.angle$|rope\.rotations$|piece_attn\.conv\.weight$")
"""What a network computes for itself."""


def conv(name, out, into, size, *, bias=True):
    return {f"{name}.weight": (out, into, size, size)} | ({f"{name}.bias": (out,)} if bias else {})


def linear(name, out, into, *, bias=True, taps=()):
    return {f"{name}.weight": (out, into, *taps)} | ({f"{name}.bias": (out,)} if bias else {})


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def batch_norm(name, width):
    return norm(name, width) | {
        f"{name}.running_mean": (width,),
        f"{name}.running_var": (width,),
        f"{name}.num_batches_tracked": (),
    }


def blocks_of(depths):
    return [(s, j) for s, depth in enumerate(depths) for j in range(depth)]


# layouts


def mavit_layout(kind, *, widths, depths, heads, head_width, ratio=3.5):
    """Of MALA, RALA, NaLa and PolaFormer++; the first two stages are linear attention."""
    e, taps = widths[0], (1, 1) if kind in ("mala", "rala") else ()
    found = {}
    for i, (into, out) in enumerate([(3, e // 2), (e // 2, e // 2), (e // 2, e // 2), (e // 2, e)]):
        found |= conv(f"patch_embed.proj.{3 * i}", out, into, 3) | batch_norm(f"patch_embed.proj.{3 * i + 1}", out)
    for s, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        d, hidden = width // heads[s], int(ratio * width)
        found[f"layers.{s}.RoPE.angle"] = (d // 2,)
        if kind == "polapp":
            found[f"layers.{s}.RoPE_linear.angle"] = (d,)
        for j in range(depth):
            at = f"layers.{s}.blocks.{j}."
            found |= {f"{at}gamma_1": (1, width, 1, 1), f"{at}gamma_2": (1, width, 1, 1)}
            found |= norm(f"{at}norm1.norm", width)
            if kind == "polapp" and s < 2:
                found |= {f"{at}attn.s1": (1, heads[s], 1, 2 * d), f"{at}attn.s2": (1, heads[s], 1, 2 * d)}
            fused = "qkvg" if kind == "nala" or (kind == "polapp" and s < 2) else "qkvo"
            found |= linear(f"{at}attn.{fused}", 4 * width, width, taps=taps)
            found |= conv(f"{at}attn.lepe", width, 1, 5)
            found |= linear(f"{at}attn.{'out_proj' if kind == 'nala' else 'proj'}", width, width, taps=taps)
            if kind == "nala":
                found |= norm(f"{at}attn.ln", width)
            found |= norm(f"{at}norm2.norm", width)
            found |= linear(f"{at}ffn.fc1", hidden, width, taps=taps) | linear(f"{at}ffn.fc2", width, hidden, taps=taps)
            found |= conv(f"{at}ffn.dwconv", hidden, 1, 3)
            for name in ("cpe1", "cpe2") if kind == "nala" else ("pos",):
                found |= conv(at + name, width, 1, 3)
        if s < len(widths) - 1:
            found |= conv(f"layers.{s}.downsample.reduction", widths[s + 1], width, 3)
            found |= batch_norm(f"layers.{s}.downsample.norm", widths[s + 1])
    found |= linear("proj", head_width, widths[-1], taps=() if kind == "nala" else (1, 1))
    return found | batch_norm("norm", head_width) | conv("head", 1000, head_width, 1)


def halving_layout(s, before, width):
    at = f"layers.{s}.downsample.conv."
    return (
        conv(f"{at}0.conv", 4 * width, before, 1)
        | conv(f"{at}1.conv", 4 * width, 1, 3)
        | conv(f"{at}2.conv", width, 4 * width, 1)
        | batch_norm(f"{at}2.norm", width)
    )


def mlla_layout(*, widths, depths, heads, px=224):
    e, found = widths[0], {}
    for name, out, into, size in (
        ("conv1", e // 2, 3, 3),
        ("conv2.0", e // 2, e // 2, 3),
        ("conv2.1", e // 2, e // 2, 3),
        ("conv3.0", 4 * e, e // 2, 3),
        ("conv3.1", e, 4 * e, 1),
    ):
        found |= conv(f"patch_embed.{name}.conv", out, into, size, bias=False)
        found |= batch_norm(f"patch_embed.{name}.norm", out)
    for s, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        side = px // 4 >> s
        for j in range(depth):
            at = f"layers.{s}.blocks.{j}."
            found |= conv(f"{at}cpe1", width, 1, 3) | norm(f"{at}norm1", width)
            found |= linear(f"{at}in_proj", width, width) | linear(f"{at}act_proj", width, width)
            found |= conv(f"{at}dwc", width, 1, 3) | linear(f"{at}attn.qk", 2 * width, width)
            found |= conv(f"{at}attn.lepe", width, 1, 3)
            found[f"{at}attn.rope.rotations"] = (side, side, width // 2, 2)
            found |= linear(f"{at}out_proj", width, width) | conv(f"{at}cpe2", width, 1, 3)
            found |= norm(f"{at}norm2", width)
            found |= linear(f"{at}mlp.fc1", 4 * width, width) | linear(f"{at}mlp.fc2", width, 4 * width)
        if s < len(widths) - 1:
            found |= halving_layout(s, width, widths[s + 1])
    return found | norm("norm", widths[-1]) | linear("head", 1000, widths[-1])


def ttt_attention_layout(at, width, heads):
    d = width // heads
    return (
        {f"{at}w1": (1, heads, d, d), f"{at}w2": (1, heads, d, d), f"{at}w3": (d, 1, 3, 3)}
        | linear(f"{at}qkv", 3 * width + 3 * d, width)
        | linear(f"{at}proj", width, width + d)
    )


def hvit3_layout(*, widths, depths, heads, px=224):
    e, found = widths[0], {}
    sizes = [(e // 2, 3, 3), (e // 2, e // 2, 3), (e // 2, e // 2, 3), (4 * e, e // 2, 3), (e, 4 * e, 1)]
    for i, (out, into, size) in enumerate(sizes):
        found |= conv(f"patch_embed.conv.{i}.conv", out, into, size, bias=False)
        found |= batch_norm(f"patch_embed.conv.{i}.norm", out)
    for s, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        side = px // 4 >> s
        for j in range(depth):
            at = f"layers.{s}.blocks.{j}."
            found |= conv(f"{at}cpe", width, 1, 3) | norm(f"{at}norm1", width)
            found[f"{at}rope.rotations"] = (side, side, width // 2, 2)
            found |= ttt_attention_layout(f"{at}attn.", width, heads[s]) | norm(f"{at}norm2", width)
            found |= linear(f"{at}mlp.fc1", 4 * width, width) | conv(f"{at}mlp.dwc", 4 * width, 1, 3)
            found |= linear(f"{at}mlp.fc2", width, 4 * width)
        if s < len(widths) - 1:
            found |= halving_layout(s, width, widths[s + 1])
    return found | batch_norm("norm", widths[-1]) | linear("head", 1000, widths[-1])


def plain_layout(kind, *, width, depth, heads, side=14, pieces=(4, 4)):
    """Of ViT³, CA-DeiT and DeiT with MHLA."""
    found = {"pos_embed": (1, side * side, width)} if kind == "mhla" else {}
    found |= conv("patch_embed.proj", width, 3, 16)
    for j in range(depth):
        at = f"blocks.{j}."
        found |= {} if kind == "mhla" else conv(f"{at}cpe", width, 1, 3)
        found |= norm(f"{at}norm1", width)
        if kind == "ttt":
            found |= ttt_attention_layout(f"{at}attn.", width, heads)
        elif kind == "circulant":
            found |= linear(f"{at}attn.qkv", 3 * width, width, bias=False)
            found |= linear(f"{at}attn.gate.0", width, width) | linear(f"{at}attn.proj", width, width)
        else:
            found |= norm(f"{at}attn.norm", width) | linear(f"{at}attn.to_qkv", 3 * width, width, bias=False)
            found |= {f"{at}attn.q_norm.weight": (width,), f"{at}attn.k_norm.weight": (width,)}
            found |= conv(f"{at}attn.lepe", width, 1, 5)
            found[f"{at}attn.piece_attn.conv.weight"] = (math.prod(pieces), math.prod(pieces), 1, 1)
            found |= linear(f"{at}attn.to_out.0", width, width)
        found |= norm(f"{at}norm2", width)
        found |= linear(f"{at}mlp.fc1", 4 * width, width) | linear(f"{at}mlp.fc2", width, 4 * width)
    return found | norm("fc_norm" if kind == "mhla" else "norm", width) | linear("head", 1000, width)


def num_params(layout):
    """Parameters of a layout: all but buffers, with MHLA's matrices, which learn."""
    buffers = re.compile(r"num_batches_tracked$|running_(mean|var)$|RoPE(_linear)?\.angle$|rope\.rotations$")
    return sum(math.prod(shape) for name, shape in layout.items() if not buffers.search(name))


# parts


class Entries:
    """A state dict's layers by name, on maps (b, c, y, x) and tokens (b, n, c)."""

    def __init__(self, state):
        self.state = state

    def __getitem__(self, name):
        return self.state[name]

    def has(self, name):
        return f"{name}.weight" in self.state

    def both(self, name):
        return self.state[f"{name}.weight"], self.state.get(f"{name}.bias")

    def linear(self, name, x):
        weight, bias = self.both(name)
        return F.linear(x, weight.flatten(1), bias)

    def conv(self, name, x, *, stride=1):
        weight, bias = self.both(name)
        groups = x.shape[1] if weight.shape[1] == 1 and x.shape[1] > 1 else 1
        return F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2, groups=groups)

    def on_map(self, name, x, shape):
        return tokens(self.conv(name, image(x, shape)))

    def norm(self, name, x, eps):
        return F.layer_norm(x, x.shape[-1:], *self.both(name), eps)

    def batch_norm(self, name, x):
        mean, var = self.state[f"{name}.running_mean"], self.state[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, *self.both(name), eps=1e-5)

    def conv_norm(self, name, x, *, stride=1):
        return self.batch_norm(f"{name}.norm", self.conv(f"{name}.conv", x, stride=stride))

    def halved(self, s, x):
        """Between the stages of MLLA and H-ViT³."""
        at = f"layers.{s}.downsample.conv."
        x = F.relu(self.conv(f"{at}0.conv", x))
        x = F.relu(self.conv(f"{at}1.conv", x, stride=2))
        return self.conv_norm(f"{at}2", x)


def tokens(x):
    return x.flatten(2).mT


def image(x, shape):
    return x.mT.unflatten(2, tuple(shape))


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def turned(x, shape, exponents):
    """Neighbouring channels turn by row·w in the first half, by column·w in the second; w = 10000^-exponent."""
    frequencies = 10000.0 ** -torch.tensor(exponents, dtype=x.dtype)
    rows, columns = (torch.arange(size, dtype=x.dtype) for size in shape)
    by_row = (rows[:, None] * frequencies)[:, None].expand(-1, shape[1], -1)
    by_column = (columns[:, None] * frequencies)[None].expand(shape[0], -1, -1)
    angles = torch.cat([by_row, by_column], dim=-1).flatten(0, 1)
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()
    return torch.stack(pairs, dim=-1).flatten(-2)


def turned_in_heads(x, shape):
    count = x.shape[-1] // 4
    return turned(x, shape, [m / max(count - 1, 1) for m in range(count)])


def turned_across_heads(x, shape):
    count = x.shape[-1] // 4
    return turned(x, shape, [m / count for m in range(count)])


def elu1(x):
    return torch.where(x > 0, x + 1, x.exp())


# mechanisms: explicit weights of heads (b, h, n, d) on a map


def mala_weights(q, k, shape):
    q, k, s = elu1(q), elu1(k), q.shape[-1] ** -0.5
    z = (s * q @ k.mT).mean(-1, keepdim=True)
    product = s * turned_in_heads(q, shape) @ turned_in_heads(k, shape).mT
    return (product * (1 + 1 / (z + 1e-6)) - z) / k.shape[-2]


def rala_weights(q, k, shape):
    q, k = elu1(q), elu1(k)
    shares = (q.mean(-2, keepdim=True) @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    divisor = (shares * (q @ k.mT)).sum(-1, keepdim=True) + 1e-6
    return shares * (turned_in_heads(q, shape) @ turned_in_heads(k, shape).mT) / divisor


def nala_weights(q, k, shape):
    r = q.norm(dim=-1, keepdim=True)
    p = 3 * (0.5 + r.tanh())
    halves = [(F.relu(q) / r) ** p, (F.relu(-q) / r) ** p], [F.relu(k) ** 3, F.relu(-k) ** 3]
    divisor = sum(a @ b.mT for a, b in zip(*halves, strict=True)).mean(-1, keepdim=True) + 1e-6
    product = sum(turned_in_heads(a, shape) @ turned_in_heads(b, shape).mT for a, b in zip(*halves, strict=True))
    return product / k.shape[-2] / divisor


def polapp_weights(q, k, s1, s2, shape):
    """Of both streams."""
    keys = torch.cat([F.relu(k), F.relu(-k)], -1).exp() - 1
    found = []
    for first, second, s in ((q, -q, s1), (-q, q, s2)):
        queries = (s.sigmoid() * torch.cat([F.relu(first), F.relu(second)], -1)).exp() - 1
        divisor = (queries @ keys.mT).mean(-1, keepdim=True) + 1e-6
        product = turned_in_heads(queries, shape) @ turned_in_heads(keys, shape).mT
        found.append(product / k.shape[-2] / divisor)
    return found


def softmax_weights(q, k, shape):
    q, k = turned_in_heads(q, shape), turned_in_heads(k, shape)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


WEIGHTS = {"mala": mala_weights, "rala": rala_weights, "nala": nala_weights}


def circulant_answers(q, k, v, shape):
    """Tokens (b, n, c): each channel by itself, offset by offset."""
    q, k, v = (image(x, shape) for x in (q, k, v))
    offsets = [(dy, dx) for dy in range(shape[0]) for dx in range(shape[1])]

    def shifted(x, by):
        return x.roll([-by[0], -by[1]], dims=(2, 3))

    scores = torch.stack([(q * shifted(k, by)).sum((2, 3)) for by in offsets]) * math.prod(shape) ** -0.5
    shares = scores.softmax(0)
    return tokens(sum(w[..., None, None] * shifted(v, by) for w, by in zip(shares, offsets, strict=True)))


def ttt_answers(e, at, x, shape, heads, rope):
    """Gradients of the inner losses by autograd."""
    width = x.shape[-1]
    d, n = width // heads, x.shape[1]
    q, k, v, *of_filter = e.linear(f"{at}qkv", x).split([width, width, width, d, d, d], dim=-1)
    if rope:
        q, k = turned_across_heads(q, shape), turned_across_heads(k, shape)
    q, k, v = (heads_of(part, heads) for part in (q, k, v))
    found = []
    with torch.enable_grad():
        for i in range(len(x)):
            w1, w2 = (e[f"{at}w{j}"][0].detach().requires_grad_() for j in (1, 2))
            w3 = e[f"{at}w3"].detach().requires_grad_()
            loss = -(((k[i] @ w1) * F.silu(k[i] @ w2)) * v[i]).sum() / (3 * n)
            g1, g2 = torch.autograd.grad(loss, (w1, w2))
            queries, keys, values = (image(part[i : i + 1], shape) for part in of_filter)
            loss = -(F.conv2d(keys, w3, padding=1, groups=d) * values).sum() / (3 * n)
            (g3,) = torch.autograd.grad(loss, w3)
            u1, u2 = (w - g / (g.norm(dim=-2, keepdim=True) + 1) for w, g in ((w1, g1), (w2, g2)))
            u3 = w3 - g3 / (g3.flatten(1).norm(dim=1)[:, None, None, None] + 1)
            y = ((q[i] @ u1) * F.silu(q[i] @ u2))[None]
            filtered = F.conv2d(queries, u3, padding=1, groups=d)
            found.append(torch.cat([merged(y), tokens(filtered)], dim=-1).detach())
    return e.linear(f"{at}proj", torch.cat(found))


def block_start(pieces):
    """MHLA's matrix as it starts, "linear"."""
    places = [(float(i), float(j)) for i in range(pieces[0]) for j in range(pieces[1])]
    distances = torch.tensor([[math.dist(a, b) for b in places] for a in places], dtype=torch.float64)
    near = 1 - distances / distances.max()
    return near / near.sum(0, keepdim=True)


def mhla_weights(q, k, mixing, shape, pieces, normaliser):
    """Of normed queries and keys (b, h, n, d) in raster order."""
    q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
    side = shape[0] // pieces[0], shape[1] // pieces[1]
    places = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    blocks = torch.tensor([i // side[0] * pieces[1] + j // side[1] for i, j in places])
    within = torch.tensor([i % side[0] * side[1] + j % side[1] for i, j in places])
    products = q @ k.mT
    mixed = mixing[blocks][:, blocks] * products
    if normaliser == "paper":
        return mixed / (mixed.sum(-1, keepdim=True) + 1e-6)
    # of the query that stands where this one does in each block, with that block's keys
    of_block = torch.stack([products[..., blocks == b].sum(-1) for b in range(math.prod(pieces))], dim=-1)
    of_place = torch.stack([of_block[:, :, blocks == b, b] for b in range(math.prod(pieces))], dim=-1)
    order = torch.stack([within[blocks == b] for b in range(math.prod(pieces))])
    assert (order == order[:1]).all()
    total = (of_place[:, :, within] * mixing[blocks]).sum(-1, keepdim=True) + 1e-6
    return mixed / total


# networks


def mavit(kind, state, x, heads):
    e = Entries(state)
    for i in range(4):
        x = e.batch_norm(
            f"patch_embed.proj.{3 * i + 1}", e.conv(f"patch_embed.proj.{3 * i}", x, stride=(2, 1, 1, 2)[i])
        )
        x = F.gelu(x) if i < 3 else x
    for s in range(4):
        shape = x.shape[2:]
        for j in range(_count(state, f"layers.{s}.blocks.")):
            at = f"layers.{s}.blocks.{j}."
            x = x + e.conv(at + ("cpe1" if kind == "nala" else "pos"), x)
            y = gated_attention(
                kind if s < 2 else "softmax", e, at, e.norm(f"{at}norm1.norm", tokens(x), 1e-6), shape, heads[s]
            )
            x = x + e[f"{at}gamma_1"] * image(y, shape)
            x = x + e.conv(f"{at}cpe2", x) if kind == "nala" else x
            t = image(F.gelu(e.linear(f"{at}ffn.fc1", e.norm(f"{at}norm2.norm", tokens(x), 1e-6))), shape)
            t = t + e.conv(f"{at}ffn.dwconv", t)
            x = x + e[f"{at}gamma_2"] * image(e.linear(f"{at}ffn.fc2", tokens(t)), shape)
        if s < 3:
            x = e.batch_norm(f"layers.{s}.downsample.norm", e.conv(f"layers.{s}.downsample.reduction", x, stride=2))
    x = image(e.linear("proj", tokens(x)), x.shape[2:])
    return e.linear("head", F.silu(e.batch_norm("norm", x)).mean((2, 3)))


def gated_attention(kind, e, at, x, shape, heads):
    at = f"{at}attn."
    fused = "qkvg" if e.has(f"{at}qkvg") else "qkvo"
    q, k, v, g = e.linear(at + fused, x).chunk(4, dim=-1)
    local = e.on_map(f"{at}lepe", v, shape)
    q, k, v = (heads_of(part, heads) for part in (q, k, v))
    if kind == "polapp":
        weights = polapp_weights(q, k, e[f"{at}s1"], e[f"{at}s2"], shape)
        y = torch.cat([w @ part for w, part in zip(weights, v.chunk(2, dim=-1), strict=True)], dim=-1)
    else:
        y = WEIGHTS.get(kind, softmax_weights)(q, k, shape) @ v
    y = merged(y) + local
    if e.has(f"{at}ln"):
        return e.linear(f"{at}out_proj", e.norm(f"{at}ln", y, 1e-5) * F.silu(g))
    return e.linear(f"{at}proj", y * g)


def mlla(state, x, heads):
    e = Entries(state)
    x = F.relu(e.conv_norm("patch_embed.conv1", x, stride=2))
    x = x + e.conv_norm("patch_embed.conv2.1", F.relu(e.conv_norm("patch_embed.conv2.0", x)))
    x = e.conv_norm("patch_embed.conv3.1", F.relu(e.conv_norm("patch_embed.conv3.0", x, stride=2)))
    for s in range(4):
        shape = x.shape[2:]
        x = tokens(x)
        for j in range(_count(state, f"layers.{s}.blocks.")):
            at = f"layers.{s}.blocks.{j}."
            x = x + e.on_map(f"{at}cpe1", x, shape)
            u = e.norm(f"{at}norm1", x, 1e-5)
            gate = F.silu(e.linear(f"{at}act_proj", u))
            t = F.silu(e.on_map(f"{at}dwc", e.linear(f"{at}in_proj", u), shape))
            q, k = (elu1(part) for part in e.linear(f"{at}attn.qk", t).chunk(2, dim=-1))
            of_heads = [heads_of(part, heads[s]) for part in (q, k)]
            product, plain = (
                a @ b.mT
                for a, b in ([heads_of(turned_across_heads(part, shape), heads[s]) for part in (q, k)], of_heads)
            )
            weights = product / x.shape[1] / (plain.mean(-1, keepdim=True) + 1e-6)
            y = merged(weights @ heads_of(t, heads[s])) + e.on_map(f"{at}attn.lepe", t, shape)
            x = x + e.linear(f"{at}out_proj", y * gate)
            x = x + e.on_map(f"{at}cpe2", x, shape)
            x = x + e.linear(f"{at}mlp.fc2", F.gelu(e.linear(f"{at}mlp.fc1", e.norm(f"{at}norm2", x, 1e-5))))
        x = image(x, shape)
        x = e.halved(s, x) if s < 3 else x
    return e.linear("head", e.norm("norm", tokens(x), 1e-5).mean(1))


def hvit3(state, x, heads):
    e = Entries(state)
    for i in range(5):
        x = e.conv_norm(f"patch_embed.conv.{i}", x, stride=2 if i in (0, 3) else 1)
        x = F.relu(x) if i < 4 else x
    for s in range(4):
        shape = x.shape[2:]
        x = tokens(x)
        for j in range(_count(state, f"layers.{s}.blocks.")):
            at = f"layers.{s}.blocks.{j}."
            x = x + e.on_map(f"{at}cpe", x, shape)
            x = x + ttt_answers(e, f"{at}attn.", e.norm(f"{at}norm1", x, 1e-5), shape, heads[s], rope=True)
            t = F.gelu(e.linear(f"{at}mlp.fc1", e.norm(f"{at}norm2", x, 1e-5)))
            x = x + e.linear(f"{at}mlp.fc2", F.gelu(t + e.on_map(f"{at}mlp.dwc", t, shape)))
        x = image(x, shape)
        x = e.halved(s, x) if s < 3 else x
    return e.linear("head", e.batch_norm("norm", x).mean((2, 3)))


def plain(kind, state, x, heads, *, pieces=(4, 4), normaliser="released"):
    e = Entries(state)
    x = F.pad(x, (16,) * 4) if kind == "mhla" else x
    x = F.conv2d(x, *e.both("patch_embed.proj"), stride=16)
    shape, x = x.shape[2:], tokens(x)
    x = x + e["pos_embed"] if kind == "mhla" else x
    for j in range(_count(state, "blocks.")):
        at = f"blocks.{j}."
        x = x if kind == "mhla" else x + e.on_map(f"{at}cpe", x, shape)
        y = e.norm(f"{at}norm1", x, 1e-6)
        if kind == "ttt":
            y = ttt_answers(e, f"{at}attn.", y, shape, heads, rope=False)
        elif kind == "circulant":
            q, k, v = e.linear(f"{at}attn.qkv", y).chunk(3, dim=-1)
            gate = F.silu(e.linear(f"{at}attn.gate.0", y))
            y = e.linear(f"{at}attn.proj", circulant_answers(q, k, v, shape) * gate)
        else:
            y = e.norm(f"{at}attn.norm", y, 1e-5)
            q, k, v = e.linear(f"{at}attn.to_qkv", y).chunk(3, dim=-1)
            local = e.on_map(f"{at}attn.lepe", v, shape)
            eps = torch.finfo(x.dtype).eps
            q, k = (
                part / (part.square().mean(-1, keepdim=True) + eps).sqrt() * e[f"{at}attn.{name}_norm.weight"]
                for name, part in (("q", q), ("k", k))
            )
            mixing = e[f"{at}attn.piece_attn.conv.weight"].flatten(1)
            weights = mhla_weights(heads_of(q, heads), heads_of(k, heads), mixing, shape, pieces, normaliser)
            y = e.linear(f"{at}attn.to_out.0", merged(weights @ heads_of(v, heads)) + local)
        x = x + y
        x = x + e.linear(f"{at}mlp.fc2", F.gelu(e.linear(f"{at}mlp.fc1", e.norm(f"{at}norm2", x, 1e-6))))
    if kind == "mhla":
        return e.linear("head", e.norm("fc_norm", x.mean(1), 1e-6))
    return e.linear("head", e.norm("norm", x, 1e-6).mean(1))


def _count(state, prefix):
    return 1 + max(
        (int(name[len(prefix) :].partition(".")[0]) for name in state if name.startswith(prefix)), default=-1
    )
