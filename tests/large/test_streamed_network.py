"""`subquad.stream`: logits and maps are those of the whole network, and what is broken off goes on."""

import json
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hosts import small
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


@pytest.mark.parametrize("suffix", [".tif", ".zarr"])
def test_maps_of_other_formats_are_those_of_numpy(suffix, image, tmp_path):
    package = pytest.importorskip({".tif": "tifffile", ".zarr": "zarr"}[suffix])
    model, path = network(), tmp_path / f"heat{suffix}"
    subquad.stream(model, image, heat=path, labels=tmp_path / "labels.npy")
    subquad.stream(model, image, heat=tmp_path / "heat.npy")
    read = package.imread(path) if suffix == ".tif" else package.open(str(path), mode="r")[:]
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
    assert len([path for path in folder.iterdir() if path.suffix == ".bin"]) <= 4
    ran = []
    for name in ("embed", "_replace"):
        before = getattr(StreamedStage, name)
        monkeypatch.setattr(StreamedStage, name, lambda *arguments, before=before: (ran.append(1), before(*arguments)))
    assert torch.equal(subquad.stream(model, image, tokens_in=folder, most_tokens=20).logits, expected)
    assert len(ran) == steps - step and not list(folder.iterdir())


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
    for other_model, other_image in ((network(), image), (model, image + 1)):
        with pytest.raises(SubquadError, match="tokens of another network or image"):
            subquad.stream(other_model, other_image, tokens_in=tmp_path)
    (tmp_path / "stream.json").write_text(json.dumps({"done": 3}))
    with pytest.raises(SubquadError, match="is damaged"):
        subquad.stream(model, image, tokens_in=tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heat": "heat.jpg"}, "no ending of maps"),
        ({"features": "features.png"}, "a PNG holds labels"),
        ({"heat_class": 9, "heat": "heat.npy"}, "not among 0 to 4"),
        ({"heat_class": "cat", "heat": "heat.npy"}, "unknown class"),
        ({"keep": "int8"}, "unknown kept dtype"),
        ({"dtype": "bf16"}, "subquad.optimize"),
        ({"most_tokens": 0}, "most_tokens is 1 at least"),
        ({"tokens_in": "file"}, "can't be written to"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(settings, words, image, tmp_path):
    (tmp_path / "file").write_text("")
    paths = {"heat", "features", "tokens_in"}
    settings = {name: tmp_path / value if name in paths else value for name, value in settings.items()}
    with pytest.raises(SubquadError, match=words) as refusal:
        subquad.stream(network(), image, **settings)
    assert "\n" not in str(refusal.value) and len(list(tmp_path.iterdir())) == 1


def test_networks_without_what_is_asked_for_say_so(image):
    with pytest.raises(SubquadError, match="has none: ask for features"):
        subquad.stream(network(num_classes=0), image, labels="labels.npy")
    with pytest.raises(SubquadError, match="4 channels"):
        subquad.stream(network(in_chans=4), image)
    with pytest.raises(SubquadError, match="softmax attention can't be streamed"):
        subquad.stream(subquad.create_model("deit_tiny", **SIZE), image)
    with pytest.raises(SubquadError, match="global_pool=''"):
        subquad.stream(network(global_pool="", num_classes=0), image)


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
