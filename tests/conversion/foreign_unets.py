"""U-Nets as people write them who draw images: attention of maps, at several sizes, and a time beside the image."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

CHANNELS, HEADS = 32, 4


class OfPixels(nn.Module):
    """One convolution to all three, heads of its own, and nothing added."""

    def __init__(self, dim, heads=HEADS, dim_head=8):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Conv2d(dim, 3 * heads * dim_head, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        height, width = x.shape[-2:]
        q, k, v = (rearrange(one, "b (h c) x y -> b h (x y) c", h=self.heads) for one in self.to_qkv(x).chunk(3, dim=1))
        out = ((q * self.scale) @ k.mT).softmax(dim=-1) @ v
        return self.to_out(rearrange(out, "b h (x y) d -> b (h d) x y", x=height, y=width))


class OfNeighbours(OfPixels):
    """Queries, keys and values of a pixel and its neighbours."""

    def __init__(self, dim):
        super().__init__(dim)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 3, padding="same", groups=2)
        self.to_out = nn.Conv2d(dim, dim, 3, padding=2, dilation=2)


class Memorizing(nn.Module):
    """The same behind a norm of its own, with keys and values that every pixel sees beside those of all pixels."""

    def __init__(self, dim, heads=HEADS, dim_head=8, count=3):
        super().__init__()
        self.heads = heads
        self.norm = Normalized(dim)
        self.mem_kv = nn.Parameter(torch.randn(2, heads, count, dim_head))
        self.to_qkv = nn.Conv2d(dim, 3 * heads * dim_head, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        height, width = x.shape[-2:]
        q, k, v = rearrange(self.to_qkv(self.norm(x)), "b (p h c) x y -> p b h (x y) c", p=3, h=self.heads)
        keys, values = (
            torch.cat([m.expand(len(x), *m.shape), one], dim=-2) for m, one in zip(self.mem_kv, (k, v), strict=True)
        )
        out = F.scaled_dot_product_attention(q, keys, values)
        return self.to_out(rearrange(out, "b h (x y) d -> b (h d) x y", x=height, y=width))


class Normalized(nn.Module):
    """Vectors of one length, times a number for each channel."""

    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.rand(1, dim, 1, 1) + 0.5)

    def forward(self, x):
        return F.normalize(x, dim=1) * self.g * x.shape[1] ** 0.5


class OfVectors(nn.Module):
    """Convolutions of rows, each head's queries, keys and values together, a norm in front, and the map added."""

    def __init__(self, dim, heads=HEADS):
        super().__init__()
        self.num_heads = heads
        self.norm = nn.GroupNorm(8, dim)
        self.qkv = nn.Conv1d(dim, 3 * dim, 1)
        self.proj_out = nn.Conv1d(dim, dim, 1)

    def forward(self, x):
        b, c, *sides = x.shape
        x = x.reshape(b, c, -1)
        q, k, v = self.qkv(self.norm(x)).reshape(b * self.num_heads, -1, x.shape[-1]).chunk(3, dim=1)
        scale = 1 / math.sqrt(math.sqrt(q.shape[1]))
        weights = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), dim=-1)
        out = torch.einsum("bts,bcs->bct", weights, v).reshape(b, c, -1)
        return (x + self.proj_out(out)).reshape(b, c, *sides)


class OfOneHead(nn.Module):
    """Four convolutions of one pixel, as autoencoders of latents have them."""

    def __init__(self, dim, over=1.0):
        super().__init__()
        self.over = over
        self.norm = nn.GroupNorm(8, dim)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(dim, dim, 1) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        b, c, height, width = y.shape
        q, k, v = (one(y).reshape(b, c, height * width) for one in (self.q, self.k, self.v))
        weights = torch.bmm(q.permute(0, 2, 1), k).mul(int(c) ** -0.5).softmax(dim=2)
        y = torch.bmm(v, weights.permute(0, 2, 1)).reshape(b, c, height, width)
        return (x + self.proj_out(y)) / self.over


class OfOneHeadScaled(OfOneHead):
    """The same, so that the sum of both has the variance of one."""

    def __init__(self, dim):
        super().__init__(dim, over=math.sqrt(2))


class OfLinear(nn.Module):
    """Linear layers, and a time that nothing is made of; the norm is there and is not called with maps."""

    def __init__(self, dim, heads=HEADS):
        super().__init__()
        self.n_heads, self.d_k = heads, dim // heads
        self.norm = nn.LayerNorm(dim)
        self.projection = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x, t=None):
        b, c, height, width = x.shape
        x = x.view(b, c, -1).permute(0, 2, 1)
        q, k, v = self.projection(self.norm(x)).view(b, -1, self.n_heads, 3 * self.d_k).chunk(3, dim=-1)
        weights = torch.einsum("bihd,bjhd->bijh", q, k).mul(self.d_k**-0.5).softmax(dim=2)
        out = self.output(torch.einsum("bijh,bjhd->bihd", weights, v).reshape(b, -1, c)) + x
        return out.permute(0, 2, 1).view(b, c, height, width)


class OfPlaces(nn.Module):
    """Fewer channels of queries and keys, nothing behind, and a number that weighs what is added."""

    def __init__(self, dim):
        super().__init__()
        self.query_conv, self.key_conv = nn.Conv2d(dim, dim // 8, 1), nn.Conv2d(dim, dim // 8, 1)
        self.value_conv = nn.Conv2d(dim, dim, 1)
        self.gamma = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x):
        b, _, height, width = x.shape
        energy = torch.bmm(self.query_conv(x).flatten(2).permute(0, 2, 1), self.key_conv(x).flatten(2))
        out = torch.bmm(self.value_conv(x).flatten(2), energy.softmax(dim=-1).permute(0, 2, 1))
        return self.gamma * out.view(b, -1, height, width) + x


class OfTokens(nn.Module):
    """A map's tokens through PyTorch's own layer, with an MLP behind."""

    def __init__(self, dim, heads=HEADS):
        super().__init__()
        self.mha = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln = nn.LayerNorm(dim)
        self.ff_self = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        height, width = x.shape[-2:]
        tokens = rearrange(x, "b c h w -> b (h w) c")
        normed = self.ln(tokens)
        tokens = tokens + self.mha(normed, normed, normed)[0]
        return rearrange(tokens + self.ff_self(tokens), "b (h w) c -> b c h w", h=height, w=width)


class Plain(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        return self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class OfBlocks(nn.Module):
    """Blocks of tokens between two convolutions, as transformers within U-Nets are."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.GroupNorm(8, dim)
        self.proj_in, self.proj_out = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1)
        self.transformer_blocks = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(dim), "attn": Plain(dim)})])

    def forward(self, x):
        height, width = x.shape[-2:]
        tokens = rearrange(self.proj_in(self.norm(x)), "b c h w -> b (h w) c")
        for block in self.transformer_blocks:
            tokens = tokens + block["attn"](block["norm"](tokens))
        return x + self.proj_out(rearrange(tokens, "b (h w) c -> b c h w", h=height, w=width))


class Added(nn.Module):
    """A norm in front of something, and the map added behind it."""

    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.GroupNorm(1, dim), fn

    def forward(self, x):
        return x + self.fn(self.norm(x))


class Residual(nn.Module):
    def __init__(self, dim_in, dim, time_dim):
        super().__init__()
        self.block1 = nn.Sequential(nn.GroupNorm(8, dim_in), nn.SiLU(), nn.Conv2d(dim_in, dim, 3, padding=1))
        self.time = nn.Linear(time_dim, dim)
        self.block2 = nn.Sequential(nn.GroupNorm(8, dim), nn.SiLU(), nn.Conv2d(dim, dim, 3, padding=1))
        self.shortcut = nn.Conv2d(dim_in, dim, 1) if dim_in != dim else nn.Identity()

    def forward(self, x, time):
        return self.shortcut(x) + self.block2(self.block1(x) + self.time(time)[:, :, None, None])


ATTENTION = {
    "pixels": lambda dim: Added(dim, OfPixels(dim)),
    "neighbours": OfNeighbours,
    "memory": Memorizing,
    "vectors": OfVectors,
    "one head": OfOneHead,
    "one head, scaled": OfOneHeadScaled,
    "linear": OfLinear,
    "places": OfPlaces,
    "tokens": OfTokens,
    "blocks": OfBlocks,
}


class UNet(nn.Module):
    """Images (b, 3, y, x) and times (b,) to noise; attention at a half and a quarter of the size, and between."""

    def __init__(self, attention, dim=CHANNELS):
        super().__init__()
        make = ATTENTION[attention]
        self.time_mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, 2 * dim))
        self.init_conv = nn.Conv2d(3, dim, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            self.downs.append(nn.ModuleList([Residual(dim, dim, 2 * dim), nn.AvgPool2d(2), make(dim)]))
            self.ups.append(nn.ModuleList([Residual(2 * dim, dim, 2 * dim), make(dim)]))
        self.mid1 = Residual(dim, dim, 2 * dim)
        self.mid_attn1 = make(dim)
        self.final = nn.Conv2d(dim, 3, 1)
        self.dim = dim

    def embedded(self, time):
        turns = time[:, None].float() * torch.exp(torch.arange(self.dim // 2) * -0.3).to(time.device)
        return self.time_mlp(torch.cat([turns.sin(), turns.cos()], dim=1).to(self.final.weight))

    def forward(self, x, time):
        time, left = self.embedded(time), []
        x = self.init_conv(x)
        for residual, smaller, attend in self.downs:
            x = attend(smaller(residual(x, time)))
            left.append(x)
        x = self.mid_attn1(self.mid1(x, time))
        for residual, attend in self.ups:
            beside = left.pop()
            x = attend(residual(torch.cat([F.interpolate(x, beside.shape[-2:]), beside], dim=1), time))
        return self.final(F.interpolate(x, scale_factor=2))


def unet(name):
    """One whose queries choose: weights are as different as those of trained layers."""
    torch.manual_seed(0)
    model = UNet(name).eval()
    with torch.no_grad():
        for path, one in model.named_parameters():
            if one.dim() > 1 and any(part in path for part in ("qkv", "projection", "in_proj", ".q.", ".k.")):
                one.mul_(3)
    return model
