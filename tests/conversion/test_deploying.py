"""Converted networks exported, compiled, stored and loaded, as one does with what they were made from."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign import FOREIGN, Answer, answer, difference, images, side_of, teacher
from timm.models import create_feature_extractor, get_graph_node_names

import subquad
from subquad import SubquadError
from subquad.conversion import load_converted, save_delta
from subquad.exports import open_exported
from subquad.kernels import multipliers
from subquad.models.stated_inputs import stated_size

LIBRARIES = list({name.split()[0]: name for name in reversed(FOREIGN)}.values())
"""A network of each library."""


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LIBRARIES else pytest.mark.slow) for name in FOREIGN]
)
def test_it_is_exported(name):
    student, x = subquad.convert(teacher(name), "linear"), images(side_of(name))
    exported = torch.export.export(Answer(student), (x,)).module()
    assert difference(exported(x), answer(student, x)) < 1e-6


@pytest.mark.filterwarnings("ignore")  # that TorchScript is deprecated
def test_torchscript_is_refused_with_what_to_take_instead():
    student, x = subquad.convert(teacher("timm ViT"), "linear"), images()
    for call in (lambda: torch.jit.trace(student, x), lambda: torch.jit.script(student)):
        with pytest.raises(SubquadError, match=r"subquad.export\(model, path, format='pt2'\)"):
            call()


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_converted_as_it_is_says_its_size(name):
    model = teacher(name)
    try:
        student = subquad.convert(model, "softmax", in_place=True)
    except SubquadError as error:
        assert "img_size" in str(error)
    else:
        assert stated_size(student) is not None


@pytest.mark.slow
@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", FOREIGN)
def test_it_is_exported_for_any_number_of_images(name):
    student, x = subquad.convert(teacher(name), "agent", num_agents=4), images(side_of(name))
    exported = torch.export.export(Answer(student), (x,), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}}).module()
    several = images(side_of(name), number=5)
    assert difference(exported(several), answer(student, several)) < 1e-6
    # what was traced leaves nothing behind
    assert torch.equal(answer(student, x), answer(student, x.clone()))


TRACED = [name for name in FOREIGN if not name.startswith("transformers") and name != "timm DeiT, distilled"]
"""Those that torch.fx traces, of which timm's Swin only where its blocks are one step."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LIBRARIES else pytest.mark.slow) for name in TRACED]
)
@torch.no_grad()
def test_timm_extracts_features_from_its_graph(name, monkeypatch):
    monkeypatch.setattr(multipliers, "products_lag", lambda: True)
    student = subquad.convert(teacher(name), "linear")
    for model in (student, subquad.optimize(student), subquad.optimize(teacher(name))):
        last = get_graph_node_names(model)[1][-1]
        extractor = create_feature_extractor(model, [last])
        for number in (2, 3):
            x = images(side_of(name), number=number)
            assert torch.equal(extractor(x)[last], answer(model, x))


ANY_SIZE = [name for name, (_, any_size) in FOREIGN.items() if any_size and name != "timm Swin"]
"""Swins of other libraries decide by an image's size whether they pad it."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", ANY_SIZE)
def test_it_is_exported_for_images_of_any_size(name, tmp_path):
    model = teacher(name)
    if hasattr(getattr(model, "patch_embed", None), "dynamic_img_pad"):
        model.patch_embed.dynamic_img_pad = True
    student = subquad.convert(model, "agent", num_agents=4)
    settings = {"img_size": side_of(name), "dynamic": "batch,size", "format": "pt2"}
    for network in (teacher(name), student):
        if name.startswith("timm") and network is not student:
            continue  # as it is, timm's takes whole patches alone
        written = subquad.export(Answer(network), tmp_path / "network.pt2", **settings)
        assert written.difference < 1e-5 and len(written.shapes) == 2


@pytest.mark.slow
def test_it_is_compiled_without_a_break_and_for_several_sizes():
    student = subquad.convert(teacher("timm ViT"), "linear")
    torch.compiler.reset()  # what other tests compiled would decide what is compiled here
    compiled = torch.compile(student, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (images(), images(64, 96), images(96, 64)):
        assert difference(answer(compiled, x), answer(student, x)) < 1e-6


@pytest.mark.parametrize("name", FOREIGN)
def test_it_is_kept_in_a_file_beside_its_teacher(name, tmp_path):
    model = teacher(name)
    student = subquad.convert(model, "agent", num_agents=4)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.01)
    save_delta(student, tmp_path / "delta.safetensors", teacher=model)
    loaded, x = load_converted(tmp_path / "delta.safetensors", model), images(side_of(name))
    assert torch.equal(answer(loaded, x), answer(student, x))


LOADING = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, subquad
from foreign import answer, images, teacher
model = teacher("timm ViT")
student = subquad.convert(model, "agent", num_agents=4)
student.load_state_dict(torch.load(sys.argv[2] + "/student.pt"))
assert torch.equal(answer(student, images()), torch.load(sys.argv[2] + "/answer.pt"))
assert torch.equal(answer(subquad.restore(student), images()), answer(model, images()))
"""


@pytest.mark.slow
def test_it_is_loaded_in_a_fresh_process(tmp_path):
    student = subquad.convert(teacher("timm ViT"), "agent", num_agents=4)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if ".inner." in name:
                parameter.normal_()
    torch.save(student.state_dict(), tmp_path / "student.pt")
    torch.save(answer(student, images()), tmp_path / "answer.pt")
    subprocess.run([sys.executable, "-c", LOADING, str(Path(__file__).parent), str(tmp_path)], check=True)


@pytest.mark.slow
def test_it_is_exported_to_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    student, x = subquad.convert(teacher("timm ViT"), "linear"), images()
    program = torch.onnx.export(student, (x,), dynamo=True)
    program.save(tmp_path / "student.onnx")
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "student.onnx")
    (answered,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert difference(torch.from_numpy(answered), answer(student, x)) < 1e-5


def test_absent_tokens_of_transformers_networks_stay_unseen():
    """A mask in transformers' sense, 1 for what is there; where nothing is traced, one of ones is none."""
    model, x = teacher("transformers ViT").vit, images()
    student = subquad.convert(model, "softmax")
    there = torch.ones(2, 17, dtype=torch.long)
    there[0, 10:] = 0
    with torch.no_grad():
        expected = model(x, attention_mask=there).last_hidden_state
        answered = student(x, attention_mask=there).last_hidden_state
    assert difference(answered[0, :10], expected[0, :10]) < 1e-6
    assert difference(answered[1], expected[1]) < 1e-6
    pairs = torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    with pytest.raises(SubquadError, match="differ among queries"):
        student(x, attention_mask=pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answer"),
    [("transformers ViT", None), ("transformers ViT", "logits"), ("transformers DINOv2", "pooler_output")],
)
def test_of_answers_by_name_one_is_written(name, answer, tmp_path):
    student, x = subquad.convert(teacher(name), "linear"), images(96)
    file = tmp_path / "network.pt2"
    given = {"format": "pt2", "dynamic": ["batch"], "img_size": 96 if name == "transformers DINOv2" else None}
    assert subquad.export(student, file, answer=answer, **given).difference < 1e-5
    for model, wrong, says in (
        (student, "other", "by name, and one is written: say answer=…, got 'other'"),
        (teacher("timm ViT"), "logits", "is of networks that give several by name, and this one does not"),
    ):
        with pytest.raises(SubquadError, match=says):
            subquad.export(model, file, answer=wrong, **given)
    if name == "transformers DINOv2":
        with pytest.raises(SubquadError, match="gives last_hidden_state, pooler_output by name, and one is written"):
            subquad.export(student, file, **given)
        written = open_exported(file)(x[:1])
        with torch.no_grad():
            assert difference(written, student(x[:1]).pooler_output) < 1e-5
