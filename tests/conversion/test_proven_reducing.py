"""Copies of PVT's and SegFormer's layers in anybody's repositories."""

import copy
import warnings

import pytest
import torch
from foreign import difference
from torch import nn
from torch.nn import functional as F

import subquad
from subquad import SubquadError
from subquad.attention import ATTENTION
from subquad.conversion.families import converted_class


class Attention(nn.Module):
    """As the authors' code of PVT, PVTv2 (its form with pooled keys, too) and SegFormer has it."""

    def __init__(self, dim, num_heads, sr_ratio=1, linear=False, power=1.0):
        super().__init__()
        self.dim, self.num_heads, self.sr_ratio, self.linear, self.power = dim, num_heads, sr_ratio, linear, power
        self.scale = (dim // num_heads) ** -0.5
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)
        if linear:
            self.pool, self.sr = nn.AdaptiveAvgPool2d(2), nn.Conv2d(dim, dim, 1)
            self.norm, self.act = nn.LayerNorm(dim), nn.GELU()
        elif sr_ratio > 1:
            self.sr, self.norm = nn.Conv2d(dim, dim, sr_ratio, sr_ratio), nn.LayerNorm(dim)

    def forward(self, x, H, W):
        b, n, c = x.shape
        fewer = x
        if hasattr(self, "sr"):
            image = x.permute(0, 2, 1).reshape(b, c, H, W)
            fewer = self.sr(self.pool(image) if self.linear else image).reshape(b, c, -1).permute(0, 2, 1)
            fewer = self.act(self.norm(fewer)) if self.linear else self.norm(fewer)
        q = self.q(x).reshape(b, n, self.num_heads, c // self.num_heads).permute(0, 2, 1, 3)
        k, v = self.kv(fewer).reshape(b, -1, 2, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1) ** self.power)
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).reshape(b, n, c)))


class Block(nn.Module):
    def __init__(self, dim, **more):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim, 2, **more), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, H, W):
        x = x + self.attn(self.norm1(x), H, W)
        return x + self.mlp(self.norm2(x))


class OverlapPatchEmbed(nn.Module):
    def __init__(self, channels, dim, stride):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, 2 * stride - 1, stride, stride - 1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2)), *x.shape[-2:]


class Pyramid(nn.Module):
    """Three stages, embeddings in front of each (PVT) or all of them first (SegFormer)."""

    def __init__(self, first=False, **more):
        super().__init__()
        embeds = [OverlapPatchEmbed(*sizes) for sizes in ((3, 16, 4), (16, 32, 2), (32, 48, 2))]
        stages = [
            nn.ModuleList(Block(dim, sr_ratio=sr, **more) for _ in range(2)) for dim, sr in ((16, 4), (32, 2), (48, 1))
        ]
        order = [*enumerate(embeds)] if first else []
        for number, embed in order:
            setattr(self, f"patch_embed{number + 1}", embed)
        for number, (embed, stage) in enumerate(zip(embeds, stages, strict=True)):
            setattr(self, f"patch_embed{number + 1}", embed)
            setattr(self, f"block{number + 1}", stage)
        self.head = nn.Conv2d(48, 5, 3, 2, 1)

    def forward(self, x):
        for number in (1, 2, 3):
            x, height, width = getattr(self, f"patch_embed{number}")(x)
            for block in getattr(self, f"block{number}"):
                x = block(x, height, width)
            x = x.transpose(1, 2).unflatten(2, (height, width)).contiguous()
        return F.interpolate(self.head(x), scale_factor=2)


KINDS = {"pvt": {}, "segformer": {"first": True}, "pooled": {"linear": True}}


def pyramid(kind):
    torch.manual_seed(0)
    network = Pyramid(**KINDS[kind])
    for one in network.parameters():
        nn.init.normal_(one, std=0.2)
    return network.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_with_softmax_it_is_the_teacher_at_every_size_and_comes_back_to_the_bit(kind):
    teacher = pyramid(kind)
    student = subquad.convert(copy.deepcopy(teacher), "softmax")
    for size in ((64, 64), (96, 65)):
        images = torch.randn(2, 3, *size)
        assert difference(student(images), teacher(images)) < 1e-6
    assert torch.equal(subquad.restore(student)(images), teacher(images))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", [name for name in ATTENTION if name != "softmax"])
def test_every_mechanism_sees_the_whole_map_and_learns(kind, attention):
    student = subquad.convert(pyramid(kind), attention)
    student.train()(torch.randn(2, 3, 96, 64)).square().mean().backward()
    for number in (1, 2, 3):
        for block in getattr(student, f"block{number}"):
            assert not hasattr(block.attn, "sr") and block.attn.proj.weight.grad is not None


def test_height_and_width_may_be_named():
    student = subquad.convert(pyramid("pvt"), "softmax")
    student(torch.randn(1, 3, 64, 64))
    attn, x = student.block1[0].attn, torch.randn(1, 16 * 12, 16)
    assert torch.equal(attn(x, H=16, W=12), attn(x, 16, 12))


def test_what_computes_something_else_is_not_taken_for_it():
    assert converted_class(Attention(16, 2, 4)) is not None
    assert converted_class(Attention(16, 2, 4, power=2.0)) is None
    with pytest.raises(SubquadError, match=r"block1.0.attn is a test_proven_reducing.Attention, .* not known here"):
        subquad.convert(Pyramid(power=2.0), "linear")


def test_what_a_call_brings_beside_is_no_silent_part_of_it():
    attn = subquad.convert(pyramid("pvt"), "linear").block1[0].attn
    x = torch.randn(1, 16 * 12, 16)
    for arguments, named in (((x, 16, 12, None), {}), ((x, 16), {}), ((x, 16, 12), {"mask": None})):
        with pytest.raises(TypeError, match="a converted Attention takes x, H, W"):
            attn(*arguments, **named)


def test_weights_that_are_computed_of_others_and_tables_beside_are_not_read():
    normed, biased = Attention(16, 2), Attention(16, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(normed.q)
    biased.register_buffer("bias", torch.zeros(1))
    assert converted_class(normed) is None and converted_class(biased) is None
