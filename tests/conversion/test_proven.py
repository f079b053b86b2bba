"""Attention layers of anybody's classes: numbers tell what they compute, and nothing else is taken for it."""

import copy
import pickle
import warnings

import pytest
import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import nn
from torch.nn import functional as F

import subquad
from subquad import SubquadError
from subquad.conversion.families.readings import reading_of

DIM, HEADS = 48, 4


class Timms(nn.Module):
    """As most repositories copy it."""

    def __init__(self, dim=DIM, num_heads=HEADS, **more):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(b, n, c)))


class WithMaps(Timms):
    """As DINO's, whose attention maps are looked at."""

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        self.seen = attn
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c)), attn


class Rearranged(nn.Module):
    """A norm in front, a projection whose rows are (h, d, p), and one behind with dropout; no number of heads."""

    def __init__(self, dim=DIM, heads=HEADS, dim_head=8):
        super().__init__()
        self.norm, self.to_qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.cut = Rearrange("b n (h d p) -> p b h n d", h=heads, p=3)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.cut(self.to_qkv(self.norm(x))))
        return self.to_out(rearrange(y, "b h n d -> b n (h d)"))


class HeadsFirst(nn.Module):
    """Rows (h, p, d), with norms of the heads' queries and keys, and one of the answers' channels."""

    def __init__(self):
        super().__init__()
        self.heads, self.in_proj, self.out_proj = HEADS, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.k_ln, self.q_ln = nn.LayerNorm(DIM // HEADS), nn.LayerNorm(DIM // HEADS)

    def forward(self, x):
        q, k, v = rearrange(self.in_proj(x), "b n (h p d) -> p b h n d", h=self.heads, p=3)
        y = F.scaled_dot_product_attention(self.q_ln(q), self.k_ln(k), v)
        return self.out_proj(rearrange(y, "b h n d -> b n (h d)"))


class KeysFirst(nn.Module):
    """Three projections in an order of their own, and norms of all channels in the layer behind."""

    def __init__(self, scale=None):
        super().__init__()
        self.n_head, self.factor = HEADS, scale
        self.key, self.query, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.inner_ln = nn.LayerNorm(DIM)

    def forward(self, x, attention_mask=None):
        q, k, v = (
            rearrange(one(x), "b n (h d) -> b h n d", h=self.n_head) for one in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=self.factor)
        return self.out(self.inner_ln(rearrange(y, "b h n d -> b n (h d)")))


class OfThree(nn.Module):
    """Called as PyTorch's own, with tokens three times; answers no maps."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, query, key, value, need_weights=False):
        tokens = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        y = F.scaled_dot_product_attention(*(rearrange(one, "b n (h d) -> b h n d", h=HEADS) for one in tokens))
        return self.proj(rearrange(y, "b h n d -> b n (h d)")), None


class OfTwo(nn.Module):
    """Keys and values of one projection."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(DIM, 32), nn.Linear(DIM, 64), nn.Linear(32, DIM)

    def forward(self, x, context=None):
        k, v = rearrange(self.to_kv(x if context is None else context), "b n (p h d) -> p b h n d", h=HEADS, p=2)
        y = F.scaled_dot_product_attention(rearrange(self.to_q(x), "b n (h d) -> b h n d", h=HEADS), k, v)
        return self.to_out(rearrange(y, "b h n d -> b n (h d)"))


class BesideBiases(Timms):
    """As VideoMAE's, whose keys have no bias."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attn, times=1):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.times = nn.LayerNorm(DIM), attn, nn.LayerNorm(DIM), times
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, return_attention=False):
        y = self.attn(*[self.norm1(x)] * self.times)
        if isinstance(y, tuple):
            y, maps = y
            if return_attention:
                return maps
        x = x + y
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    """Somebody's, with a class token and positions that are resampled; says nothing of its size."""

    def __init__(self, layer, times=1, embed=None):
        super().__init__()
        self.to_patches = nn.Conv2d(3, DIM, 8, 8) if embed is None else embed
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, DIM)), nn.Parameter(torch.randn(1, 17, DIM))
        self.layers = nn.ModuleList(Block(layer(), times) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, images):
        return self.norm(self.features(images))[:, 0]

    def features(self, images):
        x = self.to_patches(images)
        places = rearrange(self.pos_embed[:, 1:], "b (y x) c -> b c y x", y=4)
        x = x + F.interpolate(places, x.shape[-2:], mode="bilinear")
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1) + self.pos_embed[:, :1], x.flatten(2).mT], dim=1)
        for layer in self.layers:
            x = layer(x)
        return x


PROVEN = {"timm's": Timms, "maps": WithMaps, "rearranged": Rearranged, "heads": HeadsFirst, "keys": KeysFirst}
PROVEN |= {"biases": BesideBiases, "two": OfTwo}


def somebodys(name):
    torch.manual_seed(0)
    network = Network(OfThree, times=3) if name == "three" else Network(PROVEN[name])
    for one in network.parameters():
        nn.init.normal_(one, std=0.2)
    return network.eval()


@pytest.mark.parametrize("name", [*PROVEN, "three"])
def test_with_softmax_it_is_the_teacher_at_every_size_and_comes_back_to_the_bit(name):
    teacher = somebodys(name)
    student = subquad.convert(copy.deepcopy(teacher), "softmax")
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        torch.testing.assert_close(student(images), teacher(images), rtol=1e-4, atol=1e-4)
    back = subquad.restore(student)
    assert torch.equal(back(images), teacher(images))


@pytest.mark.parametrize("name", [*PROVEN, "three"])
def test_every_kind_takes_mechanisms_that_read_maps_and_is_copied_and_learns(name):
    student = subquad.convert(somebodys(name), "agent")
    images = torch.randn(2, 3, 48, 24)
    answers = student(images)
    for again in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(again(images), answers)
    student.train()(images).sum().backward()
    assert all(one.grad is not None for layer in student.layers for one in layer.attn.parameters())


STEMS = {
    "overlapping": lambda: nn.Conv2d(3, DIM, 8, 6),
    "convolutions": lambda: nn.Sequential(
        *(part for i in (3, 16, 32) for part in (nn.Conv2d(i, max(16, 2 * (i - i % 2)), 3, 2, 1), nn.ReLU())),
        nn.Conv2d(64, DIM, 1),
    ),
    "hybrid": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, DIM, 3, 2, 1), nn.GELU()
    ),
    "pooled": lambda: nn.Sequential(nn.Conv2d(3, DIM, 3, 1, 1), nn.AvgPool2d(8, 7)),
}


@pytest.mark.parametrize("stem", STEMS)
def test_tokens_may_come_from_the_map_of_any_convolution(stem):
    torch.manual_seed(0)
    teacher = Network(Timms, embed=STEMS[stem]()).eval()
    student = subquad.convert(copy.deepcopy(teacher), "softmax", img_size=32)
    for size in ((32, 32), (50, 27)):
        images = torch.randn(2, 3, *size)
        torch.testing.assert_close(student(images), teacher(images), rtol=1e-4, atol=1e-4)
    linear = subquad.convert(teacher, "agent", img_size=32)
    assert torch.equal(pickle.loads(pickle.dumps(linear))(images), linear(images))
    with pytest.raises(SubquadError, match="does not say which images it is made for: give img_size"):
        subquad.convert(teacher, "agent")


def test_tokens_that_come_from_no_map_are_refused():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(3 * 64, DIM)

        def forward(self, x):
            return self.proj(F.unfold(x, 8, stride=8).mT).mT.unflatten(2, (x.shape[2] // 8, x.shape[3] // 8))

    with pytest.raises(SubquadError, match="no patch embedding, a convolution whose stride is its kernel's size"):
        subquad.convert(Network(Timms, embed=Cut()), "agent", img_size=32)


def test_numbers_tell_in_what_order_a_projection_gives_its_parts():
    orders = {name: reading_of(somebodys(name).layers[0].attn).order for name in PROVEN}
    assert orders == {
        "timm's": "parts",
        "maps": "parts",
        "rearranged": "channels",
        "heads": "heads",
        "keys": "parts",
    } | {"biases": "parts", "two": "parts"}
    reading = reading_of(somebodys("rearranged").layers[0].attn)
    assert (reading.num_heads, reading.width) == (HEADS, 8)
    assert reading_of(somebodys("keys").layers[0].attn).projections == ("query", "key", "value")
    assert reading_of(somebodys("heads").layers[0].attn).qk_norms == ("q_ln", "k_ln")


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


def test_scores_of_another_scale_are_said_with_what_to_do():
    class Scaled(KeysFirst):
        def __init__(self):
            super().__init__(scale=0.125)

    with pytest.raises(SubquadError, match=r"scores are multiplied by 0\.125 and not by 0\.2887"):
        subquad.convert(Network(Scaled), "agent")


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
