"""Pipelines of diffusers whose U-Net is a file in its engine."""

from copy import deepcopy

import pytest
import torch
from tiny import latents, pipeline, pipeline_xl, unet

import subquad
from subquad import ATTENTION, SubquadError
from subquad.exports import EXPORTERS, in_engine
from subquad.exports.engine_networks import CalledInEngine

pytestmark = pytest.mark.slow

MANY = [(make, format) for make in (pipeline, pipeline_xl) for format in ("onnx", "openvino", "pt2")]


@pytest.mark.long
@pytest.mark.parametrize(("make", "format"), MANY)
def test_files_of_any_size_stand_in_a_pipeline(make, format, tmp_path):
    for package in EXPORTERS[format].needs:
        pytest.importorskip(package)
    pipe = make()
    pipe.unet = subquad.convert(pipe.unet, "linear")
    sizes = {(32, 24): latents(pipe), (48, 64): latents(pipe, height=48, width=64, guidance_scale=1.0)}
    file = tmp_path / f"unet{EXPORTERS[format].suffix}"
    written = subquad.export(pipe.unet, file, format=format, dynamic="batch,size")
    assert written.difference < 1e-4 and written.most == 63
    pipe.unet = in_engine(pipe.unet, file)
    assert torch.allclose(latents(pipe), sizes[32, 24], atol=1e-3)
    assert torch.allclose(latents(pipe, height=48, width=64, guidance_scale=1.0), sizes[48, 64], atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("attention", ATTENTION)
def test_every_mechanism_is_written_for_any_size(attention, tmp_path):
    for package in EXPORTERS["onnx"].needs:
        pytest.importorskip(package)
    student = subquad.convert(pipeline().unet, attention)
    written = subquad.export(student, tmp_path / "unet.onnx", dynamic="batch,size")
    assert written.difference < 1e-5 and written.step == 2


@pytest.fixture(scope="module")
def in_a_file(tmp_path_factory):
    unet, file = pipeline().unet, tmp_path_factory.mktemp("file") / "unet.pt2"
    subquad.export(unet, file, format="pt2", img_size=16, dynamic="batch")
    return unet, file


def call(batch=2, size=16, **more):
    text = torch.randn(batch, 77, 32)
    return {"sample": torch.randn(batch, 4, size, size), "encoder_hidden_states": text, "timestep": 7, **more}


def test_a_file_stands_in_a_pipeline(in_a_file):
    unet, file = in_a_file
    pipe = pipeline()
    wanted = latents(pipe, height=32, width=32)
    pipe.unet = in_engine(unet, file)
    unet.register_forward_pre_hook(lambda *_: calls.append(1))
    calls = []
    # the first of its steps is held against the network
    assert torch.allclose(latents(pipe, height=32, width=32), wanted, atol=1e-3) and len(calls) == 1
    assert pipe.unet.config.in_channels == 4 and pipe.unet.dtype == torch.float32


def test_a_file_is_called_as_the_network_is(in_a_file):
    unet, file = in_a_file
    engine = in_engine(unet, file)
    given = call()
    with torch.no_grad():
        wanted = unet(**given).sample
        torch.testing.assert_close(engine(**given).sample, wanted, rtol=1e-4, atol=1e-4)
        by_place = engine(given["sample"], torch.tensor(7), given["encoder_hidden_states"], return_dict=False)
        of_each = engine(**given | {"timestep": torch.tensor([7, 7])}).sample
    torch.testing.assert_close(by_place[0], wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(of_each, by_place[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_times_between_steps_stay_as_they_are(in_a_file, dtype, tmp_path):
    unet, file = in_a_file
    if dtype == "bf16":
        unet, file = deepcopy(unet).bfloat16(), tmp_path / "unet.pt2"
        subquad.export(unet, file, format="pt2", img_size=16, batch=2, dtype="bf16")
    engine, given = in_engine(unet, file), call()
    given = given | {name: given[name].to(unet.dtype) for name in ("sample", "encoder_hidden_states")}
    with torch.no_grad():
        found = [engine(**given | {"timestep": torch.tensor(time)}).sample for time in (965.0, 965.5, 965)]
        wanted = [unet(**given | {"timestep": torch.tensor(time)}).sample for time in (965.0, 965.5, 965)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype == "bf16" else 1e-5, atol=1e-5)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_a_network_need_not_say_its_size():
    network = unet(sample_size=None)
    engine = CalledInEngine(network, lambda sample, *_: network(sample, torch.tensor([7]), text).sample)
    text = torch.randn(1, 77, 32)
    with torch.no_grad():
        found = engine(torch.randn(1, 4, 8, 8), 7, text).sample
    assert found.shape == (1, 4, 8, 8)


def test_calls_that_a_file_does_not_take_are_refused(in_a_file, tmp_path):
    unet, file = in_a_file
    engine = in_engine(unet, file)
    residuals = {"mid_block_additional_residual": torch.zeros(1)}
    for given, says in (
        (call(size=24), r"unet.pt2 does not take this call: "),
        (call(timestep=torch.tensor([7, 9])), "unet.pt2 takes one timestep for all images, got 2"),
        (call(**residuals), "unet.pt2 has no place for mid_block_additional_residual: the network itself takes it"),
        ({"sample": torch.zeros(1, 4, 16, 16), "timestep": 7, "encoder_hidden_states": None}, "encoder_hidden_states"),
    ):
        with pytest.raises(SubquadError, match=says):
            engine(**given)
    with pytest.raises(SubquadError, match=r"unet.pt2 is off by .* it was written of another network"):
        torch.manual_seed(7)
        other = pipeline().unet
        for parameter in other.parameters():
            parameter.data.normal_(std=0.2)
        in_engine(other, file)(**call())
    with pytest.raises(SubquadError, match="pipelines call encode and decode of a AutoencoderKL"):
        in_engine(pipeline().vae, file)
    with pytest.raises(SubquadError, match="takes says what a file takes of what is given, which is not there"):
        subquad.export(unet, tmp_path / "none.pt2", format="pt2", takes=["sample"])
    with pytest.raises(SubquadError, match="there is no file"):
        in_engine(unet, tmp_path / "none.pt2")
