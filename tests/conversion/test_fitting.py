"""Alignment and distillation: errors fall, blocks do not see each other, what is broken off goes on as if unbroken."""

import copy
import resource
import signal
import tarfile
from functools import partial

import numpy as np
import pytest
import torch
from foreign import FOREIGN, sharp
from foreign_diffusion import denoiser, inputs
from mechanisms import refuses
from PIL import Image
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

import subquad
from subquad import ATTENTION, SubquadError
from subquad.conversion import (
    align,
    blocks_for,
    compare_networks,
    conversion_of,
    converted_layers,
    distil,
    fitting_loop,
    hybrid,
    relative_errors,
    sensitivity,
    trade_off,
)
from subquad.conversion.distilling import trained_parameters
from subquad.conversion.drawn_images import Drawn, has_parts, open_images, views
from subquad.conversion.hybrids import HybridRow
from subquad.conversion.unlabelled_images import as_batches
from subquad.data import InputConfig
from subquad.grid import TokenGrid
from subquad.weights.files import within_wrappers

PICTURES = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(1))
FAST = {"batch_size": 8, "lr": 3e-3}
MECHANISMS = sorted(name for name, cls in ATTENTION.items() if not cls.traits.quadratic)


def small(attention="linear", **settings):
    model = sharp("timm ViT")
    torch.manual_seed(0)
    return model, subquad.convert(model, attention, **settings)


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("attention", MECHANISMS)
def test_alignment_lowers_the_error_of_every_block(attention):
    if refuses(attention, "prefix"):
        model = sharp("timm SigLIP")
        student = subquad.convert(model, attention)
    else:
        model, student = small(attention, **({"num_agents": 4} if attention == "agent" else {}))
    before = relative_errors(student, model, PICTURES)
    align(student, PICTURES, updates=30, **FAST)
    after = relative_errors(student, model, PICTURES)
    assert set(before) == {0, 1}
    assert all(after[number] < before[number] for number in before)


@pytest.mark.parametrize("fit", [align, distil])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fits_learn_where_the_caller_has_gradients_off(mode, fit):
    model, student = small()
    with mode():
        pictures = PICTURES + 0
        fit(student, pictures, teacher=model, updates=5, batch_size=8)
        assert not torch.is_grad_enabled()
    other = subquad.convert(model, "linear")
    fit(other, PICTURES, teacher=model, updates=5, batch_size=8)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in student.state_dict().items())


def test_with_softmax_there_is_nothing_to_align():
    model, student = small("softmax")
    assert max(relative_errors(student, model, PICTURES).values()) < 1e-10


@pytest.mark.parametrize("name", [name for name in FOREIGN if name.startswith("transformers ")])
def test_layers_may_give_the_weights_that_they_formed(name):
    model = sharp(name)
    model.set_attn_implementation("eager")
    assert max(relative_errors(subquad.convert(model, "softmax"), model, PICTURES[:4]).values()) < 1e-10


def test_blocks_are_aligned_alone_or_together_alike():
    model, together = small()
    _, alone = small()
    align(together, PICTURES, teacher=model, updates=5, **FAST)
    for number in (1, 0):
        align(alone, PICTURES, teacher=model, blocks=[number], updates=5, **FAST)
    for name, tensor in together.state_dict().items():
        assert torch.equal(tensor, alone.state_dict()[name]), name


def test_alignment_touches_nothing_but_the_converted_layers():
    model, student = small()
    before = state_of(student)
    align(student, PICTURES, updates=3, **FAST)
    paths = tuple(student.subquad_conversion.paths.values())
    for name, tensor in student.state_dict().items():
        if not name.startswith(paths):
            assert torch.equal(tensor, before[name]), name
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), sharp("timm ViT").parameters(), strict=True)
    )


def test_start_values_are_those_with_the_least_error():
    model, student = small("pola")
    candidates = ATTENTION["pola"].traits.start_values["power"]
    align(student, PICTURES, teacher=model, updates=1, lr=1e-12, batch_size=16)
    chosen = relative_errors(student, model, PICTURES)
    for value in candidates:
        for layer in converted_layers(student).values():
            nn.init.constant_(layer.inner.power, value)
        tried = relative_errors(student, model, PICTURES)
        assert all(chosen[number] <= tried[number] + 1e-6 for number in chosen)


@pytest.mark.parametrize(("fit", "opt"), [(align, "adamw"), (distil, "adamw"), (distil, "muon")])
def test_a_fit_that_is_broken_off_goes_on_as_if_it_had_not_been(fit, opt, tmp_path):
    model, whole = small()
    expected = fit(whole, PICTURES, teacher=model, updates=6, opt=opt, **FAST)

    batches = as_batches(PICTURES, batch_size=8, seed=0 if fit is align else 1)

    def interrupted(update):
        if update == 3:
            raise KeyboardInterrupt
        return batches(update)

    _, broken = small()
    state = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        fit(broken, interrupted, teacher=model, updates=6, lr=FAST["lr"], opt=opt, state_file=state)
    _, resumed = small()
    if opt == "adamw":
        # as it was kept before there was a choice
        content = torch.load(state)
        del content["schedule"]["opt"]
        torch.save(content, state)
    done = fit(resumed, PICTURES, teacher=model, updates=6, opt=opt, state_file=state, **FAST)
    assert (done.progress if fit is align else done).updates == 6
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    # one that has ended is not gone on with
    before = state_of(resumed)
    again = fit(resumed, PICTURES, teacher=model, updates=6, opt=opt, state_file=state, **FAST)
    judged = [getattr(one, "progress", one).judged for one in (expected, done, again)]
    assert judged[0] == judged[1] == judged[2]
    assert all(torch.equal(tensor, before[name]) for name, tensor in resumed.state_dict().items())
    with pytest.raises(SubquadError, match="another fit"):
        fit(resumed, PICTURES, teacher=model, updates=7, state_file=state, **FAST)
    state.write_bytes(b"nothing")
    with pytest.raises(SubquadError, match="damaged"):
        fit(resumed, PICTURES, teacher=model, updates=6, state_file=state, **FAST)


@pytest.fixture
def answers_interruptions():
    """As in a terminal: what a shell began in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("answers_interruptions")
@pytest.mark.parametrize("fit", [align, distil])
@pytest.mark.parametrize("where", ["step", "first step", "judge", "last judge"])
def test_a_fit_may_be_broken_off_anywhere(fit, where, tmp_path, monkeypatch):
    """Ctrl-C in the middle of a step, behind which the update counts, and in a measurement, which is made up for."""
    model, whole = small()
    settings = {"teacher": model, "updates": 12, **FAST}
    expected = fit(whole, PICTURES, **settings)
    at, begun = {"step": 5, "first step": 1, "judge": 5, "last judge": 12}[where], fitting_loop._Fit.measured

    def measured(self, batch):
        if "judge" in where and not torch.is_grad_enabled() and self.progress.updates == at:
            signal.raise_signal(signal.SIGINT)
        return begun(self, batch)

    def stepping(self, *args, **kwargs):
        steps.append(1)
        if "step" in where and len(steps) == at:
            signal.raise_signal(signal.SIGINT)

    steps, state, (_, broken) = [], tmp_path / "state.pt", small()
    with monkeypatch.context() as patched:
        patched.setattr(fitting_loop._Fit, "measured", measured)
        hook = register_optimizer_step_pre_hook(stepping)
        with pytest.raises(KeyboardInterrupt):
            fit(broken, PICTURES, state_file=state, **settings)
        hook.remove()
    _, resumed = small()
    found = fit(resumed, PICTURES, state_file=state, **settings)
    progress = [getattr(one, "progress", one) for one in (found, expected)]
    assert progress[0].judged == progress[1].judged and progress[0].last == progress[1].last
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_step_that_fails_leaves_the_state_before_it(tmp_path, monkeypatch):
    model, student = small()
    state, settings = tmp_path / "state.pt", {"teacher": model, "updates": 12, **FAST}
    monkeypatch.setattr(fitting_loop, "SAVED_EVERY", 0)

    def failing(*args, **kwargs):
        steps.append(1)
        if len(steps) == 4:
            raise MemoryError

    steps, hook = [], register_optimizer_step_post_hook(failing)
    with pytest.raises(MemoryError):
        align(student, PICTURES, state_file=state, **settings)
    hook.remove()
    assert torch.load(state)["progress"]["updates"] == 3
    (_, resumed), (_, whole) = small(), small()
    align(resumed, PICTURES, state_file=state, **settings)
    align(whole, PICTURES, **settings)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


@pytest.mark.parametrize("train", ["all", "attention", "new"])
def test_distillation_trains_what_it_is_told_to(train):
    model, student = small("agent", num_agents=4)
    before = state_of(student)
    done = distil(student, PICTURES, teacher=model, train=train, updates=20, batch_size=16, lr=1e-3)
    assert sum(done.last.values()) < sum(done.first.values())
    paths = tuple(student.subquad_conversion.paths.values())
    for name, tensor in student.state_dict().items():
        may = train == "all" or (name.startswith(paths) and (train == "attention" or ".inner." in name))
        assert may or torch.equal(tensor, before[name]), name
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in student.parameters())


def test_networks_are_in_the_modes_that_they_were_in(tmp_path):
    model, student = small("agent", num_agents=4)
    for one in (model.train(), student.train()):
        one.blocks[0].eval()
    modes = [[module.training for module in one.modules()] for one in (model, student)]
    align(student, PICTURES, teacher=model, updates=1, batch_size=2)
    distil(student, PICTURES, teacher=model, updates=1, batch_size=2)
    compare_networks(student, model, [(PICTURES[:2], None)])
    assert [[module.training for module in one.modules()] for one in (model, student)] == modes


def test_changes_of_low_rank_are_trained_and_added(tmp_path):
    pytest.importorskip("peft")
    model, student = small("agent", num_agents=4)
    before, names = state_of(student), list(student.state_dict())
    settings = {"teacher": model, "train": "lora", "updates": 20, "batch_size": 16, "lr": 1e-3}
    done = distil(student, PICTURES, **settings)
    assert sum(done.last.values()) < sum(done.first.values())
    assert list(student.state_dict()) == names
    assert not hasattr(student, "peft_config")
    assert all(parameter.requires_grad for parameter in student.parameters())
    change = student.blocks[0].mlp.fc1.weight - before["blocks.0.mlp.fc1.weight"]
    assert 0 < torch.linalg.matrix_rank(change, rtol=1e-4) <= 8
    assert torch.equal(student.patch_embed.proj.weight, before["patch_embed.proj.weight"])
    assert not torch.equal(student.blocks[0].attn.inner.agent_bias.rows, before["blocks.0.attn.inner.agent_bias.rows"])
    _, broken = small("agent", num_agents=4)
    batches = as_batches(PICTURES, batch_size=16, seed=1)

    def interrupted(update):
        if update == 12:
            raise KeyboardInterrupt
        return batches(update)

    with pytest.raises(KeyboardInterrupt):
        distil(broken, interrupted, **settings, state_file=tmp_path / "state.pt")
    assert list(broken.state_dict()) == names
    distil(broken, PICTURES, **settings, state_file=tmp_path / "state.pt")
    assert all(
        torch.allclose(tensor, broken.state_dict()[name], atol=1e-6) for name, tensor in student.state_dict().items()
    )


def test_networks_without_logits_and_of_transformers_are_distilled_too():
    for name in ("timm DINOv3", "transformers DINOv2"):
        model = sharp(name)
        student = subquad.convert(model, "linear")
        done = distil(student, PICTURES, teacher=model, updates=12, batch_size=16, lr=1e-4)
        assert sum(done.last.values()) < sum(done.first.values())


@pytest.mark.parametrize("name", ["PixArt", "SD3", "Qwen", "Z-Image"])
def test_networks_that_take_more_than_images_are_fed_by_name(name):
    pytest.importorskip("diffusers")
    model = denoiser(name)
    student = subquad.convert(model, "linear")
    done = align(student, lambda update: inputs(name), teacher=model, updates=8, lr=1e-3)
    assert all(done.after[number] < done.before[number] for number in done.before)
    distil(student, lambda update: inputs(name), teacher=model, updates=2, lr=1e-4)


def test_a_state_that_finds_no_room_is_one_line(tmp_path, small_disk):
    model, converted = small()
    small_disk(2000)
    with pytest.raises(SubquadError, match=r"state\.pt can't be written: File too large$"):
        align(converted, PICTURES, teacher=model, updates=1, state_file=tmp_path / "state.pt", **FAST)
    small_disk(resource.RLIM_INFINITY)
    assert not list(tmp_path.iterdir())


def test_a_time_budget_ends_a_fit():
    _, student = small()
    done = align(student, PICTURES, updates=100_000, time_budget=0.5, **FAST)
    assert 0 < done.progress.updates < 10_000
    assert done.progress.seconds < 5


def test_what_went_wrong_is_one_line():
    model, student = small()
    half = subquad.convert(sharp("timm ViT").half(), "linear")
    damages = sensitivity(student, model, PICTURES[:1])
    for call, says in (
        (lambda: align(model, PICTURES), "is not converted"),
        (lambda: align(student, PICTURES, blocks=[7]), "block 7 is not converted"),
        (lambda: align(student, PICTURES, updates=0), "at least one update"),
        (lambda: align(student, PICTURES, epochs=3), "unknown setting of a fit"),
        (lambda: align(student, 3), "images are a tensor"),
        (lambda: align(student, PICTURES * float("nan"), teacher=model), "block 0 is nan before the first update: im"),
        (lambda: distil(student, lambda n: (PICTURES, None), teacher=model), "update 250 gives a tuple: a tensor of"),
        (lambda: align(student, lambda n: None, teacher=model), "for update 250 gives a NoneType"),
        (lambda: align(half, PICTURES.half()), "aligning: parameters of float16 can't be trained"),
        (lambda: align(student, PICTURES, blocks=1), "blocks are some of 0, 1, at least one, got 1"),
        (lambda: hybrid(student, 1), "blocks are some of 0, 1, at least one, got 1"),
        (lambda: align(student, PICTURES, blocks=[]), "blocks are some of 0, 1, at least one"),
        (lambda: align(student, PICTURES, batch_size=0), "got batch_size=0"),
        (lambda: align(student, PICTURES, updates=2.5), "updates are a whole number, .*2.5"),
        (lambda: align(student, PICTURES, lr="fast"), "lr, .* are numbers, .*fast"),
        (lambda: distil(small()[1].double(), PICTURES.double()), "can't be made of its student, give `teacher`"),
        (lambda: sensitivity(student, model, []), "no images to measure"),
        (lambda: trade_off(student, model, PICTURES, damages, at=(4, 4)), "not run on one image of 4×4 alone, to be t"),
        (lambda: blocks_for([HybridRow((), 0.0, None)], speedup=2), r"trade_off\(…, at="),
        (lambda: align(student, [PICTURES], teacher=model), "got a list: of batches that are there already"),
        (lambda: distil(student, PICTURES, train="most"), "unknown train"),
        (lambda: distil(student, PICTURES, train="new"), "adds no parameters"),
    ):
        with pytest.raises(SubquadError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_numbers_of_any_library_are_kept_in_a_state_that_can_be_read(tmp_path):
    settings = {"updates": np.int64(2), "lr": np.float64(1e-3), "time_budget": np.float32(60)}
    model, student = small()
    state = tmp_path / "state.pt"
    done = align(student, PICTURES, teacher=model, batch_size=2, state_file=state, **settings)
    again = align(small()[1], PICTURES, teacher=model, batch_size=2, state_file=state, **settings)
    assert again.progress.updates == done.progress.updates == 2


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager"), AveragedModel])
def test_networks_within_wrappers_are_fitted_and_measured(wrap):
    model, student = small()
    for networks in ((wrap(student), model), (wrap(student), wrap(model))):
        ours, theirs = networks
        align(ours, PICTURES, teacher=theirs, updates=1, batch_size=2)
        distil(ours, PICTURES, teacher=theirs, updates=1, batch_size=2)
        inner = within_wrappers(ours)
        assert relative_errors(ours, theirs, PICTURES) == relative_errors(inner, model, PICTURES)
        rows = sensitivity(ours, theirs, PICTURES)
        assert rows == sensitivity(inner, model, PICTURES)
        assert len(trade_off(ours, theirs, PICTURES, rows)) == 3
        assert compare_networks(ours, theirs, [(PICTURES, None)]) == compare_networks(inner, model, [(PICTURES, None)])


@pytest.mark.parametrize("numbers", [np.array([1]), torch.tensor([1]), range(1, 2), {1}, (np.int64(1),)], ids=repr)
def test_blocks_are_numbers_of_any_kind(numbers):
    model, student = small()
    assert list(align(student, PICTURES, teacher=model, blocks=numbers, updates=1).after) == [1]
    assert list(conversion_of(hybrid(student, numbers)).paths) == [1]


def test_batches_of_any_iterable_are_measured():
    model, student = small()
    parts = PICTURES.split(8)
    rows = sensitivity(student, model, iter(parts))
    assert rows == sensitivity(student, model, parts)
    assert trade_off(student, model, iter(parts), rows) == trade_off(student, model, parts, rows)
    assert [one.block for one in sensitivity(student, model, parts[0])] == [0, 1]


def test_pictures_of_a_folder_in_an_order_of_their_seed_without_the_broken_ones(tmp_path):
    for place in range(5):
        Image.new("RGB", (80 + place, 70), (50 * place, 0, 0)).save(tmp_path / f"{place}.png")
    (tmp_path / "5.png").write_bytes(b"no picture")
    config = InputConfig(img_size=(64, 64))
    images = open_images(tmp_path)
    batches = Drawn(images, views(config), batch_size=3, seed=4)
    again = Drawn(open_images(tmp_path), views(config), batch_size=3, seed=4)
    shapes = [batches(update).shape for update in range(4)]
    assert sorted(shape[0] for shape in shapes) == [2, 2, 3, 3]
    assert {shape[1:] for shape in shapes} == {torch.Size([3, 64, 64])}
    assert torch.equal(batches(3), again(3))
    assert images.broken_paths() == [str(tmp_path / "5.png")]
    for settings in ({"crop_padding": 4}, {"scale": (1.0, 1.0)}):
        assert Drawn(images, views(config, **settings), batch_size=2)(0).shape[1:] == (3, 64, 64)


def test_a_whole_picture_is_found_behind_any_number_of_broken_ones(tmp_path):
    for place in range(1200):
        (tmp_path / f"{place}.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "whole.png")
    batches = Drawn(open_images(tmp_path), views(InputConfig((8, 8))), batch_size=1)
    assert batches(0).shape == (1, 3, 8, 8)
    assert str(tmp_path / "whole.png") not in batches.images.broken_paths()


@pytest.mark.parametrize(("width", "height"), [(20, 15), (64, 64), (300, 70)])
def test_pictures_of_any_size_are_shifted_as_the_network_sees_them(width, height, tmp_path):
    # a ramp, which is as wide in the network's image whatever it was in the file
    ramp = Image.linear_gradient("L").rotate(90).resize((width, height))
    ramp.convert("RGB").save(tmp_path / "ramp.png")
    config = InputConfig((64, 64), mean=(0.0,) * 3, std=(1.0,) * 3, crop_pct=1.0, crop_mode="squash")
    batch = Drawn(open_images(tmp_path), views(config, crop_padding=4), batch_size=1)(0)
    assert batch.shape == (1, 3, 64, 64)
    inside = batch[0, 0, 32, 8:-8]
    assert (inside.max() - inside.min()).item() == pytest.approx(47 / 64, abs=0.05)


@pytest.mark.parametrize(
    ("folders", "has_held_out"), [(("",), False), (("a/", "b/"), True), (("train/a/", "val/a/"), True)], ids=str
)
def test_images_of_an_archive_need_no_classes(folders, has_held_out, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path / "cache"))
    archive = tmp_path / "photos.tar"
    with tarfile.open(archive, "w") as tar:
        for folder in folders:
            for number in range(4):
                file = tmp_path / f"{number}.png"
                Image.new("RGB", (8, 8), (50 * number, 0, 0)).save(file)
                tar.add(file, f"{folder}{number}.png")
    assert len(open_images(archive)) >= 4
    assert has_parts(archive) == has_held_out


@pytest.mark.parametrize("attention", ["linear", "agent:num_agents=4"])
def test_a_frozen_teacher_has_a_student_that_is_trained(attention):
    """Pretrained backbones are frozen by habit, and some mechanisms add no parameters of their own."""
    model = sharp("timm ViT").requires_grad_(False)
    student = subquad.convert(model, attention)
    before = state_of(student)
    align(student, PICTURES, teacher=model, updates=5, **FAST)
    aligned = state_of(student)
    changed = {name for name in before if not torch.equal(before[name], aligned[name])}
    assert {"blocks.0.attn.qkv.weight", "blocks.1.attn.proj.weight"} <= changed
    assert all(".attn." in name for name in changed)
    assert len(trained_parameters(student, "all")) == len(list(student.parameters()))
    distil(student, PICTURES, teacher=model, train="all", updates=2, **FAST)
    # as it was when it was handed over
    assert not any(parameter.requires_grad for parameter in student.norm.parameters())


def test_what_is_frozen_in_a_network_that_is_not_stays():
    _, student = small()
    student.patch_embed.requires_grad_(False)
    trained = {id(parameter) for parameter in trained_parameters(student, "all")}
    stay = {name for name, parameter in student.named_parameters() if id(parameter) not in trained}
    assert stay == {"patch_embed.proj.weight", "patch_embed.proj.bias"}


def shorter():
    model = sharp("timm ViT")
    del model.blocks[1]
    return model


def with_other_classes():
    model = sharp("timm ViT")
    model.reset_classifier(7)
    return model


@pytest.mark.parametrize(
    "measure",
    [
        lambda student, teacher: align(student, PICTURES, teacher=teacher, updates=1, **FAST),
        lambda student, teacher: distil(student, PICTURES, teacher=teacher, updates=1, **FAST),
        lambda student, teacher: relative_errors(student, teacher, PICTURES),
        lambda student, teacher: sensitivity(student, teacher, [PICTURES]),
        lambda student, teacher: trade_off(student, teacher, [PICTURES], []),
    ],
    ids=["align", "distil", "relative_errors", "sensitivity", "trade_off"],
)
def test_a_teacher_that_the_student_was_not_made_of_is_refused(measure):
    _, student = small()
    for teacher, says in ((student, "converted, too"), (shorter(), "another network"), (with_other_classes(), "head")):
        with pytest.raises(SubquadError, match=says) as caught:
            measure(student, teacher)
        assert "\n" not in str(caught.value)


def test_a_teacher_does_not_follow_its_student():
    model, student = small()
    student.head, student.blocks[1].attn.qkv = model.head, model.blocks[1].attn.qkv
    before = state_of(model)
    with pytest.raises(SubquadError, match=r"distilling: blocks\.1\.attn\.qkv\.weight, .* are the teacher's own"):
        distil(student, PICTURES, teacher=model, updates=1, batch_size=2)
    with pytest.raises(SubquadError, match=r"aligning: blocks\.1\.attn\.qkv\.weight, .* are the teacher's own"):
        align(student, PICTURES, teacher=model, updates=1, batch_size=2)
    align(student, PICTURES, teacher=model, blocks=[0], updates=1, batch_size=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    student.blocks[1].attn.qkv = copy.deepcopy(model.blocks[1].attn.qkv)
    distil(student, PICTURES, teacher=model, train="attention", updates=1, batch_size=2)


def test_a_copy_of_a_student_is_fitted_alone():
    _, student = small()
    other = copy.deepcopy(student)
    before = state_of(student)
    align(other, PICTURES, updates=2, **FAST)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert converted_layers(other)[0].recorder is not converted_layers(student)[0].recorder
    assert converted_layers(other)[0].recorder.grid_of(torch.zeros(1, 17, 1)) == TokenGrid(4, 4, 1)
