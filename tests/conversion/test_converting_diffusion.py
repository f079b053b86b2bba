"""Transformers of diffusers with our attention: equal with softmax, any size and text, restored to the bit."""

import copy
from functools import partial

import pytest
import torch
from foreign import answers_at_once, difference
from foreign_diffusion import DIFFUSION, JOINT, UNEVEN, denoised, denoiser, in_front, inputs, sample_of
from mechanisms import assert_refused, refuses
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError
from subquad.conversion import converted_layers, load_converted, save_delta
from subquad.conversion.converted_attention import ADDED
from subquad.diffusion import apply_agent_attention
from subquad.grid import TokenGrid
from subquad.positions import GridTable

pytest.importorskip("diffusers")
# Mochi asks for fp32 by autocast
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")

SUB_QUADRATIC = sorted(name for name, cls in ATTENTION.items() if not cls.traits.quadratic)


def learns_positions(attention):
    grid = TokenGrid(2, 2)
    layer = ATTENTION[attention](16, 2, grid=grid, kv_grid=grid)
    return any(isinstance(part, GridTable) for part in layer.modules())


@pytest.mark.parametrize("name", DIFFUSION)
def test_with_softmax_it_is_the_teacher(name):
    model = denoiser(name)
    student = subquad.convert(model, "softmax")
    for size in [(8, 8), *DIFFUSION[name][1]]:
        for text in (5, 9):
            call = inputs(name, *size, text=text)
            assert difference(denoised(student, call), denoised(model, call)) < 1e-6


def halved(argument):
    """The same in bf16, but for places, which stay as they are."""
    if isinstance(argument, list):
        return [halved(one) for one in argument]
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.bfloat16() if is_float else argument


# PyTorch says it of Flux 3's own norms, which stay in fp32 where they are loaded so
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", DIFFUSION)
def test_in_bf16_it_is_nearer_to_its_teacher_than_that_is_to_itself_in_fp32(name):
    model, call = denoiser(name), inputs(name)
    exact = denoised(model, call)
    call = {key: one if "ids" in key or "rotary" in key else halved(one) for key, one in call.items()}
    teacher = denoised(model.bfloat16(), call)
    answered = denoised(subquad.convert(model, "softmax"), call)
    assert answered.dtype == teacher.dtype
    assert difference(answered.float(), teacher.float()) < difference(teacher.float(), exact)
    assert denoised(subquad.convert(model, "linear"), call).isfinite().all()


@pytest.mark.parametrize("name", DIFFUSION)
def test_every_mechanism_runs_and_the_old_network_comes_back_to_the_bit(name):
    model = denoiser(name)
    calls = [inputs(name, *size) for size in [(8, 8), *DIFFUSION[name][1]]]
    before, state = denoised(model, calls[0]), {key: value.clone() for key, value in model.state_dict().items()}
    prefix = {"prefix": in_front(name)} if name in JOINT else {}
    for attention in SUB_QUADRATIC:
        settings = {"num_agents": 4} if attention == "agent" else {}
        if (prefix or name in UNEVEN) and refuses(attention, "prefix"):
            assert_refused(attention, partial(subquad.convert, model, attention, **prefix), "prefix")
            continue
        if name in UNEVEN and learns_positions(attention):
            with pytest.raises(SubquadError, match="take a mechanism without position tables"):
                subquad.convert(model, attention)
            continue
        student = subquad.convert(model, attention, **prefix, **settings)
        for call in calls:
            assert denoised(student, call).isfinite().all()
        assert not torch.equal(denoised(student, calls[0]), before)
        new = student.state_dict().keys() - state.keys()
        assert all(any(f".{part}." in key for part in ADDED) for key in new)
        restored = subquad.restore(student)
        assert torch.equal(denoised(restored, calls[0]), before)
        assert restored.state_dict().keys() == state.keys()


@pytest.mark.parametrize("name", DIFFUSION)
def test_it_is_kept_in_a_file_beside_its_teacher(name, tmp_path):
    model, call = denoiser(name), inputs(name)
    chosen = {"attention": "inline"} if name in UNEVEN else {"attention": "agent", "num_agents": 4}
    student = subquad.convert(model, **chosen, prefix=in_front(name) if name in JOINT else None)
    save_delta(student, tmp_path / "delta.safetensors", teacher=model)
    loaded = load_converted(tmp_path / "delta.safetensors", model)
    assert torch.equal(denoised(loaded, call), denoised(student, call))


def masked(name, present, adding=False):
    """A call with texts of which some tokens are absent, as the pipeline of each says it."""
    call = inputs(name, 12, 8, text=present.shape[1])
    if name == "Qwen":
        return call | {"encoder_hidden_states_mask": present}
    seen = torch.cat([present, torch.ones(2, 24, dtype=torch.bool)], dim=1)
    if name == "Chroma":
        return call | {"attention_mask": seen}
    keys = seen[:, None, None, :]
    # what its pipeline gives, and what is added to scores instead
    added = torch.zeros(2, 1, 29, 29).masked_fill(~(keys & keys.mT), -torch.inf)
    return call | {"joint_attention_kwargs": {"attention_mask": added if adding else keys}}


@pytest.mark.parametrize("name", ["Bria FIBO", "Chroma", "Qwen"])
def test_absent_tokens_of_a_text_are_seen_by_no_one(name):
    model = denoiser(name)
    present = torch.tensor([[True] * 5, [True, False, True, False, False]])
    call = masked(name, present)
    student = subquad.convert(model, "softmax")
    for one in (call, masked(name, present, adding=True)):
        assert difference(denoised(student, one), denoised(model, one)) < 1e-6
    linear = subquad.convert(model, "linear")
    expected = denoised(linear, call)
    others = call | {"encoder_hidden_states": call["encoder_hidden_states"] + 3.0 * ~present[:, :, None]}
    assert difference(denoised(linear, others), expected) < 1e-6
    assert not torch.equal(denoised(linear, inputs(name, 12, 8)), expected)


def test_what_stands_behind_an_image_is_told_from_it():
    model = denoiser("Z-Image")
    student, linear = subquad.convert(model, "softmax"), subquad.convert(model, "inline")
    assert [converted_layers(student).keys(), model.layers[0].modulation] == [{0, 2, 3}, True]
    for size, text in (((8, 8), 40), ((16, 8), 5), ((16, 16), 70)):  # 16, 0 and 0 tokens fill images up
        call = inputs("Z-Image", *size, text=text)
        assert difference(denoised(student, call), denoised(model, call)) < 1e-6
        assert denoised(linear, call).isfinite().all()
    apart = call | {"cap_feats": [call["cap_feats"][0], call["cap_feats"][1][:5]]}
    assert difference(denoised(student, apart), denoised(model, apart)) < 1e-6
    alone = {name: [one[1]] if isinstance(one, list) else one[1:] for name, one in apart.items()}
    assert difference(denoised(linear, apart)[1:], denoised(linear, alone)) < 1e-6
    of_two_sizes = call | {"x": [call["x"][0], call["x"][1][..., :8]]}
    for wrong, says in ((of_two_sizes, "one size"), ({**call, "x": [[]]}, "list of lat")):
        with pytest.raises(SubquadError, match=says):
            denoised(student, wrong)
    with pytest.raises(SubquadError, match=r"context_refiner\.0\.attention sees texts alone"):
        subquad.convert(model, "linear", blocks=[1])


def with_mask(mask):
    return inputs("Flux") | {"joint_attention_kwargs": {"attention_mask": mask}}


# a token sees only those in front of it; keys count for more
IN_FRONT, WEIGHED = torch.ones(1, 1, 21, 21, dtype=torch.bool).tril(), torch.full((1, 1, 1, 21), 0.5)


def several_pictures(name):
    call = inputs(name)
    call["hidden_states"] = call["hidden_states"].repeat(1, 2, 1)
    if name == "Qwen":
        return call | {"img_shapes": [call["img_shapes"][0] * 2] * 2}
    beside_it = call["img_ids"].clone()
    beside_it[:, 0] = 10 if name == "Flux 2" else 2
    return call | {"img_ids": torch.cat([call["img_ids"], beside_it])}


@pytest.mark.parametrize("name", ["Bria", "Flux", "Flux 2", "LongCat", "Qwen"])
def test_pictures_beside_the_one_that_is_made_are_refused(name):
    student = subquad.convert(denoiser(name), "linear")
    with pytest.raises(SubquadError, match="can't be converted") as caught:
        denoised(student, several_pictures(name))
    assert "\n" not in str(caught.value)


def test_cross_attention_stays():
    student = subquad.convert(denoiser("PixArt"), "linear")
    assert list(converted_layers(student)) == [0, 1]
    assert type(student.transformer_blocks[0].attn2).__name__ == "Attention"


@pytest.mark.parametrize("name", JOINT)
def test_texts_may_be_of_any_length_unless_positions_are_learned(name):
    student = subquad.convert(denoiser(name), "linear")
    for text in (1, 5, 9):
        assert denoised(student, inputs(name, text=text)).isfinite().all()
    few, many = in_front(name), in_front(name, 9)
    student = subquad.convert(denoiser(name), "pola", prefix=few)
    with pytest.raises(
        SubquadError, match=f"for {few} text tokens and gets {many}: convert with prefix={many}"
    ) as caught:
        denoised(student, inputs(name, text=9))
    assert "\n" not in str(caught.value)


def test_a_copied_flux_knows_its_own_grid():
    student = subquad.convert(denoiser("Flux"), "inline")
    copied = copy.deepcopy(student)
    wide, high = inputs("Flux", 8, 12), inputs("Flux", 12, 8)
    expected = denoised(student, wide)
    denoised(copied, high)
    assert torch.equal(denoised(student, wide), expected)
    assert torch.equal(denoised(copied, wide), expected)


class Denoised(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, arguments):
        return sample_of(self.model, arguments)


# these ask their own tensors (is there an image, how long are texts): they can't be exported as they are either
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DIFFUSION if name not in ("HunyuanVideo 1.5", "Lumina 2")])
def test_it_is_exported(name):
    student, call = subquad.convert(denoiser(name), "linear"), inputs(name, 12, 12)
    # Flux's grid is read from numbers, so that it is called once before
    expected = denoised(student, call)
    exported = torch.export.export(Denoised(student), (call,)).module()
    with torch.no_grad():
        assert difference(exported(call), expected) < 1e-6


def patched():
    model = denoiser("PixArt")
    apply_agent_attention(model)
    return model


def processed():
    from diffusers.models.attention_processor import SlicedAttnProcessor

    model = denoiser("PixArt")
    model.set_attn_processor(SlicedAttnProcessor(2))
    return model


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: denoised(subquad.convert(denoiser("Flux"), "linear"), with_mask(IN_FRONT)), r"mask of .* that says"),
        (lambda: denoised(subquad.convert(denoiser("Flux"), "linear"), with_mask(WEIGHED)), r"mask of .* that says"),
        (lambda: subquad.convert(processed(), "linear"), r"attn1: it has a SlicedAttnProcessor"),
        (
            lambda: subquad.convert(denoiser("DiT"), "linear")(
                **inputs("DiT"), cross_attention_kwargs={"ip_adapter_masks": torch.ones(1)}
            ),
            "takes no ip_adapter_masks",
        ),
        (lambda: subquad.convert(object(), "linear"), r"pipe\.transformer"),
        (lambda: subquad.convert(patched(), "linear"), r"attn1: .*: call remove_agent_attention\(\) first"),
        (lambda: apply_agent_attention(subquad.convert(denoiser("DiT"), "linear")), "apply agents to the network as"),
        (lambda: apply_agent_attention(subquad.convert(denoiser("PixArt"), "inline", blocks=[1])), r"blocks\.1\.attn1"),
    ],
    ids=range(8),
)
def test_mistakes_are_one_line(call, says):
    with pytest.raises(SubquadError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in JOINT if "Hunyuan" in name])
def test_blocks_of_a_text_alone_stay(name):
    student = subquad.convert(denoiser(name), "linear")
    assert all(
        path.startswith(("transformer_blocks.", "single_")) for path in student.subquad_conversion.paths.values()
    )


def test_glyphs_and_an_image_stand_beside_the_text():
    model, call = denoiser("HunyuanVideo 1.5"), inputs("HunyuanVideo 1.5")
    call["encoder_hidden_states_2"], call["image_embeds"] = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    call["encoder_attention_mask_2"] = torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert difference(denoised(subquad.convert(model, "softmax"), call), denoised(model, call)) < 1e-6
    assert denoised(subquad.convert(model, "linear"), call).isfinite().all()


def test_a_film_that_is_conditioned_by_others_is_refused():
    student = subquad.convert(denoiser("LTX"), "linear")
    call = inputs("LTX")
    for name in ("num_frames", "height", "width"):
        del call[name]
    with pytest.raises(SubquadError, match="called with num_frames, height and width of the latent"):
        denoised(student, call | {"video_coords": torch.zeros(2, 3, call["hidden_states"].shape[1])})


def test_pictures_beside_the_one_that_flux_3_makes_are_refused():
    student, call = subquad.convert(denoiser("Flux 3"), "linear"), inputs("Flux 3")
    places = call["img_ids"].clone()
    places[:, 3] = -1
    with pytest.raises(SubquadError, match="pictures beside the one that is made"):
        denoised(student, call | {"image_cond_hidden_states": call["hidden_states"], "image_cond_ids": places})
    paths = student.subquad_conversion.paths.values()
    assert all(path.startswith(("mode_blocks.image.", "single_transformer_blocks.")) for path in paths)


@pytest.mark.slow
def test_a_mask_of_ones_says_what_is_there_as_chromas_pipeline_has_it():
    """It was refused, and where the student was compiled, what is there was taken for what is not."""
    present = torch.tensor([[True] * 5, [True, False, True, False, False]])
    call, student = masked("Chroma", present), subquad.convert(denoiser("Chroma"), "linear")
    expected, ones = denoised(student, call), call["attention_mask"].float()
    torch._dynamo.reset()
    for one in (student, torch.compile(student, backend="eager")):
        assert difference(denoised(one, call | {"attention_mask": ones}), expected) < 1e-6
    with pytest.raises(SubquadError, match=r"more than which tokens are there .*: give one of True and False"):
        denoised(student, call | {"attention_mask": ones / 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lumina 2", "Z-Image"])
def test_texts_of_several_lengths_are_mixed_apart_in_compiled_code_too(name):
    """All images had the places of the first one, or the first call had."""
    student = subquad.convert(denoiser(name), "inline")
    calls = [inputs(name, 12, 8, text=count) for count in (3, 9)]
    if name == "Z-Image":
        call = {**calls[0], "cap_feats": [calls[0]["cap_feats"][0], calls[1]["cap_feats"][1]]}
    else:
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, 3:] = False
        call = calls[1] | {"encoder_attention_mask": mask}
    expected = denoised(student, call)
    torch._dynamo.reset()
    compiled = torch.compile(student, backend="eager")
    for _ in range(2):
        assert difference(denoised(compiled, call), expected) < 1e-6


@pytest.mark.parametrize("name", ["Flux", "Flux 2"])
def test_threads_may_have_texts_of_several_lengths(name):
    student = subquad.convert(denoiser(name), "linear")
    calls = [inputs(name, 12, 8, text=count) for count in (5, 9)]
    expected = [denoised(student, call) for call in calls]
    # Flux 2 embeds an image and its text, one after the other
    answers = answers_at_once(student, calls, denoised, embedded=2 if name == "Flux 2" else 1)
    assert all(torch.equal(one, other) for one, other in zip(answers, expected, strict=True))


def test_frames_of_latte_keep_their_own_attention():
    from diffusers import LatteTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2}
    text = {"caption_channels": 24, "cross_attention_dim": 16, "attention_bias": True}
    model = LatteTransformer3DModel(**sizes, **text, sample_size=8, patch_size=2, video_length=3).eval()
    student = subquad.convert(model, "softmax")
    assert all(".transformer_blocks." in f".{path}" for path in student.subquad_conversion.paths.values())
    call = {"hidden_states": torch.randn(2, 4, 3, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 24)}
    call |= {"timestep": torch.tensor([3, 5])}
    with torch.no_grad():
        assert difference(student(**call).sample, model(**call).sample) < 1e-6


def test_a_scale_that_diffusers_passes_over_is_passed_over():
    student, call = subquad.convert(denoiser("PixArt"), "softmax"), inputs("PixArt")
    scaled = call | {"cross_attention_kwargs": {"scale": 0.5}}
    assert torch.equal(denoised(student, scaled), denoised(student, call))
