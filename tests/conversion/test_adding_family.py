"""The family that docs/convert.md adds works as written there."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from foreign import answer, difference, images
from torch import nn

import subquad
from subquad.conversion import ConvertedAttention, converted_layers, register_family
from subquad.conversion.families import known_families, own_families
from subquad.errors import SubquadError

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"


class Attention(nn.Module):
    """Somebody's layer."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_qkv, self.to_out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Network(nn.Module):
    image_size = 64

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, stride=8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(2))

    def forward(self, x):
        x = self.embed(x).flatten(2).mT
        for block in self.blocks:
            x = x + block["attn"](x)
        return x


def test_the_family_of_the_page_is_converted(monkeypatch):
    monkeypatch.setattr(known_families, "REGISTERED", {})
    package = ModuleType("my_package.layers")
    package.Attention = Attention
    monkeypatch.setitem(sys.modules, "my_package.layers", package)
    monkeypatch.setattr(Attention, "__module__", "my_package.layers")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "MyAtt" in block)
    exec(code, {"__name__": "somebody"})

    torch.manual_seed(0)
    model = Network()
    for x in (images(64), images(96, 80)):
        assert difference(answer(subquad.convert(model, "softmax"), x), answer(model, x)) < 1e-6
        student = subquad.convert(model, "pola", blocks=[1])
        assert answer(student, x).isfinite().all()
    assert list(converted_layers(student)) == [1]
    assert torch.equal(answer(subquad.restore(student), images()), answer(model, images()))


class Block(nn.Module):
    """Somebody's block, on a map."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class ConvertedBlock(ConvertedAttention):
    replaces = (f"{__name__}.Block",)

    def sizes(self, original):
        return 4, 8

    def forward(self, x):
        normed = self.norm(x)
        return x + self.mix(*(self.split(part) for part in self.qkv(normed).chunk(3, dim=-1)), normed)


def test_a_class_may_stand_for_a_block(monkeypatch):
    monkeypatch.setattr(known_families, "REGISTERED", {})
    register_family(ConvertedBlock)
    model = nn.Sequential(Network().embed, nn.Flatten(2), Transpose(), nn.Sequential(Block(), Block()))
    student = subquad.convert(model, "softmax", img_size=64)
    assert list(student.subquad_conversion.paths.values()) == ["3.0", "3.1"]
    assert difference(answer(student, images()), answer(model, images())) < 1e-6
    assert torch.equal(answer(subquad.restore(student), images()), answer(model, images()))


def test_two_families_of_one_layer_are_refused(monkeypatch):
    monkeypatch.setattr(known_families, "REGISTERED", {})
    register_family(ConvertedBlock)
    register_family(ConvertedBlock)
    for name in (*ConvertedBlock.replaces, *list(own_families())[:3]):
        other = type("Other", (ConvertedBlock,), {"replaces": (f"{__name__}.Of", name)})
        with pytest.raises(SubquadError, match=f"there is a family of '{name}' already, .*: two can't stand for it"):
            register_family(other)
    assert list(known_families.REGISTERED) == list(ConvertedBlock.replaces)


def test_a_family_that_is_handed_maps_has_to_say_where_tokens_stand():
    class OfMaps(ConvertedBlock):
        is_handed_maps = True

    with pytest.raises(SubquadError, match="OfMaps can't be a family: it has no method map_under"):
        register_family(OfMaps)


def test_no_two_of_ours_stand_for_one_layer():
    kinds = dict.fromkeys(own_families().values())
    names = [name for kind in kinds for name in vars(kind)["replaces"]]
    assert sorted(names) == sorted(own_families())


class Transpose(nn.Module):
    def forward(self, x):
        return x.mT


def test_the_page_names_what_may_be_overridden():
    known = vars(ConvertedAttention)
    rows = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 14 and all(name in known for name in rows)
