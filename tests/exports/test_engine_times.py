"""Passes in every engine, each in a process of its own, and the advice that is made of them."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import subquad
from subquad import SubquadError
from subquad.advice import AS_IT_IS, Advised
from subquad.benchmarks import measure_unet, shares_of_time
from subquad.benchmarks.time_shares import OTHER, kind_of
from subquad.conversion import Advice, advise, trade_off
from subquad.conversion.advising import AdviceRow
from subquad.exports.engine_times import EngineTime, installed_formats, time_engines, timed_here
from subquad.models import create_model

PX = (32, 32)


def network(attention="linear"):
    return create_model("deit_tiny", attention=attention, img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2)


@pytest.fixture
def in_this_process(monkeypatch):
    """Engines without processes of their own, which take seconds to begin."""

    def run(file, engine, dtype, px, repeats, names):
        return timed_here(torch.load(file, weights_only=False), engine, dtype, px, repeats, file.parent)

    monkeypatch.setattr("subquad.exports.engine_times.in_a_process", run)


def test_pytorch_is_timed_as_it_is_and_optimized_in_the_dtypes_that_are_asked_for(in_this_process):
    model, said = network().train(), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = time_engines({"a": model, "b": network("softmax")}, PX, [], ["fp32", "bf16"], repeats=1, log=said.append)
    assert [(row.engine, row.dtype, row.network) for row in rows] == [
        (engine, dtype, name) for engine in ("PyTorch", "optimize") for dtype in ("fp32", "bf16") for name in "ab"
    ]
    assert all(row.ms > 0 and not row.reason for row in rows)
    assert said == ["32×32 PyTorch fp32", "32×32 PyTorch bf16", "32×32 optimize fp32", "32×32 optimize bf16"]
    # what was given is as it was
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Refuses(nn.Module):
    def forward(self, images):
        raise ValueError(f"no images of\n{images.shape[-1]} px")


def test_a_network_that_fails_in_an_engine_has_its_reason_in_a_line_and_the_others_are_timed(in_this_process):
    broken, whole = time_engines({"a": Refuses(), "b": network()}, PX, [], ["fp32"], repeats=1)[:2]
    assert broken.ms is None
    assert broken.reason.startswith("no images of") and "\n" not in broken.reason
    assert whole.ms > 0


def test_unknown_formats_and_dtypes_are_refused_before_anything_is_timed():
    with pytest.raises(SubquadError, match="did you mean onnx"):
        time_engines({}, PX, ["onnxx"])
    with pytest.raises(SubquadError, match="did you mean onnx"):
        subquad.advise(lambda px: pytest.fail("a network was made first"), engines=["onnxx"])
    with pytest.raises(SubquadError, match="fp32, bf16, int8, not in fp16"):
        time_engines({}, PX, [], ["fp16"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"img_size": "32"}, "img_size must be .* got '32'"),
        ({"img_size": [(8, 8, 8)]}, r"img_size must be .* got \[\(8, 8, 8\)\]"),
        ({"img_size": [8.5]}, r"img_size must be .* got \[8.5\]"),
        ({"img_size": []}, "no size of images to advise on"),
        ({"attention": "agent"}, "attention must be a list of texts, got 'agent'"),
        ({"engines": "onnx"}, "engines must be a list of texts, got 'onnx'"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1, got 0"),
        ({"dtype": torch.int8}, "torch.float16, not in torch.int8"),
    ],
)
def test_what_advice_can_not_be_asked_for_is_said_before_a_network_is_made(settings, message):
    with pytest.raises(SubquadError, match=message) as raised:
        subquad.advise(lambda px: pytest.fail("a network was made first"), **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "timed",
    [
        lambda: time_engines({}, PX, repeats=0),
        lambda: advise(pytest.fail, [PX], repeats=0),
        lambda: trade_off(None, None, [], [], repeats=0),
        lambda: subquad.bench(["linear"], [16], repeats=0),
        lambda: subquad.bench(["deit_micro"], [16], repeats=0),
        lambda: measure_unet("sd15", [64], [], repeats=0),
    ],
)
def test_what_is_timed_is_repeated_once_at_least(timed):
    with pytest.raises(SubquadError, match="repeats must be a whole number of at least 1, got 0"):
        timed()


def test_shares_of_time_are_of_kinds_and_of_all_of_it():
    linear, x = nn.Linear(256, 256), torch.randn(512, 256)
    shares = shares_of_time(lambda: linear(x).relu(), repeats=2)
    assert sum(shares.values()) == pytest.approx(1)
    assert {"products of matrices", "activations"} <= set(shares)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert kind_of("aten::native_layer_norm") == "norms"
    assert kind_of("aten::copy_") == "copies"
    assert kind_of("subquad::something_new") == OTHER


def test_what_to_take_is_the_quickest_of_all_and_says_how():
    before = AdviceRow("", PX, 17, 10.0, 1.0, None, 1.0)
    rows = [
        EngineTime(AS_IT_IS, "PyTorch", "fp32", 9.0),
        EngineTime("linear", "PyTorch", "fp32", 8.0),
        EngineTime(AS_IT_IS, "openvino", "bf16", None, "it has no sine"),
        EngineTime("linear", "openvino", "bf16", 4.0),
    ]
    advised = Advised("timm/vit", Advice([before], {}, {}, {}, 1, 1), {PX: rows})
    assert advised.fastest(PX) == rows[-1]
    text = advised.text
    assert "take linear, openvino bf16: 4.0 ms, 2.25 times as fast as it is in PyTorch" in text
    assert "subquad convert timm/vit --attention linear --images" in text
    assert "subquad export runs/converted --format openvino --dtype bf16 --img-size 32" in text
    assert "openvino bf16, as it is: it has no sine" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    failed = [EngineTime(AS_IT_IS, "PyTorch", "fp32", None, "no memory"), *rows[1:]]
    some = Advised("timm/vit", Advice([before], {}, {}, {}, 1, 1), {PX: failed}, blocks=[0, 3]).text
    assert "--attention linear --blocks 0 3 --images" in some
    assert "times as fast" not in some, "there is nothing that it was timed beside"
    nothing = Advised("timm/vit", Advice([before], {}, {}, {}, 1, 1), {PX: [rows[2]]})
    assert nothing.fastest(PX) is None
    assert "take" not in nothing.text


def test_int8_is_named_beside_what_to_take_and_never_taken_for_its_time_alone():
    rows = [
        EngineTime(AS_IT_IS, "PyTorch", "fp32", 9.0),
        EngineTime("linear", "onnx", "fp32", 4.0),
        EngineTime("linear", "onnx", "int8", 3.0),
    ]
    advised = Advised("timm/vit", Advice([], {}, {}, {}, 1, 1), {PX: rows})
    assert advised.fastest(PX) == rows[1] and advised.fastest(PX, int8=True) == rows[2]
    text = advised._engines_text(PX)
    assert "take linear, onnx fp32: 4.0 ms" in text
    assert "in int8, linear takes 3.0 ms; what it costs says subquad eval --engine" in text
    assert "subquad export runs/converted --format onnx --int8 dynamic --img-size 32" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    slower = [*rows[:2], EngineTime("linear", "onnx", "int8", 5.0)]
    assert "in int8" not in Advised("timm/vit", Advice([], {}, {}, {}, 1, 1), {PX: slower})._engines_text(PX)


@pytest.mark.slow
def test_onnx_files_are_timed_in_int8_as_well(in_this_process):
    pytest.importorskip("onnxruntime")
    rows = time_engines({"a": network()}, PX, ["onnx"], ["int8"], repeats=1)
    assert [(row.engine, row.dtype) for row in rows] == [("onnx", "int8")]
    assert rows[0].ms is not None and rows[0].ms > 0, rows[0].reason


@pytest.mark.long
@pytest.mark.slow
def test_networks_of_transformers_whose_decoders_ask_for_hidden_states_are_timed_in_their_process():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "sr_ratios": [2, 1], "num_attention_heads": [1, 2]}
    more = {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    config = transformers.SegformerConfig(**sizes, **more, decoder_hidden_size=8)
    segformer = transformers.SegformerForSemanticSegmentation(config)
    rows = time_engines({"a": segformer}, PX, [], ["fp32"], repeats=1)
    assert all(row.ms for row in rows), [row.reason for row in rows]


SCRIPT = """
from pathlib import Path
import timm
from torch import nn
from subquad.exports.engine_times import time_engines

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Flatten()

    def forward(self, image):
        return self.part(image)

with Path("runs.txt").open("a") as file:
    file.write("run\\n")
{guard}
    rows = time_engines({{"a": {network}}}, (32, 32), [], ["fp32"], repeats=1)
    print([row.reason for row in rows])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "guard", "runs", "said"),
    [
        ("nn.Flatten()", "if True:", 1, "['', '']"),
        ("Net()", 'if __name__ == "__main__":', 3, "['', '']"),
        ("Net()", "if True:", 1, "which read Net from script.py: put what it does below `if __name__ =="),
    ],
)
def test_scripts_are_run_once_more_only_for_the_classes_that_they_define(tmp_path, network, guard, runs, said):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard, network=network))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (said in done.stdout, done.stderr) == (True, "")
    assert (tmp_path / "runs.txt").read_text().count("run") == runs


def test_classes_of_a_notebook_are_asked_for_in_a_file(tmp_path, monkeypatch):
    cls = type("Net", (nn.Flatten,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    sys.modules["__main__"].Net = cls
    rows = time_engines({"a": cls()}, PX, [], ["fp32"], repeats=1)
    assert {row.reason for row in rows} == {
        "engines are timed in processes of their own: define Net in a file, and import it"
    }


def test_a_reason_that_all_have_is_said_once():
    rows = [EngineTime("a", engine, "fp32", None, "too little") for engine in ("PyTorch", "onnx")]
    assert "all: too little" in Advised("a", Advice([], {}, {}, {}, 1, 1), {PX: rows}).text
    rows[0] = EngineTime("a", "PyTorch", "fp32", 1.0)
    assert "onnx fp32, a: too little" in Advised("a", Advice([], {}, {}, {}, 1, 1), {PX: rows}).text


@pytest.mark.long
@pytest.mark.slow
def test_advice_goes_from_a_network_to_an_engine():
    advised = subquad.advise(lambda px: network("softmax"), img_size=32, attention=["linear"], repeats=1)
    engines = {row.engine for row in advised.engines[PX]}
    assert engines == {"PyTorch", "optimize", *installed_formats()}
    assert {row.network for row in advised.engines[PX]} == {AS_IT_IS, "linear"}
    assert all(row.ms for row in advised.engines[PX]), [row.reason for row in advised.engines[PX]]
    assert sum(advised.mechanisms.times[PX].values()) == pytest.approx(1)
    assert all(len(line) <= 80 for line in advised.text.splitlines())


def test_a_network_to_advise_on_may_be_a_path(tmp_path):
    with pytest.raises(SubquadError, match="unknown network"):
        subquad.advise(tmp_path / "nothing")


def test_a_network_to_advise_on_may_be_given_itself():
    model = network("softmax")
    advised = subquad.advise(model, img_size=32, attention=["linear"], repeats=1, engines=[])
    assert [row.attention for row in advised.mechanisms.rows] == ["", "nothing", "linear"]
    with pytest.raises(SubquadError, match=r"does not run at 33×32 \(.*\): give the part that takes images alone"):
        subquad.advise(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(7, 7)), img_size=[(33, 32)], engines=[])
