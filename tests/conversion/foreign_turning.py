"""Networks of anybody's own, small, whose attention layers have rotary positions, as people write them."""

import math

import torch
from foreign_own import DIM, HEADS
from torch import nn
from torch.nn import functional as F

WIDTH = DIM // HEADS


class Attn(nn.Module):
    """Queries and keys are turned by `turned`, between projections and PyTorch's fused attention."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = HEADS, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attn_drop = nn.Dropout(0.0)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def mixed(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p)
        return self.proj(y.transpose(1, 2).flatten(2))


def places_of(height, width, device):
    """Rows and columns of a map's tokens."""
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    return y.flatten(), x.flatten()


def halves_turned(t):
    first, second = t.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class TablesHanded(Attn):
    """As DINOv3's: sines and cosines of the map's tokens are handed over, and those in front are not turned."""

    def forward(self, x, attn_bias=None, rope=None):
        qkv = self.heads(x)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if rope is not None:
            sin, cos = rope
            front = q.shape[-2] - sin.shape[-2]
            for t in (q, k):
                t[:, :, front:] = t[:, :, front:] * cos + halves_turned(t[:, :, front:]) * sin
        return self.mixed(q, k, v)


class ComplexNumbers(Attn):
    """As RoPE-ViT's, of neighbours, written into queries and keys that have a norm, in a product of their own."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, freqs_cis):
        q, k, v = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        for t in (q, k):
            pairs = torch.view_as_complex(t[:, :, 1:].float().unflatten(-1, (-1, 2)).contiguous())
            t[:, :, 1:] = torch.view_as_real(pairs * freqs_cis).flatten(-2)
        attn = (q * WIDTH**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """As CroCo's: half the channels turn with the row, half with the column, each half by halves."""

    def forward(self, tokens, positions):
        turned = []
        for part, place in zip(tokens.chunk(2, dim=-1), positions.unbind(-1), strict=True):
            count = part.shape[-1] // 2
            angles = place[:, None, :, None] * 100.0 ** -(torch.arange(count, device=place.device) / count)
            angles = torch.cat([angles, angles], dim=-1)
            turned.append((part * angles.cos() + halves_turned(part) * angles.sin()).to(part.dtype))
        return torch.cat(turned, dim=-1)


class PositionsHanded(Attn):
    """As DUSt3R's and VGGT's: rows and columns of each image's tokens, and a module that turns."""

    def __init__(self, rope=None):
        super().__init__()
        self.rope = rope or Positions()

    def forward(self, x, pos=None):
        q, k, v = self.heads(x)
        return self.mixed(self.rope(q, pos), self.rope(k, pos), v)


class Within(Attn):
    """The layer is told the map, and makes tables that differ from head to head, for einsum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", torch.randn(2, HEADS, WIDTH // 2))

    def forward(self, x, H, W):
        q, k, v = self.heads(x)
        rows, columns = places_of(H, W, x.device)
        self.last = H, W
        angles = rows[None, :, None] * self.freqs[0, :, None] + columns[None, :, None] * self.freqs[1, :, None]
        angles = F.pad(angles, (0, 0, 1, 0))
        cos, sin = (torch.cat([t, t], dim=-1).type_as(x) for t in (angles.cos(), angles.sin()))
        q, k = (t * cos + halves_turned(t) * sin for t in (q, k))
        attn = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(WIDTH)
        return self.proj(torch.einsum("bhij,bhjd->bihd", attn.softmax(dim=-1), v).flatten(2))


class Learned(Within):
    """Frequencies that the layer learns, and biases beside the projection."""

    def __init__(self):
        super().__init__()
        freqs = self.freqs
        del self.freqs
        self.freqs, self.qkv = nn.Parameter(freqs), nn.Linear(DIM, 3 * DIM, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))

    def heads(self, x):
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        return (self.qkv(x) + bias).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)


class Fixed(nn.Module):
    """As EVA-02's: neighbours of a map of one size, with tables."""

    def __init__(self):
        super().__init__()
        y, x = places_of(4, 4, None)
        angles = torch.cat([place[:, None] * 5.0 ** -torch.arange(3) for place in (y, x)], dim=-1)
        angles = angles.repeat_interleave(2, dim=-1)
        self.register_buffer("freqs_cos", angles.cos())
        self.register_buffer("freqs_sin", angles.sin())

    def forward(self, t):
        first, second = t.unflatten(-1, (-1, 2)).unbind(-1)
        return t * self.freqs_cos + torch.stack([-second, first], dim=-1).flatten(-2) * self.freqs_sin


class ReadsWeights(Learned):
    """As EVA-CLIP's: weights of three projections are read, and answers have a norm."""

    def __init__(self):
        super().__init__()
        del self.freqs, self.qkv
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.inner_attn_ln, self.rope = nn.LayerNorm(DIM), Fixed()

    def forward(self, x, rel_pos_bias=None, attn_mask=None):
        q = F.linear(input=x, weight=self.q_proj.weight, bias=self.q_bias)
        k = F.linear(input=x, weight=self.k_proj.weight, bias=None)
        v = F.linear(input=x, weight=self.v_proj.weight, bias=self.v_bias)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = (torch.cat([t[:, :, :1], self.rope(t[:, :, 1:])], dim=-2).type_as(v) for t in (q, k))
        attn = (q * WIDTH**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj(self.inner_attn_ln((attn @ v).transpose(1, 2).flatten(2)))


class OneTable(Attn):
    """A layer of one size, with tables of it; a quarter of the channels does not turn."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(17)[:, None] * 3.0 ** -torch.arange(3)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, dim=-1), persistent=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = (
            torch.cat([t[..., :6] * self.cos + halves_turned(t[..., :6]) * self.sin, t[..., 6:]], -1) for t in (q, k)
        )
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        y = torch.bmm(torch.bmm(q, k.mT).mul(WIDTH**-0.5).softmax(dim=-1), v)
        return self.proj(y.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2))


class TurningBlock(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.norm, self.attn, self.fc = nn.LayerNorm(DIM), attn, nn.Linear(DIM, DIM)

    def forward(self, x, *beside, **named):
        x = x + self.attn(self.norm(x), *beside, **named)
        return x + F.gelu(self.fc(x))


class TurningNetwork(nn.Module):
    """With a class token in front; what layers are handed beside tokens depends on their kind."""

    def __init__(self, layer, kind=None):
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, DIM, 8, 8), nn.Parameter(torch.zeros(1, 1, DIM))
        self.blocks = nn.ModuleList(TurningBlock(layer()) for _ in range(2))
        self.freqs = nn.Parameter(torch.randn(2, HEADS, WIDTH // 2)) if layer is ComplexNumbers else None
        self.kind, self.img_size = kind or layer, 32

    def forward(self, images):
        x = self.patch_embed(images)
        height, width = x.shape[-2:]
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x.flatten(2).mT], dim=1)
        beside, named = self.beside(height, width, x.shape[0], x.device)
        for block in self.blocks:
            x = block(x, *beside, **named)
        return x[:, 0]

    def beside(self, height, width, images, device):
        y, x = places_of(height, width, device)
        if self.kind is TablesHanded:
            angles = torch.cat([place[:, None] * 7.0 ** -torch.arange(3) for place in (y, x)], dim=-1)
            angles = torch.cat([angles, angles], dim=-1)
            return (), {"rope": (angles.sin(), angles.cos())}
        if self.kind is ComplexNumbers:
            turns = y[None, :, None] * self.freqs[0, :, None] + x[None, :, None] * self.freqs[1, :, None]
            return (torch.polar(torch.ones_like(turns), turns),), {}
        if self.kind is PositionsHanded:
            places = F.pad(torch.stack([y + 1, x + 1], dim=-1), (0, 0, 1, 0))
            return (places.expand(images, -1, -1),), {}
        return ((height, width) if self.kind in (Within, Learned) else ()), {}


TURNING = {
    "tables": TablesHanded,
    "complex": ComplexNumbers,
    "positions": PositionsHanded,
    "within": Within,
    "learned": Learned,
    "reads weights": ReadsWeights,
    "one table": OneTable,
}


def turning(name):
    torch.manual_seed(0)
    network = TurningNetwork(TURNING[name])
    for one in network.parameters():
        nn.init.normal_(one, std=0.2)
    return network.eval()
