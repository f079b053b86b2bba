"""DINOv2 and DINOv3 as torch.hub gives them, small: classes of their names that are called as theirs are."""

import torch
from torch import nn
from torch.nn import functional as F


def named(module, name):
    """A decorator: the class is known as one that is defined in `module`."""

    def rename(cls):
        cls.__module__, cls.__qualname__, cls.__name__ = module, name, name
        return cls

    return rename


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0), nn.Dropout(0)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def back(self, y):
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))


@named("dinov2.layers.attention", "MemEffAttention")
class Dinov2(Layer):
    def forward(self, x, attn_bias=None):
        return self.back(F.scaled_dot_product_attention(*self.heads(x)))


def turned(x, rope):
    """The last tokens, as many as there are angles."""
    sin, cos = rope
    front, x = x.split([x.shape[-2] - sin.shape[-2], sin.shape[-2]], dim=-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([front, x * cos + torch.cat([-second, first], dim=-1) * sin], dim=-2)


@named("dinov3.layers.attention", "SelfAttention")
class Dinov3(Layer):
    def forward(self, x, attn_bias=None, rope=None):
        q, k, v = self.heads(x)
        q, k = (turned(x, rope) for x in (q, k))
        return self.back(F.scaled_dot_product_attention(q, k, v))

    def forward_list(self, x_list, attn_bias=None, rope_list=None):
        return [self(x, rope=rope) for x, rope in zip(x_list, rope_list, strict=True)]


class Block(nn.Module):
    def __init__(self, dim, attn):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), attn, nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, **more):
        x = x + self.attn(self.norm1(x), **more)
        return x + self.mlp(self.norm2(x))


class ListedBlock(Block):
    """As DINOv3's in training with stochastic depth."""

    def forward(self, x, rope):
        x = x + self.attn.forward_list([self.norm1(x)], rope_list=[rope])[0]
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.img_size, self.proj = (64, 64), nn.Conv2d(3, dim, 16, 16)

    def forward(self, x):
        return self.proj(x)


class Dino(nn.Module):
    """Class token and registers in front; positions resampled, or turned."""

    def __init__(self, layer, *, dim=48, registers=0, registers_name="register_tokens", block=Block, depth=2):
        super().__init__()
        self.patch_embed, self.turns, self.width = PatchEmbed(dim), layer is Dinov3, dim // 4
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.registers_name = registers_name if registers else None
        if registers:
            setattr(self, registers_name, nn.Parameter(torch.zeros(1, registers, dim)))
        self.pos_embed = None if self.turns else nn.Parameter(torch.zeros(1, dim, 4, 4))
        self.blocks = nn.ModuleList(block(dim, layer(dim, 4)) for _ in range(depth))
        self.norm, self.mask_token = nn.LayerNorm(dim), nn.Parameter(torch.zeros(1, dim))

    def forward(self, images):
        x = self.patch_embed(images)
        height, width = x.shape[-2:]
        if self.pos_embed is not None:
            x = x + F.interpolate(self.pos_embed, (height, width), mode="bilinear")
        front = [self.cls_token, *([getattr(self, self.registers_name)] if self.registers_name else [])]
        x = torch.cat([*(one.expand(x.shape[0], -1, -1) for one in front), x.flatten(2).mT], dim=1)
        more = {"rope": tuple(table.to(x.device) for table in self.angles(height, width))} if self.turns else {}
        for block in self.blocks:
            x = block(x, **more)
        return self.norm(x)[:, 0]

    def angles(self, height, width):
        places = torch.cartesian_prod(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width))
        periods = 2.0 ** torch.arange(self.width // 4)
        angles = (places[:, :, None] * periods).flatten(1).tile(2)
        return angles.sin(), angles.cos()


def dinov2(registers=0):
    return Dino(Dinov2, registers=registers)


def dinov3(block=Block):
    return Dino(Dinov3, registers=4, registers_name="storage_tokens", block=block)
