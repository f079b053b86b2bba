"""U-Nets and autoencoders, anybody's and diffusers': attention of maps at several sizes, and what is called beside."""

import pickle
import warnings
from copy import deepcopy

import pytest
import torch
from foreign_unets import ATTENTION, CHANNELS, OfOneHead, OfPixels, OfPlaces, OfTokens, Plain, UNet, unet
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import subquad
from subquad import ATTENTION as MECHANISMS
from subquad import SubquadError
from subquad.conversion import align, conversion_of, converted_layers, distil, load_converted, save_delta, tokens_order
from subquad.conversion.example_calls import as_outline, of_outline
from subquad.conversion.families.map_readings import map_reading_of
from subquad.conversion.families.proven_places import place_reading_of
from subquad.conversion.towers import find_tower
from subquad.exports import open_exported


def given(height=16, width=24, batch=2):
    return {"x": torch.randn(batch, 3, height, width), "time": torch.arange(batch)}


def answer(model, call):
    with torch.no_grad():
        y = model(**call)
    return y if isinstance(y, torch.Tensor) else y.sample


def off(one, other):
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.whole
@pytest.mark.parametrize("name", ATTENTION)
def test_with_softmax_they_answer_as_before_at_any_size(name):
    model = unet(name).double()

    def in_double(*size):
        call = given(*size)
        return call | {"x": call["x"].double()}

    student = subquad.convert(model, "softmax", given=in_double())
    assert len(converted_layers(student)) == 5
    for size in ((16, 24), (20, 12)):
        call = in_double(*size)
        assert off(answer(student, call), answer(model, call)) < 1e-12
    # one image, and one call after another of another size
    assert answer(student, {"x": torch.randn(1, 3, 8, 8).double(), "time": torch.ones(1)}).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("name", ["pixels", "places", "tokens", "blocks"])
@pytest.mark.parametrize("attention", MECHANISMS)
def test_every_mechanism_runs_in_them(name, attention):
    model, call = unet(name), given(20, 12)
    student = subquad.convert(model, attention, given=given())
    y = answer(student, call)
    assert y.isfinite().all()
    assert attention == "softmax" or off(y, answer(model, call)) > 1e-6
    assert torch.equal(answer(subquad.restore(student), call), answer(model, call))


def test_each_layer_stands_on_the_map_that_reaches_it():
    for name in ("pixels", "tokens"):
        tower = find_tower(unet(name), given=given(32, 16))
        assert [tuple(layer.grid.shape) for layer in tower.layers] == [(16, 8), (8, 4), (8, 4), (16, 8), (8, 4)]
        student = subquad.convert(unet(name), "focused", given=given(32, 16))
        assert converted_layers(student)[0].inner.positions.grid.shape == (16, 8)


@pytest.mark.parametrize("name", ["pixels", "blocks"])
def test_students_are_fitted_kept_and_read(name, tmp_path):
    model = unet(name)
    student = subquad.convert(model, "focused", blocks=[0, -1], given=given())
    report = align(student, lambda update: given(batch=4), teacher=model, updates=20)
    assert all(report.after[number] < report.before[number] for number in (0, 4))
    distil(student, lambda update: given(batch=4), teacher=model, updates=3)
    save_delta(student, tmp_path / "mine.safetensors", teacher=model)
    call = given(12, 20)
    for again in (
        load_converted(tmp_path / "mine.safetensors", model),
        deepcopy(student),
        pickle.loads(pickle.dumps(student)),
    ):
        assert torch.equal(answer(again, call), answer(student, call))
    assert conversion_of(load_converted(tmp_path / "mine.safetensors", model)).given["time"]["dtype"] == "int64"


@pytest.mark.parametrize("name", ["pixels", "tokens", "blocks"])
def test_gradients_are_those_of_blocks_that_are_computed_again(name):
    class Again(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    plain = subquad.convert(unet(name), "inline", given=given()).train()
    again = deepcopy(plain)
    for block in (*again.downs, *again.ups):
        block[len(block) - 1] = Again(block[-1])
    for model in (plain, again):
        torch.manual_seed(0)
        # maps of two shapes, of which some have as many places
        sum(model(**given(*size)).square().mean() for size in ((16, 24), (24, 16))).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def test_images_alone_need_a_size_and_nothing_else():
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1), nn.SiLU())
            self.mid = nn.Sequential(OfOneHead(CHANNELS), OfOneHead(CHANNELS))
            self.up = nn.ConvTranspose2d(CHANNELS, 3, 2, stride=2)

        def forward(self, x):
            return self.up(self.mid(self.down(x)))

    model, x = Autoencoder().eval(), torch.randn(2, 3, 20, 12)
    with pytest.raises(SubquadError, match=r"does not say which images it is made for: give img_size"):
        subquad.convert(model, "softmax")
    student = subquad.convert(model, "softmax", img_size=(16, 16))
    assert off(answer(student, {"x": x}), answer(model, {"x": x})) < 1e-5
    model.img_size = 16
    assert len(converted_layers(subquad.convert(model, "linear"))) == 2


@pytest.mark.parametrize("kernel", [3, 2])
def test_a_single_layer_that_stands_alone_is_found(kernel):
    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            # cutting patches, or not
            self.down = nn.Conv2d(3, CHANNELS, kernel, stride=2, padding=kernel // 2)
            self.attention = OfTokens(CHANNELS)

        def forward(self, x):
            return self.attention(self.down(x))

    model, x = Bottleneck().eval(), {"x": torch.randn(2, 3, 20, 12)}
    student = subquad.convert(model, "softmax", img_size=16)
    assert list(conversion_of(student).paths.values()) == ["attention.mha"]
    assert off(answer(student, x), answer(model, x)) < 1e-5


@pytest.mark.parametrize("attention", ["linear", "inline", "agent:num_agents=4", "ttt"])
def test_keys_that_every_pixel_sees_are_seen_by_all_and_learned(attention):
    model, call = unet("memory"), given(12, 20)
    student = subquad.convert(model, attention, given=given())
    before = answer(student, call)
    assert {name for name, _ in student.mid_attn1.named_parameters()} >= {"mem_kv", "to_qkv.weight"}
    student(**call).square().mean().backward()
    assert student.mid_attn1.mem_kv.grad.abs().sum() > 0
    with torch.no_grad():
        student.mid_attn1.mem_kv[1] += 1
    assert off(answer(student, call), before) > 1e-4


def test_maps_of_volumes_stand_below_one_another():
    class OfVolumes(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Plain(CHANNELS)

        def forward(self, x):
            return x + self.attn(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])

    class Volumes(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv3d(1, CHANNELS, 2, stride=2)
            self.mid = nn.ModuleList([OfVolumes() for _ in range(2)])

        def forward(self, x, t):
            x = self.down(x) + t[:, None, None, None, None]
            for block in self.mid:
                x = block(x)
            return x

    def volumes(*sides):
        return {"x": torch.randn(2, 1, *sides), "t": torch.zeros(2)}

    model = Volumes().eval()
    student = subquad.convert(model, "softmax", given=volumes(8, 12, 4))
    assert conversion_of(student).grid == (4 * 6, 2, 0)
    for sides in ((8, 12, 4), (4, 8, 8)):
        call = volumes(*sides)
        assert off(answer(student, call), answer(model, call)) < 1e-5


class OfText(nn.Module):
    """Attention to the tokens of a text, or to a map's own, by the same class."""

    def __init__(self, dim, width):
        super().__init__()
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = nn.Linear(width, dim, bias=False), nn.Linear(width, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v))


class Attention(OfText):
    """By a name that attention layers have."""


@pytest.mark.parametrize("cross", [OfText, Attention, nn.MultiheadAttention])
@pytest.mark.parametrize("width", [CHANNELS, 24])
def test_attention_to_a_text_stays(cross, width):
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block1 = nn.ModuleDict({"attn1": Attention(CHANNELS, CHANNELS)})
            more = {"num_heads": 4, "batch_first": True, "kdim": width, "vdim": width}
            self.block1["attn2"] = cross(CHANNELS, **more) if cross is nn.MultiheadAttention else cross(CHANNELS, width)

        def forward(self, x, text):
            tokens = x.flatten(2).mT
            tokens = tokens + self.block1["attn1"](tokens)
            seen = (text, text) if cross is nn.MultiheadAttention else (text,)
            y = self.block1["attn2"](tokens, *seen)
            tokens = tokens + (y[0] if isinstance(y, tuple) else y)
            return tokens.mT.unflatten(2, x.shape[2:])

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.around = nn.Conv2d(3, CHANNELS, 3, padding=1), Transformer()

        def forward(self, x, text):
            return self.around(self.conv(x), text)

    def call(*size):
        return {"x": torch.randn(2, 3, *size), "text": torch.randn(2, 5, width)}

    model = Reads().eval()
    student = subquad.convert(model, "softmax", given=call(8, 8))
    assert list(conversion_of(student).paths.values()) == ["around.block1.attn1"]
    for size in ((8, 8), (6, 10)):
        given = call(*size)
        assert off(answer(student, given), answer(model, given)) < 1e-5


def test_halves_by_patches_hide_no_maps():
    class Levels(nn.Module):
        def __init__(self):
            super().__init__()
            halves = [nn.Conv2d(CHANNELS if n else 3, CHANNELS, 2, stride=2) for n in range(2)]
            self.downs = nn.ModuleList([nn.Sequential(half, OfOneHead(CHANNELS)) for half in halves])

        def forward(self, x):
            for down in self.downs:
                x = down(x)
            return x

    tower = find_tower(Levels(), img_size=(32, 16))
    assert [tuple(layer.grid.shape) for layer in tower.layers] == [(16, 8), (8, 4)]


def test_stages_of_plain_layers_are_told_apart():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, CHANNELS, 4, stride=4)
            self.merge = nn.Conv2d(CHANNELS, CHANNELS, 2, stride=2)
            self.stage1, self.stage2 = (nn.ModuleList([Plain(CHANNELS) for _ in range(2)]) for _ in range(2))

        def forward(self, x):
            x = self.embed(x)
            for blocks, behind in ((self.stage1, self.merge), (self.stage2, nn.Identity())):
                tokens = x.flatten(2).mT
                for block in blocks:
                    tokens = tokens + block(tokens)
                x = behind(tokens.mT.unflatten(2, x.shape[2:]))
            return x

    model = Stages().eval()
    for size in ((32, 32), (64, 32)):
        student = subquad.convert(model, "softmax", img_size=(32, 32))
        x = {"x": torch.randn(2, 3, *size)}
        assert off(answer(student, x), answer(model, x)) < 1e-5
    shapes = [tuple(layer.grid.shape) for layer in find_tower(model, img_size=(64, 32)).layers]
    assert shapes == [(16, 8), (16, 8), (8, 4), (8, 4)]


def test_tokens_in_another_order_than_their_map_are_refused():
    class Columns(OfTokens):
        def forward(self, x):
            return super().forward(x.mT).mT

    model = UNet("tokens").eval()
    model.downs[1][2] = Columns(CHANNELS)
    for size in ((16, 24), (16, 512)):
        with pytest.raises(SubquadError, match=r"do not stand row by row.* of downs\.1\.2\.mha is that of row 0"):
            subquad.convert(model, "linear", given=given(*size))


def test_of_too_many_tokens_nobody_asks_in_which_order_they_stand(monkeypatch):
    monkeypatch.setattr(tokens_order, "MOST_PAIRS", 96**2)
    monkeypatch.setattr(tokens_order, "run_copied", None)
    assert len(converted_layers(subquad.convert(unet("tokens"), "linear", given=given()))) == 5


def test_what_is_given_is_refused_where_it_says_nothing():
    model = unet("pixels")
    with pytest.raises(SubquadError, match=r"can't be run for images of 16×16 px, .* what a call takes by `given`"):
        subquad.convert(model, "linear", img_size=16)
    for wrong, message in (
        ({"x": torch.randn(1, 3, 16, 16)}, r"can't be run for what is given, x, .*time.* give what a call of it takes"),
        ([1], r"given are the arguments of a call of the network, by name, got \[1\]"),
        ({"time": 3}, r"none of what is given is a tensor with a batch: time"),
    ):
        with pytest.raises(SubquadError, match=message):
            subquad.convert(model, "linear", given=wrong)
    with pytest.raises(SubquadError, match="what is given has its sizes: leave img_size out"):
        subquad.convert(model, "linear", given=given(), img_size=16)
    with pytest.raises(SubquadError, match=r"a VisionTransformer stand is known, .* leave `given` out"):
        import timm

        vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
        subquad.convert(vit, "linear", given={"x": torch.randn(1, 3, 32, 32)})
    with pytest.raises(SubquadError, match=r"of ours stand is known: leave `given` out"):
        ours = subquad.create_model("deit_tiny", img_size=32, depth=1)
        subquad.convert(ours, "linear", given={"x": torch.randn(1, 3, 32, 32)})


@pytest.mark.parametrize("damaged", [{"shape of a tensor": [2**15] * 3, "dtype": "float32"}, {"shape of a tensor": 3}])
def test_outlines_that_ask_for_too_much_are_refused(damaged):
    with pytest.raises(SubquadError, match="can't be made"):
        of_outline({"x": damaged})


def test_an_outline_is_of_what_was_given():
    call = given() | {"more": {"texts": [torch.ones(2, 3, dtype=torch.half), 4, None, "a"]}}
    again = of_outline(as_outline(call))
    assert again["x"].shape == (2, 3, 16, 24) and again["time"].tolist() == [0, 0]
    assert again["more"]["texts"][0].dtype == torch.half and again["more"]["texts"][1:] == [4, None, "a"]
    with pytest.raises(SubquadError, match="given are tensors, numbers and text"):
        as_outline({"x": object()})


class Weighing(OfPixels):
    """With factors of its own."""

    def __init__(self, dim):
        super().__init__(dim)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gamma * super().forward(x)


class OfKeysOfAll(OfPlaces):
    """Softmax over queries instead of keys."""

    def forward(self, x):
        energy = torch.bmm(self.query_conv(x).flatten(2).mT, self.key_conv(x).flatten(2))
        out = torch.bmm(self.value_conv(x).flatten(2), energy.softmax(dim=-1))
        return self.gamma * out.view_as(x) + x


class OfChannels(OfOneHead):
    """Attention of channels to each other."""

    def forward(self, x):
        q, k, v = (one(self.norm(x)).flatten(2) for one in (self.q, self.k, self.v))
        y = (q @ k.mT * 0.1).softmax(dim=-1) @ v
        return x + self.proj_out(y.view_as(x))


class Smaller(OfPixels):
    """A map that is smaller than the one that is handed, filled up."""

    def __init__(self, dim):
        super().__init__(dim)
        self.to_out = nn.Conv2d(dim, dim, 3, padding="valid")

    def forward(self, x):
        return nn.functional.pad(super().forward(x), (1, 1, 1, 1))


class WithinRows(OfPixels):
    """Attention of each row of a map alone."""

    def forward(self, x):
        rows = x.transpose(1, 2).flatten(0, 1)[:, :, None]
        return super().forward(rows)[:, :, 0].unflatten(0, (len(x), -1)).transpose(1, 2)


class Squeezing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(dim, dim // 4, 1), nn.Conv2d(dim // 4, dim, 1)

    def forward(self, x):
        return x * self.expand(self.reduce(x.mean(dim=(2, 3), keepdim=True))).sigmoid()


@pytest.mark.parametrize("kind", [Weighing, OfKeysOfAll, Smaller, OfChannels, WithinRows, Squeezing])
def test_what_computes_something_else_is_not_taken_for_attention_of_a_map(kind):
    assert map_reading_of(kind(CHANNELS)) is None and place_reading_of(kind(CHANNELS)) is None


def test_scenes_are_read_by_attention_of_places_behind_any_network():
    """As in DANet: one layer, at an eighth of the image, behind convolutions whose strides are no patches."""

    class Scenes(nn.Module):
        def __init__(self):
            super().__init__()
            strides = [nn.Conv2d(3 if not n else CHANNELS, CHANNELS, 3, stride=2, padding=1) for n in range(3)]
            self.backbone, self.pam = nn.Sequential(*strides), OfPlaces(CHANNELS)
            self.classes = nn.Conv2d(CHANNELS, 5, 1)

        def forward(self, x):
            return nn.functional.interpolate(self.classes(self.pam(self.backbone(x))), x.shape[-2:])

    model = Scenes().eval()
    student = subquad.convert(model, "softmax", img_size=(64, 96))
    assert conversion_of(student).grid == (8, 12, 0)
    for size in ((64, 96), (40, 72)):
        x = {"x": torch.randn(2, 3, *size)}
        assert off(answer(student, x), answer(model, x)) < 1e-5
    linear = subquad.convert(model, "linear", img_size=(64, 96))
    linear(x["x"]).square().mean().backward()
    assert linear.pam.gamma.grad.abs() > 0 and linear.pam.query_conv.weight.grad.abs().sum() > 0


def test_converted_layers_say_what_they_can_not_honour():
    layer = subquad.convert(unet("linear"), "linear", given=given()).mid_attn1
    x = torch.randn(1, CHANNELS, 4, 4)
    assert torch.equal(layer(x), layer(x, None))
    with pytest.raises(SubquadError, match="is called with t beside tokens"):
        layer(x, torch.ones(1))
    for one in (layer, subquad.convert(unet("places"), "linear", given=given()).mid_attn1):
        with pytest.raises(SubquadError, match=r"takes maps \(b, c, height, width\), got \(1, 16, 32\)"):
            one(torch.randn(1, 16, CHANNELS))


def test_places_of_a_large_map_may_be_others():
    class Fewer(OfPlaces):
        def forward(self, x):
            return super().forward(x) if x[0, 0].numel() < 200 else x

    network = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), Fewer(CHANNELS))
    with pytest.raises(SubquadError, match="attention of a few tokens, and something else of 400"):
        subquad.convert(network, "linear", img_size=20)
    assert len(converted_layers(subquad.convert(network, "linear", img_size=10))) == 1


@pytest.mark.slow
def test_a_student_is_written_for_what_was_given(tmp_path):
    student = subquad.convert(unet("pixels"), "inline", given=given())
    subquad.export(student, tmp_path / "unet.pt2", format="pt2", given=given(), takes=["x", "time"])
    call = given()
    engine = open_exported(tmp_path / "unet.pt2")
    assert off(engine(call["x"], call["time"]), answer(student, call)) < 1e-5


@pytest.mark.slow
def test_a_student_is_written_for_any_size(tmp_path):
    student = subquad.convert(unet("pixels"), "linear", given=given())
    settings = {"format": "pt2", "given": given(), "takes": ["x", "time"], "dynamic": "batch,size"}
    written = subquad.export(student, tmp_path / "unet.pt2", **settings)
    assert written.least % written.step == 0 and written.most == 4096
    engine, call = open_exported(tmp_path / "unet.pt2"), given(24, 16, 3)
    assert off(engine(call["x"], call["time"]), answer(student, call)) < 1e-5


def diffusers_unets():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import AutoencoderKL, UNet2DConditionModel, UNet2DModel, VQModel
    torch.manual_seed(0)
    halves = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
    of_text = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "attention_head_dim": 4,
    }
    attending = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 8}
    attending["mid_block_scale_factor"] = 2.0
    coding = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    xl = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 60,
        "use_linear_projection": True,
    }
    unconditional = UNet2DModel(sample_size=16, **halves, **attending, up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    return {
        "UNet2DModel": unconditional,
        "UNet2DConditionModel": UNet2DConditionModel(sample_size=16, **halves, **of_text),
        "XL": UNet2DConditionModel(sample_size=16, **halves, **of_text, **xl),
        "AutoencoderKL": AutoencoderKL(sample_size=32, **halves, **coding),
        "VQModel": VQModel(sample_size=32, num_vq_embeddings=16, **halves, **coding),
    }


def called(name, height=16, width=16):
    text = {"encoder_hidden_states": torch.randn(2, 9, 24)}
    told = {"added_cond_kwargs": {"text_embeds": torch.randn(2, 12), "time_ids": torch.ones(2, 6)}}
    channels = 4 if name in ("XL", "UNet2DConditionModel") else 3
    more = {
        "UNet2DModel": {"timestep": 5},
        "UNet2DConditionModel": {"timestep": 5, **text},
        "AutoencoderKL": {},
        "VQModel": {},
    }
    more["XL"] = more["UNet2DConditionModel"] | told
    return {"sample": torch.randn(2, channels, height, width), **more[name]}


DIFFUSERS = {"UNet2DModel": 4, "UNet2DConditionModel": 4, "XL": 4, "AutoencoderKL": 2, "VQModel": 2}


@pytest.mark.whole
@pytest.mark.parametrize("name", DIFFUSERS)
def test_those_of_diffusers_need_nothing_to_be_given(name):
    model = diffusers_unets()[name].eval()
    student = subquad.convert(model, "softmax")
    assert len(converted_layers(student)) == DIFFUSERS[name]
    linear = subquad.convert(model, "agent:num_agents=4", in_place=False)
    for size in ((16, 16), (24, 32)):
        call = called(name, *size)
        assert off(answer(student, call), answer(model, call)) < 1e-5
        assert off(answer(linear, call), answer(model, call)) > 1e-4


@pytest.mark.parametrize("name", DIFFUSERS)
def test_those_of_diffusers_are_converted_in_half_precision(name):
    model = diffusers_unets()[name].bfloat16().eval()
    student = subquad.convert(model, "softmax")
    call = tree_map_only(torch.Tensor, lambda one: one.bfloat16(), called(name))
    assert off(answer(student, call).float(), answer(model, call).float()) < 0.1


@pytest.mark.parametrize("name", ["UNet2DModel", "UNet2DConditionModel"])
def test_those_of_diffusers_compute_blocks_again(name):
    plain = subquad.convert(diffusers_unets()[name], "inline").train()
    again = deepcopy(plain)
    again.enable_gradient_checkpointing()
    for model in (plain, again):
        torch.manual_seed(0)
        sum(model(**called(name, *size)).sample.square().mean() for size in ((16, 24), (24, 16))).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_u_net_that_says_too_little_is_told_what_to_give():
    model = diffusers_unets()["UNet2DModel"]
    model.register_to_config(sample_size=None)
    with pytest.raises(SubquadError, match="does not say which images it is made for: give img_size"):
        subquad.convert(model, "linear")
    assert subquad.convert(model, "focused", img_size=(16, 24)).mid_block.attentions[0].inner.positions.grid.width == 12


def test_a_u_net_of_a_class_of_its_own_is_told_by_what_is_given():
    from diffusers import UNet2DModel

    class Mine(UNet2DModel):
        pass

    model = Mine(**diffusers_unets()["UNet2DModel"].config)
    with pytest.raises(SubquadError, match=r"a Mine can't be run for images of 16×16 px, .* takes by `given`"):
        subquad.convert(model, "linear")
    assert len(converted_layers(subquad.convert(model, "linear", given=called("UNet2DModel")))) == 4
    with pytest.raises(SubquadError, match=r"img_size has 3 sides, \(16, 16, 16\), and this network takes images"):
        subquad.convert(diffusers_unets()["UNet2DModel"], "linear", img_size=(16, 16, 16))


def test_modules_of_several_names_keep_their_weights():
    class Twice(UNet):
        def __init__(self, attention):
            super().__init__(attention)
            self.again = self.downs

    model = Twice("pixels").eval()
    assert len(converted_layers(subquad.convert(model, "linear", given=given()))) == 5
    assert not any(one.is_meta for one in model.parameters())
