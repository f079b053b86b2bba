"""One line on, one line off: what a patched pipeline computes, and that nothing is left of it."""

import copy
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import diffusers
import tiny
from diffusers import StableDiffusionImg2ImgPipeline
from diffusers.models.attention_processor import AttnProcessor2_0

from subquad import SubquadError, TokenGrid
from subquad.diffusion import (
    EARLY,
    LATE,
    Settings,
    apply_agent_attention,
    apply_token_merging,
    remove_agent_attention,
)
from subquad.diffusion import processor as processor_module
from subquad.diffusion.processor import MergedAttention, Shared, match


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


@pytest.fixture(autouse=True)
def restored(pipe):
    yield
    remove_agent_attention(pipe)


def peft_model(unet):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(unet, peft.LoraConfig(r=2, target_modules=["to_q"]))


def traces(unet):
    """What a patch leaves on a model."""
    hooks = [hook for module in unet.modules() for hook in module._forward_pre_hooks.values()]
    return hooks + [p for p in unet.attn_processors.values() if isinstance(p, MergedAttention)]


def test_a_pipeline_is_patched_and_restored_to_the_bit(pipe):
    before = tiny.latents(pipe)
    handle = apply_agent_attention(pipe)
    assert handle.active and (tiny.latents(pipe) - before).abs().max() > 1e-4
    assert torch.equal(tiny.latents(pipe), tiny.latents(pipe))
    apply_token_merging(pipe)
    assert not handle.active
    again = apply_agent_attention(pipe)
    again.remove()
    assert not again.active and not traces(pipe.unet) and torch.equal(tiny.latents(pipe), before)
    with apply_token_merging(pipe, ratio=0.3):
        assert not torch.equal(tiny.latents(pipe), before)
    assert not traces(pipe.unet) and torch.equal(tiny.latents(pipe), before)


def test_a_handle_removes_its_own_patch_and_no_other(pipe):
    before = tiny.latents(pipe)
    first = apply_agent_attention(pipe)
    second = apply_token_merging(pipe, ratio=0.3)
    merged = tiny.latents(pipe)
    first.remove()
    assert second.active and not first.active and torch.equal(tiny.latents(pipe), merged)
    with apply_agent_attention(pipe) as third:
        second.remove()
        assert third.active and not second.active
        with apply_token_merging(pipe, ratio=0.3) as fourth:
            assert fourth.active and torch.equal(tiny.latents(pipe), merged)
        assert not third.active and torch.equal(tiny.latents(pipe), before)
    assert not traces(pipe.unet) and torch.equal(tiny.latents(pipe), before)


def test_projections_that_are_fused_later_are_said_to_switch_it_off(pipe):
    fused = copy.deepcopy(pipe.unet)
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    handle = apply_agent_attention(fused)
    fused.fuse_qkv_projections()
    assert not handle.active
    with torch.no_grad(), pytest.warns(UserWarning, match="apply them again") as said:
        plain = fused(x, 900, text).sample
    assert len(said) == 1
    with torch.no_grad():
        assert torch.equal(fused(x, 900, text).sample, plain)
        assert apply_agent_attention(fused).active and not torch.equal(fused(x, 900, text).sample, plain)


def test_tokens_that_something_else_merges_are_refused_in_one_line(pipe):
    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    apply_agent_attention(pipe)
    fewer = block.attn1.register_forward_pre_hook(lambda module, args: (args[0][:, ::2], *args[1:]))
    try:
        with pytest.raises(SubquadError, match=r"given 384 of its block's 768 tokens: something else, such as tomesd"):
            tiny.latents(pipe, 64, 48)
    finally:
        fewer.remove()
    remove_agent_attention(pipe)
    # tomesd gives blocks another class, which it calls so
    kind = type(block)
    block.__class__ = type("ToMeBlock", (kind,), {})
    try:
        with pytest.raises(SubquadError, match=r"call tomesd\.remove_patch\(\) first"):
            apply_agent_attention(pipe)
        assert not traces(pipe.unet)
    finally:
        block.__class__ = kind


def test_the_early_phase_ends_below_its_level_and_not_at_it(pipe):
    noise = apply_agent_attention(pipe).noise
    assert noise.threshold == 600
    for level, phase in ((999.0, EARLY), (601.0, EARLY), (600.0, EARLY), (599.0, LATE), (0.0, LATE)):
        noise.choose(level)
        assert noise.shared.settings == phase


def test_maps_are_as_high_and_as_wide_as_the_images(pipe):
    handle = apply_agent_attention(pipe, max_downsample=1)
    tiny.latents(pipe, 32, 24, steps=1)
    assert {processor.grid.shape for processor in handle.processors.values()} == {(16, 12)}


def test_self_attention_alone_is_patched_and_text_is_attended_to_as_before(pipe):
    handle = apply_agent_attention(pipe, max_downsample=8)
    kinds = {name.split(".")[-2]: set() for name in pipe.unet.attn_processors}
    for name, processor in pipe.unet.attn_processors.items():
        kinds[name.split(".")[-2]].add(type(processor).__name__)
    assert kinds == {"attn1": {"MergedAttention"}, "attn2": {"AttnProcessor2_0"}}
    assert all(name.endswith(".attn1") for name in handle.processors)


def test_token_merging_has_the_cells_that_are_asked_for_and_no_agents(pipe):
    noise = apply_token_merging(pipe, sx=4, sy=2, ratio=0.3).noise
    assert noise.early == noise.late == Settings(sx=4, sy=2, ratio=0.3, agent_ratio=None)
    assert noise.early.cell(16, 12) == (2, 4)


def test_nothing_merged_is_the_untouched_image_to_the_bit(pipe):
    before = tiny.latents(pipe)
    with apply_agent_attention(pipe, ratio=0.0) as handle:
        assert handle.active and torch.equal(tiny.latents(pipe), before)


def test_a_copy_is_patched_and_restored_by_itself(pipe):
    before = tiny.latents(pipe)
    apply_agent_attention(pipe)
    patched, copied = tiny.latents(pipe), copy.deepcopy(pipe.unet)
    remove_agent_attention(pipe)
    assert torch.equal(tiny.latents(pipe), before)
    original, pipe.unet = pipe.unet, copied
    try:
        assert torch.equal(tiny.latents(pipe), patched)
        remove_agent_attention(pipe)
        assert not traces(copied) and torch.equal(tiny.latents(pipe), before)
    finally:
        pipe.unet = original


@pytest.mark.parametrize(("height", "width"), [(40, 24), (24, 56)])
@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_any_size_with_and_without_guidance_and_random_destinations(pipe, height, width, guidance):
    with apply_agent_attention(pipe, random=True):
        assert tiny.latents(pipe, height, width, guidance_scale=guidance).isfinite().all()


def test_phases_go_by_the_noise_level_whatever_the_number_of_steps(pipe):
    handle = apply_agent_attention(pipe)
    shared = next(iter(handle.processors.values())).shared
    seen = []

    def note(pipe, step, t, kwargs):
        seen.append((int(t) >= 600, shared.settings))
        return kwargs

    for steps in (3, 10):
        tiny.latents(pipe, steps=steps, callback_on_step_end=note)
    assert {early for early, _ in seen} == {True, False}
    assert all(settings == (EARLY if early else LATE) for early, settings in seen)


def test_image_to_image_starts_in_the_phase_of_its_noise(pipe):
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    image, phases = torch.rand(1, 3, 32, 24), []

    def latents(**settings):
        generator = torch.Generator().manual_seed(0)
        return other("a", image=image, strength=0.5, generator=generator, output_type="latent", **settings).images

    before = latents(num_inference_steps=6)
    with apply_agent_attention(other) as handle:

        def note(pipe, step, t, kwargs):
            phases.append(handle.noise.shared.settings)
            return kwargs

        assert not torch.equal(latents(num_inference_steps=6, callback_on_step_end=note), before)
    assert set(phases) == {LATE} and torch.equal(latents(num_inference_steps=6), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_merges_the_tokens_that_full_precision_does(dtype):
    unet, x, text = tiny.unet(), torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    with torch.no_grad(), apply_agent_attention(unet):
        expected = unet(x, 900, text).sample
        got = unet.to(dtype)(x.to(dtype), 900, text.to(dtype)).sample
    assert got.dtype == dtype and (got - expected).norm() < 0.1 * expected.norm()


def test_one_phase_of_ones_own_holds_at_every_level(pipe):
    handle = apply_agent_attention(pipe.unet, sx=4, sy=4, ratio=0.4, agent_ratio=0.95, max_downsample=1)
    shared = next(iter(handle.processors.values())).shared
    tiny.latents(pipe)
    assert shared.settings == Settings() and len(handle.processors) == 3


def test_a_fixed_number_of_agents_keeps_it_whatever_the_size_of_the_map():
    for side in (8, 16, 32, 64):
        rows, columns = Settings(agents=16).cell(side, side)
        assert (side // rows) * (side // columns) == 16
    assert Settings(agents=256).cell(64, 64) == (EARLY.sy, EARLY.sx)


@pytest.mark.parametrize("agents", [10, 20, 50])
def test_there_are_never_more_agents_than_are_asked_for(agents):
    for height, width in ((16, 16), (16, 12), (33, 20)):
        rows, columns = Settings(agents=agents).cell(height, width)
        assert (height // rows) * (width // columns) <= agents


@pytest.mark.parametrize("agents", [1, 2, 4, 10])
def test_there_are_agents_on_maps_that_are_narrower_than_their_cells(agents):
    for height, width in ((16, 128), (128, 16), (1, 40), (40, 1), (16, 12)):
        rows, columns = Settings(agents=agents).cell(height, width)
        assert max(1, agents // 2) <= (height // rows) * (width // columns) <= agents


@pytest.mark.parametrize(("ratio", "used"), [(0.4, True), (0.5, False)])
def test_agents_are_used_where_they_are_fewer_than_half_of_the_tokens(ratio, used):
    # 4 agents of 16 tokens, of which 10 or 8 are left
    shared = Shared(Settings(sx=2, sy=2, ratio=ratio, agent_ratio=0.75))
    features, agents = shared.cuts(torch.randn(1, 16, 8), TokenGrid(4, 4))
    assert features.count == 16 - int(16 * ratio) and (agents is not None) == used
    assert agents is None or agents.count == 4


def test_a_fixed_number_of_agents_is_the_early_phase_where_that_has_as_many(pipe):
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    found = []
    for settings in ({"agents": 16}, {"sx": 4}, {"agents": 4}):
        with apply_agent_attention(pipe, **settings), torch.no_grad():
            found.append(pipe.unet(x, 900, text).sample)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_sdxl_is_patched_at_the_first_level_that_has_attention():
    pipe = tiny.pipeline_xl()
    before = tiny.latents(pipe, 64, 48)
    with apply_agent_attention(pipe) as handle:
        assert len(handle.processors) == 8
        assert not torch.equal(tiny.latents(pipe, 64, 48), before)
    assert torch.equal(tiny.latents(pipe, 64, 48), before)
    with pytest.raises(SubquadError, match="max_downsample=1 patches nothing: self-attention stands at 1/2 here"):
        apply_agent_attention(pipe, max_downsample=1)


def test_processors_that_something_else_has_replaced_are_left_and_noticed(pipe):
    before = tiny.latents(pipe)
    handle = apply_agent_attention(pipe)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    assert not handle.active
    with pytest.warns(UserWarning, match="agents and merging are off: AttnProcessor2_0 stands") as said:
        assert torch.equal(tiny.latents(pipe), before)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    # once is enough
    assert torch.equal(tiny.latents(pipe), before)
    assert all(processor.tokens is None for processor in handle.processors.values())
    handle.remove()
    assert not traces(pipe.unet) and torch.equal(tiny.latents(pipe), before)


def test_what_can_not_be_patched_is_said_in_one_line_and_left_alone(pipe):
    class Other(AttnProcessor2_0):
        pass

    attention = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    attention.processor, original = Other(), attention.processor
    try:
        with pytest.raises(SubquadError, match=r"down_blocks.0.attentions.0.transformer_blocks.0.attn1 has a Other"):
            apply_agent_attention(pipe)
        assert not traces(pipe.unet)
    finally:
        attention.processor = original
    for model, reason in (
        (torch.nn.Linear(2, 2), "Linear has no blocks"),
        (object(), "object has no U-Net or transformer"),
    ):
        with pytest.raises(SubquadError, match=reason):
            apply_agent_attention(model)


def test_a_processor_of_ones_own_is_not_taken_for_diffusers_by_its_name(pipe):
    """What it did beside attention was lost without a word."""

    class AttnProcessor:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return torch.zeros_like(hidden_states)

    attention = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    attention.processor, original = AttnProcessor(), attention.processor
    try:
        with pytest.raises(SubquadError, match=rf"AttnProcessor of {__name__}, which can't be replaced: give "):
            apply_agent_attention(pipe)
        assert not traces(pipe.unet)
        # as the line says
        pipe.unet.set_attn_processor(AttnProcessor2_0())
        assert apply_agent_attention(pipe).active
    finally:
        attention.processor = original


def test_what_stands_in_a_layers_place_later_is_said(pipe):
    class Other(torch.nn.Module):
        def forward(self, hidden_states, **settings):
            return hidden_states

    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    handle, original = apply_agent_attention(pipe), block.attn1
    block.attn1 = Other()
    try:
        with pytest.warns(UserWarning, match="agents and merging are off: Other stands where"):
            tiny.latents(pipe)
        assert not handle.active
    finally:
        block.attn1 = original


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile, peft_model], ids=lambda wrap: wrap.__name__)
def test_a_network_within_a_wrapper_is_patched_as_it_is_by_itself(wrap):
    bare = tiny.unet()
    wrapped, args = wrap(bare), (torch.randn(1, 4, 16, 12), 900, torch.randn(1, 7, 32))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        before = wrapped(*args).sample
        by_itself = apply_agent_attention(bare)
        there, merged = list(by_itself.processors), bare(*args).sample
        handle = apply_agent_attention(wrapped)
        assert list(handle.processors) == there and handle.active and not by_itself.active
        assert torch.equal(wrapped(*args).sample, merged)
        # the phase is chosen by the wrapper
        wrapped(args[0], 100, args[2])
        assert handle.noise.shared.settings == LATE
        handle.model = SimpleNamespace(unet=bare)
        assert not handle.active
        remove_agent_attention(wrapped)
        assert torch.equal(wrapped(*args).sample, before)
    assert not wrapped._forward_pre_hooks


def test_threads_of_data_parallel_are_refused():
    network = torch.nn.DataParallel(tiny.unet())
    network.device_ids = [0, 1]
    with pytest.raises(SubquadError, match="DataParallel calls a network in 2 threads at once"):
        apply_agent_attention(network)
    assert not traces(network.module)


WRONG = {
    "sx": (0, 2.5, "4"),
    "sy": (-1, True),
    "ratio": (1.5, -0.1, float("nan"), "0.4"),
    "agent_ratio": (1.01, "0.5"),
    "agents": (0, 2.5, True),
    "k_scale": (float("nan"), None, "0.3"),
    "k_shortcut": (float("inf"), "a"),
    "max_downsample": (0, 1.5, "2", 3, 16),
    "random": ("no", 2),
    "reuse": (-1, 1.5, "1"),
    "merge_mlp": ("yes",),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("apply", [apply_agent_attention, apply_token_merging])
def test_a_wrong_setting_is_said_in_one_line_and_leaves_what_was_there(pipe, apply, name):
    assert WRONG.keys() == inspect.signature(apply_agent_attention).parameters.keys() - {"model"}
    if name not in inspect.signature(apply).parameters:
        return
    handle = apply_token_merging(pipe)
    for wrong in WRONG[name]:
        with pytest.raises(SubquadError, match=rf"^{name} must be [^\n]*, got "):
            apply(pipe, **{name: wrong})
    assert handle.active


def test_a_patch_that_can_not_be_leaves_the_one_that_is_there(pipe):
    with pytest.raises(SubquadError, match="agents=16 stands in place of sx, sy and agent_ratio: leave out sx"):
        apply_agent_attention(pipe, agents=16, sx=4)
    handle = apply_agent_attention(pipe.unet)
    attention = pipe.unet.up_blocks[1].attentions[0].transformer_blocks[0].attn1
    attention.residual_connection = True
    try:
        with pytest.raises(SubquadError, match="has a residual_connection"):
            apply_agent_attention(pipe.unet, ratio=0.3)
    finally:
        attention.residual_connection = False
    assert handle.active


COUNTING_NOTHING = diffusers.DDPMWuerstchenScheduler, diffusers.KarrasVeScheduler
COUNTING_OTHERS = diffusers.EDMEulerScheduler, diffusers.CMStochasticIterativeScheduler


@pytest.mark.parametrize("kind", COUNTING_OTHERS + COUNTING_NOTHING)
def test_phases_are_refused_where_levels_are_not_counted_in_training_steps(pipe, kind):
    """Playground v2.5 and consistency models hand the network a logarithm of the noise."""
    other = SimpleNamespace(unet=pipe.unet, scheduler=kind())
    with pytest.raises(SubquadError, match=rf"^{kind.__name__} does not count .*: give sx, sy, ratio and agent_ratio"):
        apply_agent_attention(other)
    assert not traces(pipe.unet)
    apply_agent_attention(other, sx=4, sy=4).remove()
    apply_token_merging(other).remove()


def test_images_of_one_call_that_need_both_phases_are_refused(pipe):
    """As in training, where each has a noise level of its own: all had the phase of the first."""
    images, text = torch.randn(2, 4, 16, 16), torch.randn(2, 7, pipe.unet.config.cross_attention_dim)
    with torch.no_grad(), apply_agent_attention(pipe):
        for levels in ([900, 600], [599, 100]):
            both = pipe.unet(images, torch.tensor(levels), text).sample
            each = [pipe.unet(images[k : k + 1], levels[k], text[k : k + 1]).sample for k in range(2)]
            torch.testing.assert_close(both, torch.cat(each), rtol=1e-4, atol=1e-5)
        with pytest.raises(SubquadError, match="go from 599 to 900, on both sides of 600, where the phase changes"):
            pipe.unet(images, torch.tensor([900, 599]), text)
    with torch.no_grad(), apply_agent_attention(pipe, sx=4, sy=4):
        pipe.unet(images, torch.tensor([900, 599]), text)


@pytest.mark.parametrize("kind", [diffusers.EDMEulerScheduler, diffusers.CMStochasticIterativeScheduler])
def test_a_scheduler_that_does_not_count_and_comes_after_the_patch_is_refused(pipe, kind):
    scheduler = kind()
    scheduler.set_timesteps(8)
    image, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, pipe.unet.config.cross_attention_dim)
    with apply_agent_attention(pipe), pytest.raises(SubquadError, match=r"level of -[\d.]+ counts no training steps"):
        for level in scheduler.timesteps:
            pipe.unet(image, level, text)
    with apply_agent_attention(pipe, sx=4, sy=4):
        pipe.unet(image, scheduler.timesteps[-1], text)


COUNTING = ("DDIM", "DDPM", "DPMSolverMultistep", "EulerAncestralDiscrete", "EulerDiscrete", "FlowMatchEulerDiscrete")
COUNTING += ("HeunDiscrete", "KDPM2Discrete", "LCM", "LMSDiscrete", "PNDM", "TCD", "UniPCMultistep", "DEISMultistep")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COUNTING)
def test_phases_are_those_of_all_schedulers_that_count_in_training_steps(pipe, name):
    scheduler = getattr(diffusers, f"{name}Scheduler")()
    scheduler.set_timesteps(8)
    with apply_agent_attention(SimpleNamespace(unet=pipe.unet, scheduler=scheduler)) as handle:
        assert handle.noise.threshold == 600


def test_a_network_that_is_compiled_in_place_is_told_how_else(pipe):
    """Its hooks are compiled with it, where none can see the level."""
    unet = tiny.unet()
    unet.compile(backend="eager")
    with pytest.raises(SubquadError, match=r"compiled in place .*: give pipe\.unet = torch\.compile\(pipe\.unet\)"):
        apply_agent_attention(unet)
    assert not traces(unet) and apply_token_merging(unet).active
    for held in ({"random": True}, {"reuse": 2}):
        # what holds for a step would hold for good
        with pytest.raises(SubquadError, match=r"compiled in place .*, without random and reuse"):
            apply_token_merging(unet, **held)


@pytest.mark.parametrize("apply", [apply_agent_attention, apply_token_merging])
def test_cells_of_one_token_are_refused(pipe, apply):
    with pytest.raises(SubquadError, match="cells of 1×1 tokens hold nothing to merge: give sx or sy of 2 or more"):
        apply(pipe, sx=1, sy=1)
    assert apply(pipe, sx=1, sy=2).active and apply_agent_attention(pipe, agents=400).active


@torch.no_grad()
def test_a_scheduler_that_counts_to_one_and_comes_after_the_patch_is_said(pipe):
    image, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, pipe.unet.config.cross_attention_dim)
    with apply_agent_attention(pipe):
        for level in (999.0, 500.0, 1.0, 0.0, 1.0):
            pipe.unet(image, torch.tensor(level), text)
        with pytest.warns(UserWarning, match=r"has noise levels of 1 at most, as 0\.7, all in the late phase"):
            pipe.unet(image, torch.tensor(0.7), text)
        pipe.unet(image, torch.tensor(0.4), text)


def test_a_handle_of_a_patch_that_is_gone_is_not_active_whatever_puts_its_processors_back():
    unet = tiny.unet()
    handle = apply_agent_attention(unet)
    processors = dict(unet.attn_processors)
    assert handle.active
    handle.remove()
    unet.set_attn_processor(processors)
    assert not handle.active


def test_several_controlnets_are_patched_one_by_one():
    nets = torch.nn.Module()
    nets.nets = torch.nn.ModuleList([tiny.unet(), tiny.unet()])
    with pytest.raises(SubquadError, match="holds 2 networks: apply it to each of its nets"):
        apply_agent_attention(nets)


@pytest.mark.slow
def test_a_patched_unet_compiles_without_a_break_and_a_phase_costs_one_more_graph(pipe):
    graphs = []
    compiled = torch.compile(pipe.unet, backend=lambda graph, _: graphs.append(1) or graph, fullgraph=True)
    handle = apply_agent_attention(compiled)
    x, text = torch.randn(1, 4, 16, 12), torch.randn(1, 7, 32)
    for level, phase in ((900, EARLY), (10, LATE), (700, EARLY), (300, LATE)):
        with torch.no_grad():
            got = compiled(x, torch.tensor(level), text).sample
            assert handle.noise.shared.settings == phase
            torch.testing.assert_close(got, pipe.unet(x, torch.tensor(level), text).sample)
    assert len(graphs) == 2 and handle.active
    remove_agent_attention(compiled)
    assert not traces(compiled._orig_mod) and not compiled._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
@pytest.mark.parametrize(
    ("sampler", "strength"),
    [*itertools.product(["DDIM", "HeunDiscrete", "PNDM"], [None, 0.4, 0.8]), ("DDIMInverse", None)],
)
def test_the_callback_enters_the_phase_of_the_step_to_come(pipe, monkeypatch, sampler, strength):
    scheduler = getattr(diffusers, f"{sampler}Scheduler").from_config(pipe.scheduler.config)
    monkeypatch.setattr(pipe, "scheduler", scheduler)
    given = {"height": 32, "width": 32}
    if strength is not None:
        pipe = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        given = {"image": torch.rand(1, 3, 32, 32), "strength": strength}
    handle = apply_agent_attention(pipe)
    seen, levels = [], []

    def note(pipe, step, t, kwargs):
        handle.callback(pipe, step, t, kwargs)
        seen.append(handle.noise.shared.settings)
        levels.append(float(t))
        return kwargs

    pipe("", num_inference_steps=6, output_type="latent", callback_on_step_end=note, **given)
    expected = [EARLY if level >= 600 else LATE for level in [*levels[1:], levels[0]]]
    assert len(levels) > 1 and seen == expected


def test_calls_at_one_level_each_have_their_own_matching(pipe, monkeypatch):
    """Guidance in two calls, views and chunks: a call had the matching of the last one of the step before."""
    x, text, made = torch.randn(3, 1, 4, 32, 32), torch.randn(1, 7, 32), []
    monkeypatch.setattr(processor_module, "match", lambda *given: made.append(given[0]) or match(*given))
    with apply_agent_attention(pipe, sx=2, sy=2, ratio=0.5, agent_ratio=0.9, reuse=3), torch.no_grad():

        def step(level, *views):
            return [pipe.unet(x[view], level, text).sample for view in views]

        step(900, 0, 1)
        maps = len(made) // 2
        step(800, 0, 1)
        # at an image's first level the second call may have been another image's
        assert len(made) == 4 * maps
        alone = step(700, 0, 1)[0]
        assert len(made) == 4 * maps
        step(900, 0)
        step(800, 0)
        assert len(made) == 5 * maps
        # a new image each, in one step
        step(999, 0)
        one = step(999, 1)[0]
        step(1000, 1)
    with apply_agent_attention(pipe, sx=2, sy=2, ratio=0.5, agent_ratio=0.9, reuse=3), torch.no_grad():
        step(800, 0)
        assert torch.equal(step(700, 0)[0], alone)
        assert torch.equal(pipe.unet(x[1], 999, text).sample, one)
