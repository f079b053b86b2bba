"""Notes in weight files that `save_weights` did not write: refused in one line, before anything large is made."""

import json
import resource
import struct
import time

import pytest
import torch
from hosts import SMALL, small
from safetensors.torch import load_file, save_file
from torch import nn

from subquad.attention import ATTENTION
from subquad.cli import main
from subquad.data import InputConfig
from subquad.errors import SubquadError
from subquad.models import (
    HOSTS,
    convert_checkpoint,
    create_model,
    load_checkpoint,
    restore_model,
    save_weights,
)
from subquad.runs import open_trained
from subquad.tasks import TASKS
from subquad.tasks.detection.detectors import DETECTORS, build_detector
from subquad.tasks.segmentation.scene_transforms import SceneInput
from subquad.tasks.segmentation.segmenters import SEGMENTERS, build_segmenter
from subquad.tasks.sequences.sequence_network import SequenceClassifier, create_sequence_model
from subquad.weights import fitting
from subquad.weights.notes import KINDS, NEVER_WRITTEN, settings_of

INPUT = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "squash"}
SCENES = {"crop": [64, 64], "short_side": None, "mean": [0.5] * 3, "std": [0.5] * 3}
NOTE = {"classes": [*"abcde"], "data": "digits", "input": INPUT}
BACKBONE = {"name": SMALL["pvt"][0], "img_size": 64, **SMALL["pvt"][1]}
SEQUENCES = {"vocab_size": 9, "max_length": 16, "num_classes": 5, "embed_dim": 8, "depth": 1}

WRONG = [-1, 0, 10**6, 10**9, 2**70, 0.5, 1e300, "x", "", [], [10**9] * 4, [["agent", 10**9]], {}, {"a": 1}, [[1]]]
"""What no argument is, or what is far too much of it."""


FEW = [-1, 10**9, "x"]
"""Of them, for networks that take long to make."""


def classifier(host):
    return lambda: (small(host), NOTE, open_trained)


def sequences(attention):
    model = create_sequence_model(attention, **SEQUENCES)
    return model, {"classes": [*"abcde"], "data": "listops", "data_settings": {}}, open_trained


def segmenter(head):
    model = build_segmenter(BACKBONE, head=head, num_classes=5, head_channels=64)
    return model, NOTE | {"input": SCENES, "slide": False}, open_trained


def detector(head):
    model = build_detector(BACKBONE, head=head, num_classes=5, head_channels=32)
    return model, {name: NOTE[name] for name in ("classes", "data")}, open_trained


NETWORKS = {f"host {host}": classifier(host) for host in HOSTS}
NETWORKS |= {f"sequences {name}": lambda name=name: sequences(name) for name in ATTENTION}
NETWORKS |= {f"segmenter {head}": lambda head=head: segmenter(head) for head in SEGMENTERS}
NETWORKS |= {f"detector {head}": lambda head=head: detector(head) for head in DETECTORS}
FAST = ("sequences linear",)
# one of each kind: who reads them
KINDS_OF_NETWORKS = {name.partition(" ")[0]: name for name in reversed(NETWORKS)}


def networks(names):
    marked = (pytest.param(NETWORKS[name], id=name, marks=() if name in FAST else pytest.mark.slow) for name in names)
    return pytest.mark.parametrize("make", list(marked))


def rewrite(path, note):
    """The same weights beside another note."""
    content = note if isinstance(note, str) else json.dumps(note)
    save_file(load_file(path), path, metadata={"subquad": content})


def opens(path, read):
    """Whether a file opens; if not, in one line that names it."""
    try:
        read(path)
    except SubquadError as error:
        assert str(path) in str(error) and str(error).isprintable() and len(str(error)) < 1000, error
        return False
    return True


def refused(path, match, read):
    with pytest.raises(SubquadError, match=match) as caught:
        read(path)
    assert str(path) in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.thinned(3)
@networks(NETWORKS)
def test_arguments_that_made_no_network_are_refused_without_taking_memory(tmp_path, make):
    model, note, read = make()
    save_weights(model, path := tmp_path / "file.safetensors", note)
    assert opens(path, read)
    creation = model.creation
    inner = creation.get("backbone", {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slow = []
    for name in {**creation, "img_size": 64, "drop_rate": 0, "num_agents": 9, "unknown": 1}:
        for value in WRONG if isinstance(model, SequenceClassifier) else FEW:
            changed = creation | {"backbone": inner | {name: value}} if name in inner else creation | {name: value}
            rewrite(path, note | {"creation": changed})
            start = time.process_time()
            opens(path, read)
            slow += [(name, value)] if time.process_time() - start > 5 else []
    assert not slow
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@networks([*KINDS_OF_NETWORKS.values(), *FAST])
def test_every_entry_of_a_note_is_of_its_kind(tmp_path, make):
    model, note, read = make()
    save_weights(model, path := tmp_path / "file.safetensors", note)
    whole = note | {"creation": model.creation}
    for name, (kind, words) in KINDS.items():
        wrong = [value for value in (1, "x", [1], {"a": 1}, True, 0.5) if not isinstance(value, kind)]
        for value in wrong:
            rewrite(path, whole | {name: value})
            refused(path, f"its note says {name} = .* is not {words}", read)
    for entry in whole:
        rewrite(path, {name: value for name, value in whole.items() if name != entry})
        if not opens(path, read):
            continue
        # a classifier or a segmenter can be judged on other data, and the classes of sequences are only names
        assert entry == ("classes" if "vocab_size" in model.creation else "data")
    rewrite(path, whole | {"classes": ["a\x1b[31m"]})
    refused(path, "is a class, which is no name", read)
    rewrite(path, whole | {"classes": [*"abcdef"]})
    refused(path, "names 6 classes, and the network has 5", read)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("null", "no JSON object, but null"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "no JSON"),
        ('{"creation": ' * 100_000, "no JSON"),
        ('{"creation": {"name": NaN}}', "a number in creation that is not finite"),
        ('{"input": {"std": [Infinity]}}', "a number in input that is not finite"),
        ('{"creation": {"name": 1' + "0" * 5000 + "}}", "no JSON"),
        ('{"x": "' + "x" * 2**22 + '"}', "characters, more than"),
        ("{}", "does not say which network it holds"),
        ('{"creation": null}', "does not say which network it holds"),
        ('{"creation": {"task": "x"}}', r"is for `subquad x`, not a classifier \(`subquad eval`, `subquad predict`\)"),
        ('{"creation": {"task": ["\\u001b"]}}', "is for `subquad .*`, not a classifier"),
        ('{"creation": {"name": "deit_tinny"}}', "unknown model 'deit_tinny'"),
        ('{"creation": {"name": ["deit_tiny"]}}', "makes no network"),
        ('{"creation": {"name": "deit_tiny", "depths": [1000000000]}}', "depths = .* the file has 2 entries"),
        ('{"creation": {"name": "deit_tiny", "img_size": 1000000000}}', "at most 8192 px a side"),
        ('{"creation": {"name": "deit_tiny", "num_classes": 1000000000}}', "num_classes = 1000000000"),
        ('{"creation": {"name": "deit_tiny", "x": "' + "x" * 2**16 + '"}}', "characters of arguments"),
        *((f'{{"creation": {{"name": "deit_tiny", "{name}": "x"}}}}', name) for name in sorted(NEVER_WRITTEN)),
    ],
    ids=lambda text: text[:40],
)
def test_a_note_that_was_not_written_by_us_is_refused(tmp_path, text, reason):
    save_weights(nn.Linear(2, 2), path := tmp_path / "file.safetensors")
    rewrite(path, text)
    refused(path, reason, restore_model)


@pytest.mark.parametrize(("kind", "good"), [(InputConfig, INPUT), (SceneInput, SCENES)])
def test_settings_of_the_input_are_of_their_types(kind, good):
    more = {"img_size": (8, 8)} if kind is InputConfig else {}
    settings_of(kind, good, **more)
    for name in good:
        for value in ("x", -1, [], [1], ["a"] * 3, {}, True, [10**9] * 2, [0.5] * 4, None):
            if (name, value) == ("short_side", None):
                continue
            with pytest.raises(SubquadError) as caught:
                settings_of(kind, good | {name: value}, **more)
            assert name in str(caught.value)
    with pytest.raises(SubquadError, match="a setting other of the input, which nothing takes"):
        settings_of(kind, good | {"other": 1}, **more)
    with pytest.raises(SubquadError, match=r"which nothing takes|sides are 1 to 8192"):
        settings_of(kind, good | {"img_size" if more else "crop": [9000, 9000]}, **more)
    for std in ([0.0] * 3, [-1.0] * 3):
        with pytest.raises(SubquadError, match="std"):
            settings_of(kind, good | {"std": std}, **more)


def test_a_note_does_not_make_other_files_be_read(tmp_path):
    model, note, read = segmenter("fpn")
    save_weights(model, path := tmp_path / "file.safetensors", note)
    inner = model.creation["backbone"] | {"checkpoint": "/dev/zero"}
    rewrite(path, note | {"creation": model.creation | {"backbone": inner}})
    refused(path, "an argument checkpoint, which no network is made with", read)


def test_weights_and_notes_that_do_not_belong_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "MOST_RESAMPLED", 2**20)
    save_weights(small("vit", class_token=False), path := tmp_path / "file.safetensors", NOTE)
    creation = small("vit", class_token=False).creation
    for changed, reason in (
        (creation | {"embed_dim": 48}, "of another shape"),
        (creation | {"embed_dim": 2**19, "num_heads": 2**18}, "of another shape"),
        (creation | {"depths": [2]}, "12 unexpected"),
        (creation | {"img_size": 8192}, "tables of 25165824 numbers, and those in it are smaller"),
        (creation | {"built_for": 8192}, "tables of 25164288 numbers, and those in it are smaller"),
        (small("pvt").creation, "missing|no square"),
    ):
        rewrite(path, NOTE | {"creation": changed})
        refused(path, reason, restore_model)
    rewrite(path, NOTE | {"creation": creation | {"built_for": 8192}})
    refused(path, "tables of 25164288 numbers", lambda path: convert_checkpoint(path, tmp_path / "other.safetensors"))
    # and so where a file only names its network
    rewrite(path, {"creation": {"name": "deit_base"}})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reason = "does not fit this model|no square"
    refused(path, reason, lambda path: convert_checkpoint(path, tmp_path / "other.safetensors"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    for task in TASKS.keys() - {"classify"}:
        refused(
            path,
            rf"is a classifier \(`subquad eval`, `subquad predict`\), not for `subquad {task}`",
            lambda path, task=task: open_trained(path, task=task),
        )
    rewrite(path, {"creation": {"task": "segment"}})
    refused(path, "makes no network", open_trained)


def test_what_is_written_can_be_read_whatever_was_measured(tmp_path):
    save_weights(small("vit"), path := tmp_path / "file.safetensors", {"miou": float("nan"), "best": [float("inf")]})
    note = restore_model(path)[1]
    assert note["miou"] is None and note["best"] == [None]
    # earlier versions wrote a bare NaN there
    rewrite(path, json.dumps({"creation": small("vit").creation, "miou": float("nan")}))
    restore_model(path)


def test_the_command_line_says_one_line(tmp_path, capsys):
    save_weights(small("vit"), path := tmp_path / "file.safetensors", NOTE)
    broken = small("vit")
    broken.head.weight.data[0, 0] = float("nan")
    save_weights(broken, nan := tmp_path / "nan.safetensors", NOTE)
    rewrite(path, NOTE | {"creation": small("vit").creation, "input": INPUT | {"std": "x"}})
    (pipe := tmp_path / "header.safetensors").write_bytes(struct.pack("<Q", 2**63) + bytes(9))
    for file, reason in ((path, 'says std = "x" of the input'), (nan, "not finite: head.weight"), (pipe, "cut short")):
        for command in (["predict", "--checkpoint", str(file), str(tmp_path)], ["eval", str(file)]):
            assert main(command) == 2
            output = capsys.readouterr()
            assert reason in output.err and output.err.count("\n") == 1 and not output.out, output


def test_a_head_without_rows_is_no_head():
    model = create_model("deit_tiny", embed_dim=24, num_heads=2, depths=(1,), img_size=32)
    for head in (torch.tensor(1.0), torch.ones(3), torch.ones(1, 2, 3)):
        with pytest.raises(SubquadError, match="of another shape"):
            load_checkpoint(model, model.state_dict() | {"head.weight": head})
