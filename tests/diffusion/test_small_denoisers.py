"""`scripts/agentsd_evidence.py`: training goes on as if it had not been stopped, and all of it works on toys."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from subquad import SubquadError
from subquad.conversion.families.diffusers_attention import DiffusersAttention

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import small_denoisers

    monkeypatch.setattr(small_denoisers, "BATCH", 4)
    return small_denoisers


class Guess(nn.Module):
    """As many parameters as a test needs, and drop-out, which draws."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Conv2d(3, 3, 1), nn.Dropout(0.3)

    def forward(self, noisy, levels, labels):
        return self.scale(self.drop(noisy)) * (levels / 1000)[:, None, None, None]


def begun(scripts, file, seed=0):
    torch.manual_seed(5)
    return scripts.Training(Guess(), file, seed=seed)


def data():
    pictures = torch.randint(0, 256, (10, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return pictures.to(torch.uint8), torch.arange(10)


def weights(training):
    return {name: tensor.clone() for name, tensor in training.averaged.state_dict().items()}


def silent(line):
    pass


def test_training_goes_on_as_if_it_had_not_been_stopped(scripts, tmp_path):
    whole = begun(scripts, tmp_path / "a" / "state.pt")
    whole.run(*data(), 5, log=silent)
    begun(scripts, tmp_path / "b" / "state.pt").run(*data(), 2, log=silent)
    again = begun(scripts, tmp_path / "b" / "state.pt")
    assert again.updates == 2
    again.run(*data(), 5, log=silent)
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)
    # and seeds are others
    other = begun(scripts, tmp_path / "c" / "state.pt", seed=1)
    other.run(*data(), 5, log=silent)
    assert not torch.equal(weights(other)["scale.weight"], weights(whole)["scale.weight"])


def test_an_interruption_keeps_whole_updates(scripts, tmp_path, monkeypatch):
    training = begun(scripts, tmp_path / "a" / "state.pt")
    update = training.update

    def interrupted(*words):
        if training.updates == 2:
            signal.raise_signal(signal.SIGTERM)
        return update(*words)

    monkeypatch.setattr(training, "update", interrupted)
    with pytest.raises(SubquadError, match="interrupted: 2 of 5 updates are kept"):
        training.run(*data(), 5, log=silent)
    assert begun(scripts, tmp_path / "a" / "state.pt").updates == 2


def test_a_state_of_another_network_is_refused_in_a_line(scripts, tmp_path):
    begun(scripts, tmp_path / "state.pt").save()
    with pytest.raises(SubquadError, match="can't be gone on from"):
        scripts.Training(nn.Linear(2, 2), tmp_path / "state.pt")


@pytest.mark.slow
@pytest.mark.parametrize("network", ["dit", "unet"])
def test_other_attention_stands_where_softmax_was(scripts, network):
    torch.manual_seed(0)
    denoiser = scripts.NETWORKS[network](toy=True).eval()
    x, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 7])
    plain = denoiser.predict(x, 500, labels)
    assert torch.equal(scripts.converted(denoiser, "softmax").predict(x, 500, labels), plain)
    other = scripts.converted(denoiser, "agent:num_agents=4")
    layers = [module for module in other.modules() if isinstance(module, DiffusersAttention)]
    assert len(layers) == {"unet": 7, "dit": 2}[network]
    assert layers[0].inner.agent_grid.num_places == 4
    other.predict(x, 500, labels).sum().backward()
    assert all(layer.inner.agent_bias.block.grad is not None for layer in layers)
    # the network itself is as it was
    assert torch.equal(denoiser.predict(x, 500, labels), plain)


@pytest.mark.slow
def test_a_toy_from_training_to_the_page(scripts, tmp_path, monkeypatch, capsys):
    import agentsd_evidence

    one = {name: agentsd_evidence.METHODS[name] for name in ("softmax", "merging 40 %", "agents 40 %")}
    monkeypatch.setattr(agentsd_evidence, "METHODS", one)
    monkeypatch.setattr(agentsd_evidence, "LEVELS", (50, 750))
    monkeypatch.setattr(agentsd_evidence, "STEPS", 4)
    monkeypatch.setattr(agentsd_evidence, "give_way", lambda: None)
    pictures, labels = data()
    monkeypatch.setattr(agentsd_evidence, "load_images", lambda data, split, count: (pictures, labels))
    files = ["--toy", "--amp", "", "--output", str(tmp_path / "out"), "--results", str(tmp_path / "agentsd.json")]

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["agentsd_evidence.py", *words, *files])
        agentsd_evidence.main()
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="train needs --data"):
        call("train")
    with pytest.raises(SystemExit, match="run the command train"):
        call("measure", "--data", "nowhere")
    assert "3 of 3 updates" in call("train", "--data", "nowhere")
    call("tune", "--data", "nowhere", "--attention", "inline")
    said = call("measure", "--data", "nowhere")
    assert "inline, tuned, noise level 750" in said and "as published: 4 of 4 images" in said
    # what is there is not measured again
    assert "noise level" not in call("measure", "--data", "nowhere")
    found = json.loads((tmp_path / "agentsd.json").read_text())["unet"]
    assert found["errors"].keys() == {*one, "inline, tuned"} and "early steps matter most" in found["claims"]
    assert (tmp_path / "agentsd-unet.png").stat().st_size > 1000
    call("page")
    assert "| agents 40 % | " in (tmp_path / "agentsd.md").read_text()
