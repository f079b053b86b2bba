"""`subquad.stream`: logits and maps are those of the whole network, and what is broken off goes on."""

import copy
import errno
import json
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from hosts import drawn, small
from PIL import Image

import subquad
from subquad import SubquadError
from subquad.cli import main
from subquad.large import resuming, token_store
from subquad.large.streaming import StreamedStage

SIZE = {"embed_dim": 24, "num_heads": 2, "depths": (3,), "patch_size": 8, "img_size": 40, "num_classes": 5}


@pytest.fixture
def image():
    return torch.randn(3, 83, 61)


def network(**settings):
    return subquad.create_model("deit_tiny", attention="linear", **SIZE | settings).eval()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"class_token": False},
        {"global_pool": "avg"},
        {"global_pool": "max", "reg_tokens": 2},
        {"global_pool": "avg", "fc_norm": True},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_logits_are_those_of_the_whole(settings, image):
    model = network(**settings)
    with torch.no_grad():
        expected = model(image[None])[0]
    assert torch.allclose(subquad.stream(model, image, most_tokens=20).logits, expected, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: small("pvt", "linear"), lambda: subquad.convert(of_timm(), "linear")])
def test_several_threads_may_stream_one_network_or_call_it_meanwhile(make):
    model = drawn(make())
    images = [torch.randn(3, 96, 64 + 32 * number) for number in range(3)]
    with torch.no_grad():
        expected = [model(image[None])[0] for image in images]

    def ask(number):
        with torch.no_grad():
            if number == 2:
                return model(images[2][None])[0]
            return subquad.stream(model, images[number], most_tokens=20).logits

    with ThreadPoolExecutor(3) as pool:
        for number, answer in zip(3 * [0, 1, 2], pool.map(ask, 3 * [0, 1, 2]), strict=True):
            assert torch.allclose(answer, expected[number], atol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


def of_timm():
    sizes = {"patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.models.VisionTransformer(img_size=64, dynamic_img_size=True, dynamic_img_pad=True, **sizes)


@pytest.mark.parametrize("changed", ["class", "hook"])
def test_what_stands_in_the_patch_embedding_takes_part(changed, image):
    class Twice(torch.nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = network()
    if changed == "class":
        model.stages[0].embed.proj.__class__ = Twice
    else:
        model.stages[0].embed.proj.register_forward_hook(lambda module, given, y: 2 * y)
    with torch.no_grad():
        expected = model(image[None])[0]
    assert torch.allclose(subquad.stream(model, image, most_tokens=20).logits, expected, atol=1e-5)


def doubled(module, given, y):
    return 2 * y


@pytest.mark.parametrize("host", ["vit", "pvt"])
@pytest.mark.parametrize("change", ["hook", "hook in front", "forward"])
def test_who_listens_to_a_block_takes_part(change, host):
    model, image = small(host, "linear").eval(), torch.randn(3, 83, 61)
    block = model.stages[0].blocks[-1]
    if change == "hook":
        block.register_forward_hook(doubled)
    elif change == "hook in front":
        block.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    else:
        block.forward = lambda x, before=block.forward, **given: 2 * before(x, **given)
    with torch.no_grad():
        expected = model(image[None])[0]
    assert torch.allclose(subquad.stream(model, image, most_tokens=20).logits, expected, atol=1e-5)


@pytest.mark.parametrize("path", ["", "stages.0.embed", "stages.0.blocks.1.attn.inner"])
def test_what_would_see_the_whole_image_is_refused(path, image):
    model = network()
    part = model.get_submodule(path)
    if not path.endswith("inner"):
        with part.register_forward_hook(doubled), pytest.raises(SubquadError, match="has a hook or a forward of its"):
            subquad.stream(model, image)
    part.forward = lambda *given, before=part.forward, **named: 2 * before(*given, **named)
    with pytest.raises(SubquadError, match=r"forward of its own.* can't be streamed"):
        subquad.stream(model, image)


def test_heat_is_what_the_head_says_whatever_it_has_been_given(image, tmp_path):
    """An adapter or a hook of the head is not in its weight: heat was of the bare weight."""
    model = network(global_pool="avg", class_token=False)
    for change in (lambda: model.head.register_forward_hook(doubled), lambda: adapted(model, ["head"])):
        change()
        streamed = subquad.stream(model, image, most_tokens=20, heat=tmp_path / "heat.npy")
        logit = streamed.logits[streamed.heat_class]
        assert np.load(tmp_path / "heat.npy").mean() == pytest.approx(float(logit), rel=1e-4, abs=1e-5)


def adapted(model, targets):
    """A network with adapters of peft that say something."""
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, r=2), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("host", ["vit", "pvt"])
def test_networks_that_were_trained_in_chunks_are_streamed(host):
    model, image = small(host, "linear").eval(), torch.randn(3, 83, 61)
    with torch.no_grad():
        expected = model(image[None])[0]
    subquad.chunk_blocks(model, 5)
    for most_tokens in (4, 40):
        found = subquad.stream(model, image, most_tokens=most_tokens).logits
        assert torch.allclose(found, expected, atol=1e-5)


def test_maps_are_those_of_the_whole(image, tmp_path):
    model = network(cpe=True)
    with torch.no_grad():
        tokens = model.forward_features(image[None])[0, 1:].view(11, 8, 24)
        each = model.head(tokens)
    files = {"features": tmp_path / "features.npy", "labels": tmp_path / "labels.png", "heat": tmp_path / "heat.npy"}
    streamed = subquad.stream(model, image, **files, heat_class=2, most_tokens=20)
    assert streamed.files == files and streamed.heat_class == 2 and streamed.grid.shape == (11, 8)
    assert np.allclose(np.load(files["features"]), tokens, atol=1e-5)
    assert np.array_equal(np.asarray(Image.open(files["labels"])), each.argmax(dim=-1))
    assert np.allclose(np.load(files["heat"]), each[..., 2], atol=1e-5)
    own = subquad.stream(model, image, heat=tmp_path / "own.npy")
    assert own.heat_class == own.logits.argmax()


@pytest.mark.parametrize("suffix", [".tif", ".zarr", ".TIF"])
def test_maps_of_other_formats_are_those_of_numpy(suffix, image, tmp_path):
    package = pytest.importorskip({".tif": "tifffile", ".zarr": "zarr"}[suffix.lower()])
    model, path = network(), tmp_path / f"heat{suffix}"
    subquad.stream(model, image, heat=path, labels=tmp_path / "labels.npy")
    subquad.stream(model, image, heat=tmp_path / "heat.npy")
    read = package.imread(path) if suffix != ".zarr" else package.open(str(path), mode="r")[:]
    assert np.array_equal(read, np.load(tmp_path / "heat.npy"))


def test_where_the_head_reads_the_mean_logits_are_the_mean_of_the_heat(image, tmp_path):
    model = network(global_pool="avg")
    streamed = subquad.stream(model, image, heat=tmp_path / "heat.npy", heat_class=1)
    assert np.isclose(np.load(tmp_path / "heat.npy").mean(), streamed.logits[1], atol=1e-5)


def test_tokens_kept_in_bf16_give_nearly_the_same(image):
    model = network()
    near, exact = (subquad.stream(model, image, keep=keep).logits for keep in ("bf16", None))
    assert 0 < (near - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_network_of_bf16_streams(image):
    model = subquad.optimize(network(), torch.bfloat16)
    with torch.no_grad():
        expected = model(image[None].bfloat16())[0].float()
    assert (subquad.stream(model, image).logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_network_in_training_is_evaluated_and_stays_in_training(image):
    model = network(drop_path_rate=0.5).train()
    first, second = (subquad.stream(model, image).logits for _ in range(2))
    assert torch.equal(first, second) and model.training


class KilledError(Exception):
    """Stands for a process that ends."""


def pyramid():
    return small("mavit", "linear").eval()


@pytest.mark.parametrize(
    ("make", "steps", "step"),
    [
        *((partial(network, cpe=True), 7, step) for step in range(7)),
        *(pytest.param(pyramid, 9, step, marks=() if step in (2, 3) else pytest.mark.slow) for step in range(9)),
    ],
)
def test_what_was_broken_off_goes_on_behind_the_last_step(make, steps, step, image, tmp_path, monkeypatch):
    model, folder = make(), tmp_path / "tokens"
    expected = subquad.stream(model, image, most_tokens=20).logits
    done = []

    def dies(progress, number, stage):
        if len(done) == step:
            raise KilledError
        done.append(number)
        told(progress, number, stage)

    told = resuming.Progress.reached
    with monkeypatch.context() as patch:
        patch.setattr(resuming.Progress, "reached", dies)
        with pytest.raises(KilledError):
            subquad.stream(model, image, tokens_in=folder, most_tokens=20)
    assert len(list(folder.glob("*.bin"))) <= 4
    ran = []
    for name in ("embed", "_replace"):
        before = getattr(StreamedStage, name)
        monkeypatch.setattr(StreamedStage, name, lambda *arguments, before=before: (ran.append(1), before(*arguments)))
    assert torch.equal(subquad.stream(model, image, tokens_in=folder, most_tokens=20).logits, expected)
    assert len(ran) == steps - step and not list(folder.glob("*"))


def test_tokens_of_earlier_stages_go_though_it_was_broken_off_before_they_went(image, tmp_path, monkeypatch):
    model, folder = pyramid(), tmp_path / "tokens"

    def dies(progress, stage):
        if stage:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(resuming.Progress, "remove_before", dies)
        with pytest.raises(KilledError):
            subquad.stream(model, image, tokens_in=folder, most_tokens=20)
    assert list(folder.glob("tokens-0-*.bin"))
    subquad.stream(model, image, tokens_in=folder, most_tokens=20)
    assert not list(folder.glob("*"))


def test_tokens_of_a_stage_are_let_go_with_the_next(image, monkeypatch):
    alive = []

    class Watched(token_store.TokensInMemory):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            alive.append(weakref.ref(self))

        def turn(self):
            here.append(sum(one() is not None for one in alive))

    here = []
    monkeypatch.setattr(token_store, "TokensInMemory", Watched)
    subquad.stream(pyramid(), image, most_tokens=20)
    # each embedding reads the tokens before it, and no block
    assert here == [1, 1, 2, 1, 1, 2, 1, 2, 1]


def test_tokens_of_another_image_are_not_gone_on_with(image, tmp_path, monkeypatch):
    model = network()
    with monkeypatch.context() as patch:
        patch.setattr(resuming.Progress, "finished", lambda progress: None)
        subquad.stream(model, image, tokens_in=tmp_path)
    turned = copy.deepcopy(model)
    turned.blocks[0].mlp.fc1.weight.data = turned.blocks[0].mlp.fc1.weight.flip(0)
    scaled = copy.deepcopy(model)
    scaled.blocks[1].norm1.eps = 1e-3
    others = [(network(), image), (turned, image), (scaled, image), (model, image + 1), (model, image.flip(-1))]
    for other_model, other_image in others:
        with pytest.raises(SubquadError, match="tokens of another network or image"):
            subquad.stream(other_model, other_image, tokens_in=tmp_path)
    with pytest.raises(SubquadError, match="in another dtype"):
        subquad.stream(model, image, tokens_in=tmp_path, keep="bf16")
    for gone in tmp_path.glob("*.bin"):
        gone.unlink()
    with pytest.raises(SubquadError, match=r"\.bin is damaged or gone"):
        subquad.stream(model, image, tokens_in=tmp_path)
    (tmp_path / "stream.json").write_text(json.dumps({"done": 3}))
    with pytest.raises(SubquadError, match="is damaged"):
        subquad.stream(model, image, tokens_in=tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heat": "heat.jpg"}, "no ending of maps"),
        ({"features": "features.png"}, "a PNG holds labels"),
        ({"heat_class": 9, "heat": "heat.npy"}, "not among 0 to 4"),
        ({"heat_class": "cat", "heat": "heat.npy"}, "unknown class 'cat': this network has no names of classes"),
        ({"keep": "int8"}, "unknown kept dtype"),
        ({"dtype": "bf16"}, "subquad.optimize"),
        ({"most_tokens": "9"}, "most_tokens must be a whole number"),
        ({"keep": torch.bfloat16}, "keep must be text"),
        ({"heat_class": 2.0, "heat": "heat.npy"}, "heat_class must be a whole number or text"),
        ({"heat_class": 2}, "a class is that of the heat"),
        ({"heat": "map.npy", "labels": "map.npy"}, "is to be the heat, and is the labels as well"),
        ({"heat": "map.zarr/heat.npy", "features": "map.zarr"}, "is to be the heat, and is the features as well"),
        ({"features": "tokens", "tokens_in": "tokens"}, "and is the folder of tokens as well"),
        ({"most_tokens": 0}, "most_tokens must be a whole number of at least 1"),
        ({"tokens_in": "file"}, "can't be written to"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(settings, words, image, tmp_path):
    (tmp_path / "file").write_text("")
    paths = {"heat", "features", "labels", "tokens_in"}
    settings = {name: tmp_path / value if name in paths else value for name, value in settings.items()}
    with pytest.raises(SubquadError, match=words) as refusal:
        subquad.stream(network(), image, **settings)
    assert "\n" not in str(refusal.value) and len(list(tmp_path.iterdir())) == 1


def test_files_that_are_there_or_no_maps_are_said_before_weights_are_fetched(tmp_path, monkeypatch, capsys):
    """The network was opened first; and of a .zarr from the time before `--features` said that it is a folder."""
    Image.new("RGB", (16, 16)).save(tmp_path / "image.png")
    (tmp_path / "map.zarr").mkdir()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subquad.api.open_trained", lambda *given, **settings: pytest.fail("weights were asked for"))
    for flags, words in [
        (["--features", "map.zarr"], "map.zarr is there already: remove it, or name another"),
        (["--heat", "folder"], "argument --heat: folder is a folder: name a file"),
        (["--labels", "labels.jpg"], "labels.jpg has no ending of maps"),
        (["--heat", "heat.png"], "heat.png: a PNG holds labels"),
        (["--labels", "image.png"], "is to be the labels, and is the image as well"),
        (["--keep", "int8"], "unknown kept dtype 'int8'"),
    ]:
        assert main(["stream", "pretrained/agent_pvt_tiny", "image.png", *flags]) == 2
        said = capsys.readouterr().err
        assert said.startswith("subquad: ") and words in said
    with pytest.raises(SubquadError, match="name of a file or folder to write is empty"):
        subquad.stream("pretrained/agent_pvt_tiny", "image.png", labels="")


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_files_that_changed_are_other_images(suffix, tmp_path, monkeypatch):
    pixels, path, model = (
        np.random.default_rng(0).integers(0, 256, (80, 64, 3), np.uint8),
        tmp_path / f"a{suffix}",
        network(),
    )

    def write(pixels):
        if suffix == ".npy":
            np.save(path, pixels)
        else:
            array = pytest.importorskip("zarr").open(
                str(path), mode="a", shape=pixels.shape, chunks=(32, 32, 3), dtype="u1"
            )
            array[:] = pixels
        # as of an archive that gives all files one time
        for file in (path, *path.rglob("*")):
            os.utime(file, (0, 0))

    write(pixels)
    with monkeypatch.context() as patch:
        patch.setattr(resuming.Progress, "finished", lambda progress: None)
        subquad.stream(model, path, tokens_in=tmp_path / "tokens")
    write(pixels[::-1])
    with pytest.raises(SubquadError, match="tokens of another network or image"):
        subquad.stream(model, path, tokens_in=tmp_path / "tokens")


def test_an_array_is_known_by_its_rows_and_never_widened_as_a_whole(tmp_path):
    class Rows:
        """An array that is only ever cut."""

        shape, dtype = (4096, 8, 3), np.dtype(np.uint8)

        def __getitem__(self, rows):
            assert rows.stop - rows.start <= 512
            return np.full((rows.stop - rows.start, 8, 3), 7, np.uint8)

    subquad.stream(network(), Rows(), tokens_in=tmp_path / "tokens", most_tokens=64)


def test_the_image_itself_is_not_written_over(tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(path)
    before = path.read_bytes()
    for name in (path, tmp_path / "folder" / ".." / "image.png"):
        with pytest.raises(SubquadError, match="is to be the labels, and is the image as well"):
            subquad.stream(network(), path, labels=name)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "outputs", [{"heat": "heat.jpg"}, {"features": "features.png"}, {"labels": "there.zarr"}, {"heat": "file/heat.npy"}]
)
def test_what_can_not_be_written_is_said_in_front_of_all_work(outputs, image, tmp_path, monkeypatch):
    (tmp_path / "there.zarr").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(StreamedStage, "embed", lambda *arguments: pytest.fail("it has begun"))
    with pytest.raises(SubquadError, match=next(iter(outputs.values()))):
        subquad.stream(network(), image, **{kind: tmp_path / name for kind, name in outputs.items()})


@pytest.mark.parametrize("settings", [{"tokens_in": "tokens"}, {"features": "f.npy"}], ids=str)
def test_a_full_disk_is_one_line_in_front_of_all_work(settings, image, tmp_path, monkeypatch):
    """What is mapped into memory and has no place ends the process: place is asked for."""
    asked = []

    def full(file, start, size):
        asked.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(StreamedStage, "embed", lambda *arguments: pytest.fail("it has begun"))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(SubquadError, match="No space left on device") as refusal:
        subquad.stream(network(), image, **{kind: tmp_path / name for kind, name in settings.items()})
    assert "\n" not in str(refusal.value) and asked[0] >= 88 * 24 * 4 and not list(tmp_path.iterdir())


def test_where_the_disk_keeps_no_place_free_bytes_are_counted(image, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    subquad.stream(network(), image, tokens_in=tmp_path / "tokens", features=tmp_path / "f.npy")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(SubquadError, match="No space left on device"):
        subquad.stream(network(), image, tokens_in=tmp_path / "tokens")


def test_what_is_broken_off_in_front_of_the_first_step_leaves_nothing(image, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamedStage, "embed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subquad.stream(
            network(), image, tokens_in=tmp_path / "tokens", heat=tmp_path / "h.npy", features=tmp_path / "f.zarr"
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrap", [Image.fromarray, lambda pixels: pixels], ids=["Pillow", "numpy"])
def test_pictures_and_arrays_are_those_of_files(wrap, tmp_path):
    pixels, model = np.random.default_rng(0).integers(0, 256, (40, 32, 3), np.uint8), network()
    np.save(tmp_path / "image.npy", pixels)
    expected = subquad.stream(model, tmp_path / "image.npy").logits
    assert torch.equal(subquad.stream(model, wrap(pixels)).logits, expected)


@pytest.mark.parametrize("wrap", [torch.from_numpy, np.asarray], ids=["tensor", "array"])
def test_what_pytorch_makes_tensors_of_by_default_is_nothing_to_a_stream(wrap, tmp_path):
    """A script that begins with `torch.set_default_device("cuda")` streams a network that lies on the CPU."""
    model, pixels = network(), np.random.default_rng(0).random((3, 40, 48), dtype=np.float32)
    image = wrap(pixels if wrap is torch.from_numpy else pixels.transpose(1, 2, 0))
    expected = subquad.stream(model, image, most_tokens=8, labels=tmp_path / "before.npy")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            files = {"labels": tmp_path / "labels.npy", "heat": tmp_path / "heat.npy"}
            got = subquad.stream(model, image, most_tokens=8, **files)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.logits, expected.logits) and got.logits.dtype == torch.float32
    assert (np.load(tmp_path / "labels.npy") == np.load(tmp_path / "before.npy")).all()


@pytest.mark.parametrize("image", [None, 3, [[1.0]], b"image"], ids=str)
def test_what_is_no_image_at_all_is_one_line(image):
    with pytest.raises(SubquadError, match="an image is a file, an array") as refusal:
        subquad.stream(network(), image)
    assert "\n" not in str(refusal.value)


def test_tensors_that_are_no_block_of_numbers_say_so(image):
    for wrong, words in (
        (torch.nested.nested_tensor([image], layout=torch.jagged), "a nested one"),
        (image.to_sparse(), "to_dense"),
    ):
        with pytest.raises(SubquadError, match=words):
            subquad.stream(network(), wrong)


def test_networks_on_other_devices_say_so(image):
    with pytest.raises(SubquadError, match=r"on the CPU, and this one is on meta: model\.cpu\(\)"):
        subquad.stream(network().to("meta"), image)
    with pytest.raises(SubquadError, match="source must be"):
        subquad.stream(None, image)


def test_networks_without_what_is_asked_for_say_so(image):
    with pytest.raises(SubquadError, match="has none: ask for features"):
        subquad.stream(network(num_classes=0), image, labels="labels.npy")
    with pytest.raises(SubquadError, match="4 channels"):
        subquad.stream(network(in_chans=4), image)
    with pytest.raises(SubquadError, match="softmax attention can't be streamed"):
        subquad.stream(subquad.create_model("deit_tiny", **SIZE), image)
    with pytest.raises(SubquadError, match="global_pool=''"):
        subquad.stream(network(global_pool="", num_classes=0), image)


def test_a_network_that_was_opened_normalises_as_in_training_and_knows_its_classes(tmp_path):
    weights, heat = tmp_path / "network.safetensors", tmp_path / "heat.npy"
    half = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.5, 0.25]}
    subquad.save_weights(network(), weights, {"classes": list("abcde"), "input": half})
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 3), np.uint8)
    expected = subquad.stream(weights, pixels).logits
    opened = subquad.open_trained(weights, device="cpu")
    for source in (opened, opened.model, copy.deepcopy(opened.model), subquad.optimize(opened.model)):
        streamed = subquad.stream(source, pixels, heat=heat, heat_class="c")
        assert torch.allclose(streamed.logits, expected, atol=1e-5)
        assert streamed.heat_class == 2 and list(streamed.classes) == list("abcde")
    with pytest.raises(SubquadError, match=r"subquad\.optimize"):
        subquad.stream(opened, pixels, dtype="bf16")
    opened.model.reset_classifier(7)
    assert not subquad.stream(opened.model, pixels).classes


def test_the_command_says_what_an_image_is(tmp_path, capsys):
    weights, picture = tmp_path / "network.safetensors", tmp_path / "image.png"
    model = network()
    about = {"classes": list("abcde"), "input": {}}
    subquad.save_weights(model, weights, about)
    pixels = np.random.default_rng(0).integers(0, 256, (83, 61, 3), np.uint8)
    Image.fromarray(pixels).save(picture)
    heat = tmp_path / "heat.npy"
    assert main(["stream", str(weights), str(picture), "--heat", str(heat), "--class", "c"]) == 0
    shown = capsys.readouterr().out
    assert "89 tokens (11×8 after 1 prefix tokens)" in shown and f"heat of c: {heat}" in shown
    assert main(["stream", str(weights), str(tmp_path / "none.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    # as --help says; a network that is not read for it
    assert main(["stream", str(tmp_path / "none"), str(picture), "--dtype", "fp16"]) == 2
    assert "unknown dtype 'fp16': did you mean bf16 or fp32?" in capsys.readouterr().err
