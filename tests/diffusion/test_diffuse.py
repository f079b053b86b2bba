"""`subquad diffuse`: images with and without, from the same noise, with a page; stopped and gone on with."""

import json
import logging
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny

from subquad import SubquadError
from subquad.benchmarks import METHODS, images_table, make_images
from subquad.cli import main
from subquad.diffusion import apply_agent_attention
from subquad.diffusion.folder import ImageFolder, difference_of
from subquad.diffusion.pipelines import Sampling, load_pipeline, make_image
from subquad.pages import write_images_page

SMALL = Sampling(steps=2, height=32, width=24)
ALL = {name: {} for name in METHODS}


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


@pytest.fixture(scope="module")
def saved(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    pipe.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_every_method_makes_an_image_of_the_same_noise(pipe, tmp_path):
    rows, summary = make_images(pipe, ["a", "b"], tmp_path / "new", methods=ALL, sampling=SMALL, seeds=[0, 1])
    assert [(row.prompt, row.seed, row.method) for row in rows] == [
        (prompt, seed, method) for prompt in "ab" for seed in (0, 1) for method in METHODS
    ]
    assert len({row.file for row in rows}) == len(rows)
    for row in rows:
        of_softmax = next(one for one in rows if (one.prompt, one.seed) == (row.prompt, row.seed))
        with Image.open(tmp_path / "new" / row.file) as image, Image.open(tmp_path / "new" / of_softmax.file) as plain:
            assert image.size == (24, 32) and row.seconds > 0
            known = {"psnr": None, "difference": None} if row is of_softmax else difference_of(image, plain)
        assert (row.psnr, row.difference) == (known["psnr"], known["difference"])
    assert [row.method for row in summary] == list(METHODS)
    assert all(row.peak_mb > 0 and (row.gain is None) == (row.method == "softmax") for row in summary)
    assert max(map(len, images_table(summary).splitlines())) <= 80
    # a method that changes nothing makes the same image
    same = make_images(pipe, ["a"], tmp_path / "same", methods={"softmax": {}, "agent": {"ratio": 0.0}}, sampling=SMALL)
    assert (same[0][1].difference, same[0][1].psnr) == (0.0, None)


def test_what_is_there_is_not_made_again(pipe, tmp_path, monkeypatch):
    made = []

    def counted(*given):
        made.append(given[1])
        return make_image(*given)

    monkeypatch.setattr("subquad.benchmarks.pipeline_costs.make_image", counted)
    settings = {"methods": {"softmax": {}, "agent": {}}, "sampling": SMALL, "memory": False}
    first, _ = make_images(pipe, ["a"], tmp_path / "x", **settings)
    (tmp_path / "x" / first[1].file).unlink()
    second, _ = make_images(pipe, ["a", "b"], tmp_path / "x", **settings)
    assert made == ["a", "a", "a", "b", "b"] and len(second) == 4
    assert sorted((row.prompt, row.method) for row in second) == sorted(
        (p, m) for p in "ab" for m in ALL if m != "tome"
    )
    with pytest.raises(SubquadError, match="has images of other sampling: name another --output"):
        make_images(pipe, ["a"], tmp_path / "x", **settings | {"sampling": Sampling(steps=3)})
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mine.txt").touch()
    with pytest.raises(SubquadError, match="is not empty, and no folder of `subquad diffuse`"):
        make_images(pipe, ["a"], tmp_path / "y", **settings)


def test_settings_that_cannot_be_are_said_before_the_first_image(pipe, tmp_path):
    methods = {"softmax": {}, "agent": {"agents": 4, "sx": 2}}
    with pytest.raises(SubquadError, match="leave out sx"):
        make_images(pipe, ["a"], tmp_path / "new", methods=methods, sampling=SMALL)
    assert not (tmp_path / "new").exists()


def test_one_side_alone_is_of_the_image_and_the_other_the_pipelines_own(pipe, monkeypatch):
    """Stable Diffusion's pipeline takes a height without a width, or the other way, for neither."""
    assert make_image(pipe, "a", 0, Sampling(steps=1, height=16)).size == (32, 16)
    assert make_image(pipe, "a", 0, Sampling(steps=1, width=48)).size == (48, 32)
    unet = tiny.unet(sample_size=(8, 12))
    monkeypatch.setattr(pipe, "unet", unet)
    assert make_image(pipe, "a", 0, Sampling(steps=1, height=32)).size == (24, 32)
    assert make_image(tiny.pipeline_xl(), "a", 0, Sampling(steps=1, width=16)).size == (16, 32)
    monkeypatch.delattr(pipe, "vae_scale_factor")
    with pytest.raises(SubquadError, match="does not say its own height: give height beside width"):
        make_image(pipe, "a", 0, Sampling(steps=1, width=48))


def test_a_seed_stands_for_a_noise_of_its_own(pipe):
    first, again, other = (make_image(pipe, "a", seed, SMALL) for seed in (1, 1, 2))
    assert difference_of(first, again)["difference"] == 0 < difference_of(first, other)["difference"]


def test_differences_are_in_decibels_and_steps_of_colour():
    black, grey = (Image.new("RGB", (4, 2), (value,) * 3) for value in (0, 51))
    assert difference_of(black, grey) == {"psnr": pytest.approx(20 * math.log10(255 / 51)), "difference": 51}
    assert difference_of(grey, grey) == {"psnr": None, "difference": 0}


def test_the_command_makes_images_and_a_page(saved, tmp_path, capsys):
    folder = tmp_path / "out"
    flags = ["--steps", "2", "--height", "32", "--width", "24", "--output", str(folder), "--device", "cpu"]
    command = ["diffuse", "--model", str(saved), "--prompt", "a <cat>", "--compare", "--reuse", "2", "--agents", "9"]
    assert main([*command, *flags]) == 0
    shown = capsys.readouterr().out
    assert "softmax" in shown and "agent" in shown and "PSNR dB" in shown and "compare.html" in shown
    assert max(map(len, shown.splitlines()[:-2])) <= 80
    page = (folder / "compare.html").read_text()
    assert "a &lt;cat&gt;" in page and "difference of agent" in page and page.count("data:image/png") == 3
    assert "http://" not in page and "https://" not in page
    assert json.loads((folder / "settings.json").read_text())["methods"]["agent"] == {"agents": 9, "reuse": 2}
    plain = ["diffuse", "--model", str(saved), "--prompt", "a", *flags[:-4], "--output", str(tmp_path / "plain")]
    assert main([*plain, "--device", "cpu:0"]) == 0 and not list((tmp_path / "plain").glob("*.html"))
    # a CPU by its number is one, too
    assert json.loads((tmp_path / "plain" / "settings.json").read_text())["dtype"] == "fp32"


def test_a_folder_has_images_of_one_pipelines_weights(tmp_path, capsys):
    pipe, model, out = tiny.pipeline(), str(tmp_path / "model"), tmp_path / "out"
    pipe.save_pretrained(model)
    flags = ["--steps", "1", "--height", "32", "--width", "32", "--device", "cpu", "--output", str(out)]
    command = ["diffuse", "--model", model, "--prompt", "a", *flags]
    assert main(command) == 0 and main(command) == 0
    # of an earlier version, which did not keep it
    settings = json.loads((out / "settings.json").read_text())
    kept = {key: value for key, value in settings.items() if key != "weights"}
    (out / "settings.json").write_text(json.dumps(kept))
    assert main(command) == 0
    (out / "settings.json").write_text(json.dumps(settings))
    with torch.no_grad():
        next(pipe.unet.parameters()).mul_(2)
    pipe.save_pretrained(model)
    capsys.readouterr()
    assert main(command) == 2
    assert "has images of other weights: name another --output" in capsys.readouterr().err


def test_images_of_classes_are_asked_for_by_number_or_name():
    pipe = tiny.pipeline_dit()
    pipe.labels = {"tench": 0}
    by_number, by_name = (make_image(pipe, label, 0, Sampling(steps=2)) for label in ("0", "tench"))
    assert difference_of(by_number, by_name)["difference"] == 0
    with pytest.raises(SubquadError, match="'cat' is no class of DiTPipeline: give its number"):
        make_image(pipe, "cat", 0, Sampling(steps=2))
    # 1000 is the row for no class at all, and "²" is a digit, but no number
    for text in ("1000", "5000", "²"):
        with pytest.raises(SubquadError, match=f"'{text}' is no class of DiTPipeline: give its number from 0 to 999"):
            make_image(pipe, text, 0, Sampling(steps=2))
    with pytest.raises(SubquadError, match="DiTPipeline takes no height: leave it out"):
        make_image(pipe, "0", 0, Sampling(height=32))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "FOLDER"], "it has no model_index.json"),
        (["--model", "./nowhere"], "neither a folder, nor a name like owner/model"),
        (["--model", "PIPE", "--ratio", "0.3"], "--ratio changes nothing without --agent or --tome"),
        (["--model", "PIPE", "--tome", "--agents", "9"], "--agents changes nothing without --agent"),
        (
            ["--model", "PIPE", "--agent", "--ratio", "1.5"],
            "ratio: must be a number, at least 0 and at most 1, got '1.5'",
        ),
        (["--model", "PIPE", "--agent", "--max-downsample", "0"], "must be 1, 2, 4 or 8, got '0'"),
    ],
)
def test_mistakes_are_one_line(saved, tmp_path, capsys, arguments, reason):
    places = {"FOLDER": str(tmp_path), "PIPE": str(saved)}
    given = [places.get(argument, argument) for argument in arguments]
    assert main(["diffuse", *given, "--prompt", "a", "--steps", "2", "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("subquad: ") and reason in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--agent", "--agents", "4", "--sx", "2"], "agents=4 stands in place of sx, sy and agent_ratio: leave out sx"),
        (["--agent", "--k-scale", "1e300"], "k_scale must be a number and at most 1e+38"),
        (["--tome", "--sx", "1", "--sy", "1"], "cells of 1×1 tokens hold nothing to merge"),
        (["--output", "mine"], "mine is not empty, and no folder of `subquad diffuse`"),
    ],
)
def test_flags_that_cannot_be_are_said_before_a_pipeline_is_fetched(tmp_path, monkeypatch, capsys, flags, reason):
    """Gigabytes were."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    monkeypatch.setattr("subquad.diffusion.pipelines.load_pipeline", lambda *a, **k: pytest.fail("it was fetched"))
    assert main(["diffuse", "--model", "a/b", "--prompt", "a", "--device", "cpu", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("subquad: ") and said.count("\n") == 1 and reason in said


def test_a_prompt_that_is_no_class_is_said_before_the_first_image(tmp_path):
    pipe = tiny.pipeline_dit()
    with pytest.raises(SubquadError, match="'cat' is no class of DiTPipeline"):
        make_images(pipe, ["1", "cat"], tmp_path / "out", methods={"softmax": {}}, sampling=Sampling(steps=1))
    assert not (tmp_path / "out").exists()


def kinds_that_take_images():
    from diffusers import (
        ControlNetModel,
        StableDiffusionControlNetPipeline,
        StableDiffusionImg2ImgPipeline,
        StableDiffusionInpaintPipeline,
    )

    parts = {**tiny.pipeline().components, "requires_safety_checker": False}
    control = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 32))
    yield StableDiffusionControlNetPipeline(controlnet=control, **parts), "takes image beside a prompt"
    yield StableDiffusionImg2ImgPipeline(**parts), "takes image beside a prompt"
    yield StableDiffusionInpaintPipeline(**parts), "takes image and mask_image beside a prompt"


def test_pipelines_that_take_images_say_so(tmp_path):
    """A ControlNet's was called a fault of ours, others spoke of an "input" that nobody had given."""
    for pipe, words in kinds_that_take_images():
        pipe.set_progress_bar_config(disable=True)
        with pytest.raises(SubquadError, match=f"^{type(pipe).__name__} {words}, and only prompts .*in Python"):
            make_images(pipe, ["a"], tmp_path / "out", methods={"softmax": {}}, sampling=Sampling(steps=2))
        assert not (tmp_path / "out" / "settings.json").exists()


def test_a_pipeline_that_was_saved_without_its_text_encoder_is_refused(tmp_path):
    tiny.pipeline_pixart().save_pretrained(tmp_path / "model")
    with pytest.raises(SubquadError, match="PixArtAlphaPipeline was saved without its text_encoder, which reads"):
        load_pipeline(str(tmp_path / "model"))


def test_weights_that_could_run_code_are_not_read(saved, tmp_path, pipe):
    folder = tmp_path / "pickled"
    pipe.save_pretrained(folder, safe_serialization=False)
    with pytest.raises(SubquadError, match="can't be loaded"):
        load_pipeline(str(folder))


def test_what_pipelines_say_of_prompts_is_heard(saved):
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    before = [logger.level for logger in loggers]
    opened = load_pipeline(str(saved))
    assert [logger.level for logger in loggers] == before
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    loggers[0].addHandler(handler)
    try:
        make_image(opened, "very " * 100, 0, Sampling(steps=1, height=32, width=32))
    finally:
        loggers[0].removeHandler(handler)
    assert any("was truncated" in line for line in said)


def test_an_image_that_was_made_black_is_not_measured():
    class Checked:
        def __call__(self, prompt, generator):
            image = Image.new("RGB", (8, 8))
            return SimpleNamespace(images=[image], nsfw_content_detected=[prompt == "b"])

    assert make_image(Checked(), "a", 3, Sampling()).size == (8, 8)
    with pytest.raises(SubquadError, match="made the image of 'b' and seed 3 black, which compares with none"):
        make_image(Checked(), "b", 3, Sampling())


class Guided:
    """Takes what Flux's pipeline takes."""

    def __call__(self, prompt, negative_prompt=None, true_cfg_scale=1.0, guidance_scale=3.5, generator=None):
        return SimpleNamespace(images=[Image.new("RGB", (8, 8))])


def test_a_negative_prompt_that_would_be_passed_over_is_refused(pipe):
    for scale in (0.5, 1.0):
        with pytest.raises(SubquadError, match=f"negative_prompt changes nothing .* with guidance_scale={scale:g}: "):
            make_image(pipe, "a", 0, Sampling(steps=1, guidance_scale=scale, negative_prompt="b"))
    with pytest.raises(SubquadError, match="changes nothing in Guided with true_cfg_scale=1: it takes guidance"):
        make_image(Guided(), "a", 0, Sampling(guidance_scale=5.0, negative_prompt="b"))
    few = {"steps": 1, "height": 32, "width": 24}
    plain, avoiding = (make_image(pipe, "a", 0, Sampling(**few, negative_prompt=text)) for text in (None, "b"))
    assert difference_of(plain, avoiding)["difference"] > 0


def test_an_image_of_numbers_that_are_none_is_not_taken_for_a_black_one(tmp_path):
    """As a decoder's in fp16 that overflows: images were black, and compared as if they were of something."""
    broken = tiny.pipeline()
    before = make_image(broken, "a", 3, SMALL)
    assert before.mode == "RGB" and before.size == (24, 32)
    assert difference_of(before, broken("a", num_inference_steps=2, height=32, width=24).images[0])["difference"] > 0
    broken.vae.decoder.conv_out.bias.data.fill_(math.nan)
    with pytest.raises(SubquadError, match=r"of 'a' and seed 3 that are not finite, .* another dtype, as bf16 or fp32"):
        make_image(broken, "a", 3, SMALL)
    with pytest.raises(SubquadError, match="not finite"):
        make_images(broken, ["a"], tmp_path / "out", methods=ALL, sampling=SMALL)
    assert not (tmp_path / "out").exists()


def damaged(saved, folder, what):
    shutil.copytree(saved, folder)
    index = json.loads((folder / "model_index.json").read_text())
    if what == "cut":
        file = folder / "text_encoder" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    elif what == "class":
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "FooPipeline"}))
    elif what == "part":
        shutil.rmtree(folder / "tokenizer")
    else:
        (folder / "model_index.json").write_text(what)


DAMAGED = {
    "cut": r"can't be loaded: .*(incomplete|size|header)",
    "class": "can't be loaded: .*FooPipeline",
    "part": "has no tokenizer, of which its model_index.json speaks",
    "[]": "model_index.json is damaged: it names no class of diffusers",
    "{}": "model_index.json is damaged: it names no class of diffusers",
    "{": "model_index.json is damaged: it names no class of diffusers",
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_pipeline_that_is_damaged_is_said_in_one_line(saved, tmp_path, what):
    """Each was called a fault of ours."""
    damaged(saved, tmp_path / "damaged", what)
    with pytest.raises(SubquadError, match=DAMAGED[what]) as said:
        load_pipeline(str(tmp_path / "damaged"))
    assert "\n" not in str(said.value)


def test_what_is_no_folder_of_a_pipeline_is_not_looked_for_on_the_hub(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(saved)
    with pytest.raises(SubquadError, match=r"unet/config.json is no folder: name the one of a pipeline"):
        load_pipeline("unet/config.json")

    def not_there(*args, **kwargs):
        raise OSError("no such repository\nand more")

    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", not_there)
    with pytest.raises(SubquadError, match=r"^runs/sd is no folder here, and can't be loaded from the hub: no such"):
        load_pipeline("runs/sd")


SPOILED = {
    "seconds": "fast",
    "seed": None,
    "psnr": "high",
    "difference": [1],
    "prompt": 3,
    "file": "0/../../elsewhere.png",
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_row_that_is_none_is_damage_of_the_file(pipe, tmp_path, name):
    """They ended in a trace where times were divided, or pages written."""
    row = {"prompt": "a", "seed": 0, "method": "softmax", "file": "000-0-softmax.png", "seconds": 1.0}
    (tmp_path / "settings.json").write_text(json.dumps({"methods": {"softmax": {}}, "peaks_mb": {}}))
    for content in (row | {name: SPOILED[name]}, row | {"seconds": 0}):
        (tmp_path / "images.jsonl").write_text(json.dumps(content) + "\n")
        with pytest.raises(SubquadError, match=r"images\.jsonl is damaged .*: name another --output"):
            ImageFolder(tmp_path, {"methods": {"softmax": {}}})


def test_an_image_that_something_else_wrote_is_said(pipe, tmp_path):
    methods = {"softmax": {}, "agent": {}}
    rows, summary = make_images(pipe, ["a"], tmp_path, methods=methods, sampling=SMALL, memory=False)
    Image.new("RGB", (8, 8)).save(tmp_path / rows[0].file)
    with pytest.raises(SubquadError, match=r"are 24×32 and 8×8 px, which don't compare: where files .* are made again"):
        write_images_page(tmp_path / "page.html", rows, summary)
    (tmp_path / rows[1].file).unlink()
    with pytest.raises(SubquadError, match="are 24×32 and 8×8 px"):
        make_images(pipe, ["a"], tmp_path, methods=methods, sampling=SMALL, memory=False)
    (tmp_path / rows[0].file).write_bytes(b"cut")
    with pytest.raises(SubquadError, match=r"000-0-softmax.png: .*; where it is removed it is made again"):
        make_images(pipe, ["a"], tmp_path, methods=methods, sampling=SMALL, memory=False)


def test_what_is_named_twice_is_made_and_counted_once(pipe, tmp_path):
    said = []
    rows, _ = make_images(
        pipe, ["a", "a"], tmp_path, methods={"softmax": {}}, sampling=SMALL, seeds=[0, 0], memory=False, log=said.append
    )
    assert len(rows) == len(said) == 1 and said[0].startswith("1 of 1, softmax")


def test_an_image_with_drawn_destinations_is_made_again_as_it_was():
    """They came of whatever had been drawn before: one that was made again after a stop was another image."""
    pipe = tiny.pipeline()
    with apply_agent_attention(pipe, random=True):
        images = [make_image(pipe, "a", seed, SMALL) for seed in (3, 4, 3)]
        before = torch.get_rng_state()
        make_image(pipe, "a", 3, SMALL)
        assert torch.equal(torch.get_rng_state(), before)
    assert difference_of(images[0], images[2])["difference"] == 0 < difference_of(images[0], images[1])["difference"]
