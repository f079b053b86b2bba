"""Attention layers of anybody's classes: numbers tell what they compute, and nothing else is taken for it."""

import copy
import pickle
import warnings

import pytest
import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from foreign import difference
from foreign_own import (
    CUTS,
    DIM,
    HEADS,
    PROVEN,
    STEMS,
    Block,
    KeysFirst,
    Network,
    OfTwo,
    Timms,
    Tutorial,
    WithMaps,
    ZerosOfKeys,
    somebodys,
)
from torch import nn
from torch.nn import functional as F

import subquad
from subquad import SubquadError
from subquad.conversion.families.readings import reading_of


@pytest.mark.parametrize("name", PROVEN)
def test_with_softmax_it_is_the_teacher_at_every_size_and_comes_back_to_the_bit(name):
    teacher = somebodys(name)
    student = subquad.convert(copy.deepcopy(teacher), "softmax")
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        assert difference(student(images), teacher(images)) < 1e-6
    back = subquad.restore(student)
    assert torch.equal(back(images), teacher(images))


@pytest.mark.parametrize("name", PROVEN)
def test_every_kind_takes_mechanisms_that_read_maps_and_is_copied_and_learns(name):
    student = subquad.convert(somebodys(name), "agent")
    images = torch.randn(2, 3, 48, 24)
    answers = student(images)
    for again in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(again(images), answers)
    student.train()(images).sum().backward()
    assert all(one.grad is not None for layer in student.layers for one in layer.attn.parameters())


@pytest.mark.parametrize("stem", STEMS)
def test_tokens_may_come_from_the_map_of_any_convolution(stem):
    torch.manual_seed(0)
    teacher = Network(Timms, embed=STEMS[stem]()).eval()
    student = subquad.convert(copy.deepcopy(teacher), "softmax", img_size=32)
    for size in ((32, 32), (50, 27)):
        images = torch.randn(2, 3, *size)
        assert difference(student(images), teacher(images)) < 1e-6
    linear = subquad.convert(teacher, "agent", img_size=32)
    assert torch.equal(pickle.loads(pickle.dumps(linear))(images), linear(images))
    with pytest.raises(SubquadError, match="does not say which images it is made for: give img_size"):
        subquad.convert(teacher, "agent")


@pytest.mark.parametrize("name", CUTS)
def test_patches_may_be_cut_by_code_for_a_linear_layer(name):
    torch.manual_seed(0)
    teacher = CUTS[name]().eval()
    student = subquad.convert(copy.deepcopy(teacher), "softmax", img_size=32)
    for size in ((32, 32), (48, 16)):
        images = torch.randn(2, 3, *size)
        assert difference(student(images), teacher(images)) < 1e-6
    linear = subquad.convert(teacher, "agent", img_size=32)
    for again in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(again(images), linear(images))
    assert torch.equal(subquad.restore(linear)(images), teacher(images))
    with pytest.raises(SubquadError, match="does not say which images it is made for: give img_size"):
        subquad.convert(teacher, "agent")


class Unnamed(Tutorial):
    def __init__(self):
        super().__init__()
        self.first = self.class_token
        del self.class_token

    def in_front(self):
        return self.first


def test_tokens_in_front_that_nobody_names_are_asked_for():
    network = Unnamed().eval()
    with pytest.raises(SubquadError, match=r"called with 17 tokens, and its map has 16 places: give prefix=1 if"):
        subquad.convert(network, "softmax", img_size=32)
    student = subquad.convert(network, "softmax", img_size=32, prefix=1)
    images = torch.randn(2, 3, 32, 32)
    assert difference(student(images), network(images)) < 1e-6


class Normed(Tutorial):
    """With numbers that are neither parameters nor buffers, which a call moves to where its images are."""

    def __init__(self):
        super().__init__()
        self.mean = torch.full((1, 3, 1, 1), 0.5)

    def forward(self, images):
        self.mean = self.mean.type_as(images)
        self.last = images - self.mean
        return super().forward(self.last + torch.zeros(1))


def test_calls_without_numbers_leave_nothing_behind():
    teacher = Normed().eval()
    mean = teacher.mean
    student = subquad.convert(teacher, "softmax", img_size=32)
    assert teacher.mean is mean and not hasattr(teacher, "last")
    images = torch.randn(2, 3, 32, 32)
    assert difference(student(images), teacher(images)) < 1e-6
    last = teacher.last
    subquad.convert(teacher, "linear", img_size=32)
    assert teacher.last is last


def test_where_patches_are_cut_by_code_calls_that_bring_no_image_are_refused():
    student = subquad.convert(Tutorial(), "agent", img_size=32)
    with pytest.raises(SubquadError, match=r"takes images \(b, c, height, width\), got \[\(3, 32, 32\)\]"):
        student(torch.zeros(3, 32, 32))
    with pytest.raises(SubquadError, match="images of 7×32 px hold no patch of 8×8"):
        student(torch.zeros(1, 3, 7, 32))


def test_tokens_that_come_from_no_map_are_refused():
    class Multiplied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(192, DIM))

        def forward(self, x):
            tokens = F.unfold(x, 8, stride=8).mT @ self.weight
            return tokens.mT.unflatten(2, (x.shape[2] // 8, x.shape[3] // 8))

    with pytest.raises(SubquadError, match="no patch embedding, a convolution whose stride is its kernel's size"):
        subquad.convert(Network(Timms, embed=Multiplied()), "agent", img_size=32)


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


class Mapped(nn.Linear):
    def __init__(self):
        super().__init__(192, DIM)

    def forward(self, x):
        return super().forward(x).mT.unflatten(2, (4, 4))


@pytest.mark.parametrize(
    "network",
    [
        lambda: Tutorial("b c (y p) (x q) -> (x y) b (c p q)"),
        lambda: Network(Timms, embed=nn.Sequential(nn.Conv2d(3, DIM, 8, 8), Transposed())),
        lambda: Network(Timms, embed=nn.Sequential(nn.Conv2d(3, DIM, 8, 6), Transposed())),
        lambda: Network(
            Timms, embed=nn.Sequential(Rearrange("b c (y p) (x q) -> b (x y) (p q c)", p=8, q=8), Mapped())
        ),
    ],
)
def test_tokens_that_do_not_stand_row_by_row_are_refused_and_nothing_is_left_behind(network):
    model = network()
    hooks, before = sum(len(one._forward_pre_hooks) for one in model.modules()), torch.random.get_rng_state()
    with pytest.raises(
        SubquadError, match=r"do not stand row by row, .*: token \d+ of .* is that of row 0, column [34] of "
    ):
        subquad.convert(model, "agent", img_size=32)
    assert sum(len(one._forward_pre_hooks) for one in model.modules()) == hooks
    assert model.training and torch.equal(before, torch.random.get_rng_state())


def test_numbers_tell_in_what_order_a_projection_gives_its_parts():
    orders = {name: reading_of(somebodys(name).layers[0].attn).order for name in PROVEN if name != "three"}
    assert orders == {
        "timm's": "parts",
        "maps": "parts",
        "rearranged": "channels",
        "heads": "heads",
        "keys": "parts",
    } | {"biases": "parts", "two": "parts", "three norms": "heads", "zeros of keys": "parts"}
    reading = reading_of(somebodys("rearranged").layers[0].attn)
    assert (reading.num_heads, reading.width) == (HEADS, 8)
    assert reading_of(somebodys("keys").layers[0].attn).projections == ("query", "key", "value")
    assert reading_of(somebodys("heads").layers[0].attn).qk_norms == ("q_ln", "k_ln")


def test_a_bias_of_keys_that_is_no_zeros_is_read_as_nothing():
    layer = ZerosOfKeys()
    assert reading_of(layer) is not None
    layer.k_bias += 1
    assert reading_of(layer) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_of_another_dtype_or_has_no_weights_yet_is_read_as_well(dtype):
    layer = Timms().to(dtype)
    assert reading_of(layer) == reading_of(Timms().to("meta")) == reading_of(Timms())
    nn.init.zeros_(layer.proj.weight)
    assert reading_of(layer).num_heads == HEADS


def test_nobody_who_listens_hears_of_it_and_no_random_number_is_drawn():
    # of a kind that was not read before
    layer, heard = WithMaps(60, 3), []
    for part in layer.modules():
        part.register_forward_hook(lambda *_: heard.append(1))
    before = torch.random.get_rng_state()
    assert reading_of(layer) is not None
    assert not heard and not hasattr(layer, "seen") and torch.equal(before, torch.random.get_rng_state())
    assert layer.training


class CausalAttention(Timms):
    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(rearrange(y, "b h n d -> b n (h d)"))


class LinearAttention(Timms):
    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        y = q.softmax(dim=-1) @ (k.softmax(dim=-2).mT @ v)
        return self.proj(rearrange(y, "b h n d -> b n (h d)"))


class BiasedAttention(Timms):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x):
        return super().forward(x)


class MaskedAttention(Timms):
    """What a buffer holds may matter only for more tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(1, 1, 64, 64))

    def forward(self, x):
        return super().forward(x)


class WindowedAttention(Timms):
    """In halves, where there are many tokens."""

    def forward(self, x):
        return super().forward(x) if x.shape[1] < 64 else torch.cat([*map(super().forward, x.chunk(2, dim=1))], dim=1)


class Core(nn.Module):
    """Without weights, as the layers that share it."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class CoredAttention(Timms):
    def __init__(self, causal=True):
        super().__init__()
        self.core = Core(causal)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
        return self.proj(rearrange(self.core(q, k, v), "b h n d -> b n (h d)"))


class RememberingAttention(Timms):
    """With biases that are no buffers."""

    def __init__(self):
        super().__init__()
        self.biases = torch.randn(1, HEADS, 1, 1)

    def forward(self, x):
        y = super().forward(x)
        return y if self.biases is None else y * self.biases.mean()


class OfSequencesAttention(Timms):
    """(n, b, c)."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class OfMapsAttention(Timms):
    def forward(self, x, height, width):
        assert x.shape[1] == height * width
        return super().forward(x)


class GatedAttention(Timms):
    def forward(self, x):
        return x * super().forward(x)


@pytest.mark.parametrize(
    "layer",
    [
        CausalAttention,
        LinearAttention,
        BiasedAttention,
        MaskedAttention,
        WindowedAttention,
        CoredAttention,
        RememberingAttention,
        OfSequencesAttention,
        OfMapsAttention,
        GatedAttention,
    ],
)
def test_what_computes_something_else_is_not_taken_for_it(layer):
    assert reading_of(layer()) is None
    with pytest.raises(SubquadError, match=rf"layers.0.attn is a test_proven.{layer.__name__}, .* not known here"):
        subquad.convert(Network(layer), "agent")


@pytest.mark.parametrize("name", ["MSA", "MHSA", "WMSA", "GatedAttn", "SelfAttentionLayer"])
def test_what_is_called_attention_in_one_of_its_names_is_named_in_the_refusal(name):
    with pytest.raises(SubquadError, match=rf"layers.0.attn is a .*{name}, an attention layer that is not known"):
        subquad.convert(Network(type(name, (GatedAttention,), {})), "agent")


def test_what_parts_have_as_settings_is_a_part_of_what_they_compute():
    assert reading_of(CoredAttention(causal=False)) is not None
    assert reading_of(CoredAttention(causal=True)) is None


def test_what_the_last_call_left_does_not_matter_and_what_is_set_later_is_refused():
    network = somebodys("maps")
    with torch.no_grad():
        network(torch.randn(1, 3, 32, 32))
    assert isinstance(network.layers[0].attn.seen, torch.Tensor)
    student = subquad.convert(network, "linear")
    copied = pickle.loads(pickle.dumps(student))
    for attn in (student.layers[0].attn, copied.layers[0].attn):
        attn.anything = attn.training = True
        with pytest.raises(SubquadError, match="seen is set on a converted WithMaps, which does not know it"):
            attn.seen = None
        with pytest.raises(SubquadError, match="scale is set on a converted WithMaps"):
            attn.scale = 1.0


class Square(Timms):
    """Windows of 4×4, where tokens are a square of them."""

    def forward(self, x):
        side = round(x.shape[1] ** 0.5)
        if side**2 != x.shape[1] or side % 4:
            return super().forward(x)
        cut = {"y": side // 4, "i": 4, "j": 4}
        windows = rearrange(x, "b (y i x j) c -> (b y x) (i j) c", **cut)
        return rearrange(super().forward(windows), "(b y x) (i j) c -> b (y i x j) c", x=side // 4, **cut)


def test_a_layer_is_asked_about_as_many_tokens_as_it_has_in_its_network():
    assert reading_of(Square()) is not None
    subquad.convert(Network(Square), "linear", img_size=32)
    with pytest.raises(SubquadError, match=r"a Square computes softmax .* of a few tokens, and something else of 64"):
        subquad.convert(Network(Square), "linear", img_size=64, prefix=0)


def test_hooks_on_what_a_converted_layer_has_not_are_refused():
    network = somebodys("timm's")
    network.layers[1].attn.attn_drop.register_forward_hook(lambda *_: None)
    with pytest.raises(SubquadError, match="somebody listens to the attn_drop of a Timms"):
        subquad.convert(network, "linear")


class NotTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(DIM))


@pytest.mark.parametrize(
    "part",
    [
        lambda: nn.ParameterList([torch.ones(DIM)]),
        lambda: nn.GroupNorm(4, DIM),
        lambda: nn.BatchNorm1d(DIM, track_running_stats=False),
        NotTokens,
    ],
)
def test_parts_that_are_called_in_another_way_are_no_norms(part):
    class Other(Timms):
        def __init__(self):
            super().__init__()
            self.other = part()

        def forward(self, x):
            return 2 * super().forward(x)

    assert reading_of(Other()) is None


def test_weights_that_are_computed_of_others_are_not_read():
    layer = Timms()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer.qkv)
    assert reading_of(layer) is None


def test_lists_of_a_layer_stay_as_they_are():
    class Listing(Timms):
        def __init__(self):
            super().__init__()
            self.shapes = []

        def forward(self, x):
            self.shapes.append(x.shape)
            return super().forward(x)

    layer = Listing()
    assert reading_of(layer) is not None and layer.shapes == []


def test_mlps_and_other_layers_of_two_or_four_projections_are_not_taken_for_it():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.w12, self.w3 = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

        def forward(self, x):
            a, b, c = self.w12(x).chunk(3, dim=-1)
            return self.w3(a * F.silu(b) + c)

    assert reading_of(Mlp()) is None


class CrossAttention(OfTwo):
    pass


def test_what_is_called_cross_attention_stays():
    class Decoder(Block):
        def __init__(self, attn, times):
            super().__init__(attn, times)
            self.cross = CrossAttention()

        def forward(self, x):
            return super().forward(x + self.cross(x, x[:, :1]))

    network = somebodys("timm's")
    network.layers.append(Decoder(Timms(), 1))
    # what holds a layer may be called so, too
    network.crossing = network.layers
    del network.layers
    network.layers = network.crossing
    student = subquad.convert(network, "linear")
    assert type(student.layers[2].cross) is CrossAttention and type(student.layers[2].attn) is not Timms
    student(torch.randn(1, 3, 32, 32))


def test_arguments_that_nothing_is_made_of_are_not_taken_for_keys():
    class Ignoring(Timms):
        def forward(self, x, height, width):
            return super().forward(x)

    assert reading_of(Ignoring()) is None


@pytest.mark.parametrize("scale", [0.125, DIM**-0.5, 1.0])
def test_scores_of_another_scale_are_kept(scale):
    class Scaled(KeysFirst):
        def __init__(self):
            super().__init__(scale=scale)

    class Inlined(KeysFirst):
        def forward(self, x):
            self.factor = scale
            answer = super().forward(x)
            self.factor = None
            return answer

    for cls in (Scaled, Inlined) if scale != 0.125 else (Scaled,):
        network, x = Network(cls).eval(), torch.randn(2, 3, 32, 32)
        assert reading_of(cls()).scale == pytest.approx(scale)
        assert torch.allclose(subquad.convert(network, "softmax")(x), network(x), atol=1e-5)


def test_what_a_call_brings_beside_tokens_is_refused():
    layer = subquad.convert(somebodys("keys"), "linear").layers[0].attn
    tokens, mask = torch.randn(1, 17, DIM), torch.zeros(1, 1, 17, 17)
    with pytest.raises(SubquadError, match="called with attention_mask beside tokens, which a converted KeysFirst"):
        layer(tokens, attention_mask=mask)
    network = subquad.convert(somebodys("three"), "linear")
    network(torch.randn(1, 3, 32, 32))
    layer = network.layers[0].attn
    layer(tokens, value=tokens, key=tokens)
    with pytest.raises(SubquadError, match="keys and values that are not the same tokens"):
        layer(tokens, tokens.clone(), tokens)
    with pytest.raises(SubquadError, match="need_weights beside tokens"):
        layer(tokens, tokens, tokens, need_weights=True)


def test_what_is_on_unless_a_call_switches_it_off_is_refused_then():
    class OneSided(Timms):
        def forward(self, x, bidirectional=True, mask=None, need_weights=False):
            if bidirectional:
                return super().forward(x)
            q, k, v = rearrange(self.qkv(x), "b n (p h d) -> p b h n d", p=3, h=self.num_heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.proj(rearrange(y, "b h n d -> b n (h d)"))

    layer = subquad.convert(Network(OneSided), "linear", img_size=32)
    layer(torch.randn(1, 3, 32, 32))
    attn, tokens = layer.layers[0].attn, torch.randn(1, 17, DIM)
    attn(tokens, True, None, need_weights=False)
    for given in ({"bidirectional": False}, {"bidirectional": None}, {"need_weights": True}, {"mask": tokens}):
        with pytest.raises(SubquadError, match=f"called with {next(iter(given))} beside tokens"):
            attn(tokens, **given)


def test_maps_that_are_asked_for_are_refused_where_they_are_read():
    network = subquad.convert(somebodys("maps"), "linear")
    network(torch.randn(1, 3, 32, 32))
    maps = network.layers[0](torch.randn(1, 17, DIM), return_attention=True)
    for reads in (lambda: maps[0], lambda: maps.mean(), lambda: torch.stack([maps]), lambda: bool(maps)):
        with pytest.raises(SubquadError, match="forms no attention maps"):
            reads()


def test_layers_of_one_class_whose_settings_stand_elsewhere_are_read_one_by_one():
    class Config:
        def __init__(self, heads):
            self.heads = heads

    class Configured(Timms):
        def __init__(self, heads):
            super().__init__(num_heads=heads)
            del self.num_heads
            self.config = Config(heads)

        @property
        def num_heads(self):
            return self.config.heads if "config" in vars(self) else 0

        @num_heads.setter
        def num_heads(self, value):
            pass

        @num_heads.deleter
        def num_heads(self):
            pass

    assert [reading_of(Configured(heads)).num_heads for heads in (4, 2)] == [4, 2]


@pytest.mark.parametrize("name", ["maps", "rearranged"])
def test_it_is_aligned_traced_and_kept(name, tmp_path):
    teacher = somebodys(name)
    student = subquad.convert(copy.deepcopy(teacher), "focused")
    images = torch.randn(8, 3, 32, 32)
    done = subquad.conversion.align(student, images, teacher=teacher, updates=10, batch_size=4)
    assert done.after[0] < done.before[0]
    exported = torch.export.export(student.eval(), (images,)).module()
    torch.testing.assert_close(exported(images), student(images), rtol=1e-4, atol=1e-4)
    subquad.conversion.save_converted(student, tmp_path / "delta.safetensors")
    again = subquad.load_converted(tmp_path / "delta.safetensors", teacher)
    assert torch.equal(again(images), student(images))
