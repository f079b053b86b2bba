"""Copies of Swin's blocks in anybody's repositories, in the three forms that they have."""

import copy
import pickle

import pytest
import torch
from einops import rearrange
from foreign import difference
from torch import nn
from torch.nn import functional as F

import subquad
from subquad import SubquadError
from subquad.conversion.families import converted_class
from subquad.conversion.families.proven_windows import ProvenSizedBlock, ProvenStagedBlock, ProvenSwinBlock

DIM, HEADS, WINDOW = 24, 2, 4


def cut(x, side):
    return rearrange(x, "b (r y) (l x) c -> (b r l) (y x) c", y=side, x=side)


def joined(windows, side, height, width):
    sizes = {"y": side, "x": side, "r": height // side, "l": width // side}
    return rearrange(windows, "(b r l) (y x) c -> b (r y) (l x) c", **sizes)


def mask_of(height, width, side, shift):
    """-100 for pairs of tokens that the shift alone has brought into one window."""
    parts = torch.zeros(1, height, width, 1)
    borders = (slice(0, -side), slice(-side, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate((one, other) for one in borders for other in borders):
        parts[:, rows, columns] = number
    parts = cut(parts, side)[..., 0]
    return -100.0 * (parts[:, None] != parts[:, :, None]).float()


class WindowAttention(nn.Module):
    def __init__(self, dim, window_size, num_heads, qk_scale=None):
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, (window_size, window_size), num_heads
        self.scale = qk_scale or (dim // num_heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window_size - 1) ** 2, num_heads))
        y, x = torch.meshgrid(torch.arange(window_size), torch.arange(window_size), indexing="ij")
        down, right = (one.flatten()[:, None] - one.flatten() + window_size - 1 for one in (y, x))
        self.register_buffer("relative_position_index", down * (2 * window_size - 1) + right)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop, self.softmax = nn.Dropout(0.1), nn.Dropout(0.1), nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = self.scale * q @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        scores = scores + bias.permute(2, 0, 1)[None]
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[None, :, None]).flatten(0, 1)
        y = (self.attn_drop(self.softmax(scores)) @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj_drop(self.proj(y))


class SwinTransformerBlock(nn.Module):
    """As classifiers have it: made for maps of one size."""

    is_masked = True

    def __init__(self, dim, input_resolution, num_heads, window_size=WINDOW, shift_size=0, qk_scale=None):
        super().__init__()
        self.dim, self.input_resolution, self.num_heads = dim, input_resolution, num_heads
        self.window_size, self.shift_size = window_size, shift_size
        if min(input_resolution) <= window_size:
            self.shift_size, self.window_size = 0, min(input_resolution)
        self.norm1, self.norm2, self.drop_path = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Identity()
        self.attn = WindowAttention(dim, self.window_size, num_heads, qk_scale)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.register_buffer("attn_mask", self.mask(*input_resolution) if self.shift_size else None)

    def mask(self, height, width):
        return mask_of(height, width, self.window_size, self.shift_size)

    def forward(self, x):
        return self.on_map(x, *self.input_resolution, self.attn_mask)

    def on_map(self, x, height, width, mask):
        assert x.shape[1] == height * width
        image = self.norm1(x).view(x.shape[0], height, width, -1)
        bottom, right = -height % self.window_size, -width % self.window_size
        image = F.pad(image, (0, 0, 0, right, 0, bottom))
        filled = image.shape[1:3]
        if self.shift_size:
            image = torch.roll(image, (-self.shift_size, -self.shift_size), dims=(1, 2))
        windows = self.attn(cut(image, self.window_size), mask=mask if self.shift_size and self.is_masked else None)
        image = joined(windows, self.window_size, *filled)
        if self.shift_size:
            image = torch.roll(image, (self.shift_size, self.shift_size), dims=(1, 2))
        image = image[:, :height, :width].reshape(x.shape)
        x = x + self.drop_path(image)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class SizedBlock(SwinTransformerBlock):
    """As SwinIR's."""

    def forward(self, x, x_size):
        mask = self.attn_mask if self.input_resolution == x_size or not self.shift_size else self.mask(*x_size)
        return self.on_map(x, *x_size, mask)


class StagedBlock(SwinTransformerBlock):
    """As detectors' and segmenters': the stage sets H and W."""

    def __init__(self, dim, num_heads, shift_size):
        super().__init__(dim, (64, 64), num_heads, shift_size=shift_size)
        del self.input_resolution, self.attn_mask
        self.H = self.W = None

    def forward(self, x, mask_matrix):
        return self.on_map(x, self.H, self.W, mask_matrix)


class Merging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim), nn.LayerNorm(4 * dim)

    def forward(self, x, height, width):
        image = F.pad(x.view(x.shape[0], height, width, -1), (0, 0, 0, width % 2, 0, height % 2))
        return self.reduction(self.norm(rearrange(image, "b (y i) (x j) c -> b (y x) (i j c)", i=2, j=2)))


class Classifier(nn.Module):
    def __init__(self, img_size=64, block=SwinTransformerBlock, **settings):
        super().__init__()
        self.img_size, self.patch_embed = img_size, nn.Conv2d(3, DIM, 4, 4)
        self.layers, self.merging = nn.ModuleList(), Merging(DIM)
        for stage in range(2):
            side = img_size // 4 // 2**stage
            shifts = (0, WINDOW // 2)
            self.layers.append(
                nn.ModuleList(
                    block(DIM * 2**stage, (side, side), HEADS, shift_size=shift, **settings) for shift in shifts
                )
            )
        self.head = nn.Linear(2 * DIM, 5)

    def forward(self, x):
        x = self.patch_embed(x)
        height, width = x.shape[-2:]
        x = x.flatten(2).mT
        for number, layer in enumerate(self.layers):
            for block in layer:
                x = self.through(block, x, height, width)
            if not number:
                x, height, width = self.merging(x, height, width), -(-height // 2), -(-width // 2)
        return self.head(x.mean(dim=1))

    def through(self, block, x, height, width):
        return block(x)


class Restorer(nn.Module):
    """On every pixel; images are made for any multiple of a window."""

    def __init__(self):
        super().__init__()
        self.img_size, self.conv_first = 16, nn.Conv2d(3, DIM, 3, padding=1)
        self.layers = nn.ModuleList(SizedBlock(DIM, (16, 16), HEADS, shift_size=shift) for shift in (0, WINDOW // 2))
        self.conv_last = nn.Conv2d(DIM, 3, 3, padding=1)

    def forward(self, image):
        x = self.conv_first(image)
        size = x.shape[-2:]
        x = x.flatten(2).mT
        for block in self.layers:
            x = block(x, x_size=tuple(size))
        return image + self.conv_last(x.mT.unflatten(2, size))


class Backbone(Classifier):
    def __init__(self):
        super().__init__(block=lambda dim, side, heads, shift_size: StagedBlock(dim, heads, shift_size))
        del self.img_size

    def through(self, block, x, height, width):
        block.H, block.W = height, width
        filled = (side + -side % WINDOW for side in (height, width))
        return block(x, mask_matrix=mask_of(*filled, WINDOW, WINDOW // 2).to(x.device))


NETWORKS = {
    "classifier": (Classifier, ProvenSwinBlock, [(64, 64)]),
    "restorer": (Restorer, ProvenSizedBlock, [(16, 16), (24, 20)]),
    "backbone": (Backbone, ProvenStagedBlock, [(64, 64), (72, 100)]),
}


def teacher(name):
    torch.manual_seed(0)
    model = NETWORKS[name][0]()
    for one in model.parameters():
        nn.init.normal_(one, std=0.2)
    return model.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_with_softmax_it_is_the_teacher_and_comes_back_to_the_bit(name):
    _, family, sizes = NETWORKS[name]
    model = teacher(name)
    blocks = [one for one in model.modules() if isinstance(one, SwinTransformerBlock)]
    assert {converted_class(one) for one in blocks} == {family}
    student = subquad.convert(copy.deepcopy(model), "softmax")
    for size in sizes:
        images = torch.randn(2, 3, *size)
        assert difference(student(images), model(images)) < 1e-6
    assert torch.equal(subquad.restore(student)(images), model(images))


@pytest.mark.parametrize("name", NETWORKS)
def test_other_mechanisms_see_the_whole_map(name):
    model = teacher(name)
    student = subquad.convert(model, "agent")
    images = torch.randn(2, 3, *NETWORKS[name][2][-1])
    answers = student(images)
    for again in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(again(images), answers)
    student.train()(images).sum().backward()
    inner = [one for one in student.modules() if type(one).__name__.startswith("Proven")]
    assert len(inner) == len([one for one in model.modules() if isinstance(one, SwinTransformerBlock)])
    assert all(part.grad is not None for one in inner for part in one.parameters())
    assert {one.window for one in inner} == {None}
    # whatever stands beyond a window is seen
    changed = images.clone()
    changed[:, :, :4, :4] += 1
    with torch.no_grad():
        linear = subquad.convert(model, "linear").eval()
        assert (linear(changed) - linear(images)).abs().max() > 1e-4


class Beside(Backbone):
    """Handed a pair by what stands around it, as backbones that hand on which pixels are filled in."""

    def forward(self, pair):
        return super().forward(pair[0])


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Beside()

    def forward(self, images):
        return self.backbone((images, None))


def test_what_stands_around_a_backbone_may_hand_it_more_than_images():
    torch.manual_seed(0)
    model = Around().eval()
    student = subquad.convert(model, "softmax")
    for size in ((64, 64), (72, 100)):
        images = torch.randn(2, 3, *size)
        assert difference(student(images), model(images)) < 1e-6


def test_a_map_of_another_size_than_the_block_is_made_for_is_refused():
    student = subquad.convert(teacher("classifier"), "linear")
    with pytest.raises(SubquadError, match=r"144 tokens do not fill a grid of 16×16 \(256 tokens\)"):
        student(torch.zeros(1, 3, 48, 48))


class WithoutMask(SwinTransformerBlock):
    is_masked = False


class NormsBehind(SwinTransformerBlock):
    def forward(self, x):
        return x + self.norm1(super().forward(x))


@pytest.mark.parametrize("block", [WithoutMask, NormsBehind])
def test_what_computes_something_else_is_not_taken_for_it(block):
    assert converted_class(block(DIM, (16, 16), HEADS, shift_size=2)) is None
    with pytest.raises(
        SubquadError, match=r"layers.0.[01].attn is a test_proven_windows.WindowAttention, .* not known"
    ):
        subquad.convert(Classifier(block=block), "linear")


class FilledWithOnes(StagedBlock):
    """Where its windows are no whole ones."""

    def on_map(self, x, height, width, mask):
        if height % self.window_size or width % self.window_size:
            x = x + 1
        return super().on_map(x, height, width, mask)


def test_maps_that_are_filled_up_are_asked_about_as_well():
    assert converted_class(StagedBlock(DIM, HEADS, 2)) is ProvenStagedBlock
    assert converted_class(FilledWithOnes(DIM, HEADS, 2)) is None


def test_other_scales_of_the_scores_are_not_taken_for_the_usual():
    assert converted_class(SwinTransformerBlock(DIM, (16, 16), HEADS, qk_scale=0.5)) is None
