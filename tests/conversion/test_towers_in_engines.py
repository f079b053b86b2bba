"""Towers that are handed packs of patches, and other networks of several tensors, written for engines."""

import pytest
import torch
from foreign import difference, images
from foreign_diffusion import DIFFUSION, denoiser, inputs
from foreign_packs import PACKS
from torch import nn

import subquad
from subquad import SubquadError
from subquad.exports import open_exported
from subquad.exports.known_arguments import WithArguments
from subquad.exports.programs import program_of
from subquad.tracing import KnownNumbers, as_known, can_be_read

pytest.importorskip("transformers.vision_utils", exc_type=ImportError)
# Mochi asks for fp32 by autocast
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


def students(name, attention="linear"):
    """A wrapper of a student's tower, and arguments of a call of the tower alone."""
    torch.manual_seed(0)
    wrapper = PACKS[name][0]().eval()
    student = subquad.convert(wrapper.tower, attention)
    # transformers computes positions of Muse in advance for squares alone
    return student, wrapper.given(images(64, 64 if "Muse" in name else 96, 2))


@pytest.mark.slow
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PACKS)
def test_a_program_of_patches_alone_answers_as_the_student(name):
    student, given = students(name)
    network = WithArguments(student, given)
    with torch.no_grad():
        program = program_of(network.eval(), network.examples, ()).module()
        other = network.examples[0].flip(0)
        assert difference(program(other), network(other)) < 1e-5
        assert difference(network(*network.examples), student(**given)[0]) < 1e-6


ENGINES = {"onnx": ("onnxruntime", "tower.onnx"), "openvino": ("openvino", "tower.xml")}

# torch.onnx has no transformers.grouped_mm_fallback, dots3's products of experts; OpenVINO sums no numbers of the kind
# that Kimi's has, and finds the memory of Inkling's undefined
REFUSED = {
    ("transformers dots3", "onnx"),
    ("transformers dots3", "openvino"),
    ("transformers Kimi", "openvino"),
    ("transformers Inkling 2", "openvino"),
}


@pytest.mark.slow
@pytest.mark.thinned(24)
@pytest.mark.parametrize("format", ENGINES)
@pytest.mark.parametrize("name", PACKS)
def test_engines_answer_as_a_tower_of_packs(name, format, tmp_path):
    engine, file = ENGINES[format]
    pytest.importorskip(engine)
    student, given = students(name)
    if (name, format) in REFUSED:
        with pytest.raises(SubquadError, match=f"can't be written as {format}"):
            subquad.export(student, tmp_path / file, format=format, given=given)
        return
    subquad.export(student, tmp_path / file, format=format, given=given)
    (patches, *_) = (one for one in given.values() if one.is_floating_point())
    with torch.no_grad():
        wanted = student(**given)[0]
    assert difference(open_exported(tmp_path / file)(patches), wanted) < 1e-5


@pytest.mark.slow
def test_the_answer_that_is_named_is_written(tmp_path):
    pytest.importorskip("onnxruntime")
    student, given = students("transformers Qwen3-VL", "agent:num_agents=4")
    written = subquad.export(student, tmp_path / "tower.onnx", given=given, answer="pooler_output")
    assert written.difference < 1e-5 and written.shapes == ((192, 384),)
    with torch.no_grad():
        wanted = student(**given).pooler_output
    assert difference(open_exported(tmp_path / "tower.onnx")(given["hidden_states"]), wanted) < 1e-5


def test_what_can_not_be_written_of_arguments_is_one_line(tmp_path):
    student, given = students("transformers Qwen3-VL")
    file = tmp_path / "tower.onnx"
    for settings in ({"img_size": 64}, {"batch": 4}):
        with pytest.raises(SubquadError, match="what is given has its size and number: leave img_size and batch out"):
            subquad.export(student, file, given=given, **settings)
    with pytest.raises(
        SubquadError,
        match=r"can't be written as onnx.*; if it takes one batch alone, leave that out",
    ):
        subquad.export(student, file, given=given, dynamic="batch")
    with pytest.raises(SubquadError, match="none of what the file takes is a map of four axes"):
        subquad.export(student, file, given=given, dynamic="size")
    with pytest.raises(SubquadError, match=r"does not take what is given, hidden_states: .*grid_thw"):
        subquad.export(student, file, given={"hidden_states": given["hidden_states"]})
    with pytest.raises(SubquadError, match=r"does not take what is given, pixels: .*; pixels is none of its hidden_st"):
        subquad.export(student, file, given={"pixels": given["hidden_states"]})
    with pytest.raises(SubquadError, match="none of what is given is a tensor of floats: grid_thw"):
        subquad.export(student, file, given={"grid_thw": given["grid_thw"]})
    with pytest.raises(SubquadError, match=r"answers with last_hidden_state, pooler_output.*, got answer='logits'"):
        subquad.export(student, file, given=given, answer="logits")
    with pytest.raises(SubquadError, match="takes says what a file takes of what is given"):
        subquad.export(student, file, takes=["pixels"])
    assert not list(tmp_path.iterdir())


def test_any_network_of_several_tensors_is_written(tmp_path):
    class Sum(nn.Module):
        def forward(self, x, times, more):
            return x * times.sum() + more

    x, more = torch.randn(3, 5), torch.randn(5)
    file = tmp_path / "sum.pt2"
    subquad.export(Sum(), file, format="pt2", given={"x": x, "times": torch.tensor([2, 3]), "more": more})
    assert difference(open_exported(file)(x), 5 * x + more) < 1e-6


# Z-Image is handed lists of latents and of texts
GENERATORS = [name for name in DIFFUSION if name != "Z-Image"]
TAKES = ("hidden_states", "timestep", "encoder_hidden_states")


def step_of(name):
    """A student, arguments of a step, and which of these change from step to step."""
    given = inputs(name) | {"return_dict": False}
    if name == "Lumina 2":
        given["encoder_attention_mask"] = torch.ones(2, 5, dtype=torch.long)
    return subquad.convert(denoiser(name), "linear"), given, [one for one in TAKES if one in given]


@pytest.mark.slow
@pytest.mark.thinned(16)
@pytest.mark.parametrize("format", ["pt2", "onnx", "openvino"])
@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_written_with_all_that_changes_from_step_to_step(name, format, tmp_path):
    pytest.importorskip("diffusers")
    engine, _ = ENGINES.get(format, ("torch", ""))
    pytest.importorskip(engine)
    student, given, takes = step_of(name)
    file = tmp_path / f"step.{'xml' if format == 'openvino' else format}"
    if name == "Lumina 2" and format in ENGINES:
        # blocks of its text, which stay, turn tokens as complex numbers
        with pytest.raises(SubquadError, match="can't be written as"):
            subquad.export(student, file, format=format, given=given, takes=takes)
        return
    subquad.export(student, file, format=format, given=given, takes=takes)
    other = {one: given[one].flip(0) for one in takes}
    with torch.no_grad():
        (wanted,) = student(**given | other)
    assert difference(open_exported(file, format)(*other.values()), wanted) < 1e-5


def test_texts_of_several_lengths_that_are_mixed_one_by_one_are_not_written(tmp_path):
    pytest.importorskip("diffusers")
    student, given, takes = step_of("Lumina 2")
    given["encoder_attention_mask"][0, -2:] = 0
    with pytest.raises(SubquadError, match="hand over texts of one length"):
        subquad.export(student, tmp_path / "step.pt2", format="pt2", given=given, takes=takes)


@pytest.mark.slow
def test_inputs_of_a_file_are_called_as_the_arguments(tmp_path):
    pytest.importorskip("diffusers")
    onnxruntime = pytest.importorskip("onnxruntime")
    student, given, takes = step_of("DiT")
    subquad.export(student, tmp_path / "step.onnx", given=given, takes=takes)
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    assert [one.name for one in session.get_inputs()] == takes
    with pytest.raises(SubquadError, match=r"what is taken are tensors of what is given, .*, got texts"):
        subquad.export(student, tmp_path / "other.onnx", given=given, takes=["hidden_states", "texts"])


def test_known_numbers_are_read_while_a_network_is_traced():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.known = (as_known(torch.tensor([[1, 2], [3, 2]])),)
            self.weight = nn.Parameter(torch.randn(2))

        def forward(self, x):
            (known,) = self.known
            lengths = (known[:, 0] * known[:, 1]).tolist()
            return torch.cat([len(part) * part for part in x.split(lengths)]) * (known * self.weight).sum()

    network, x = Split(), torch.randn(8, 3)
    program = torch.export.export(network, (x,), strict=False).module()
    torch.testing.assert_close(program(x), network(x))
    (known,) = network.known
    assert isinstance(known + known, KnownNumbers) and can_be_read(known)
    assert not isinstance(known * network.weight, KnownNumbers)


# tables of positions, or rotations of them, hold others to one size
@pytest.mark.slow
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["AuraFlow", "CogView4", "PixArt"])
def test_generators_whose_positions_are_computed_are_written_for_any_size(name, tmp_path):
    student, given = subquad.convert(denoiser(name), "linear"), inputs(name, 8, 8)
    takes = [name for name, one in given.items() if isinstance(one, torch.Tensor)]
    settings = {"format": "pt2", "given": given, "takes": takes, "dynamic": "batch,size"}
    written = subquad.export(student, tmp_path / "n.pt2", **settings)
    assert written.difference < 1e-5 and any(shape[0] == 3 and shape[-1] != 8 for shape in written.shapes)
