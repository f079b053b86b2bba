"""Where the hub can't be reached it is said at once, in one line, whichever library asks."""

import socket
import time

import huggingface_hub
import pytest

import subquad
from subquad import SubquadError
from subquad.diffusion.pipelines import load_pipeline
from subquad.weights.hub_access import asking_hub

CALLS = {
    "hf-hub:them/theirs can't be had: ": lambda: subquad.open_trained("hf-hub:them/theirs"),
    "can't load timm/resnet18: ": lambda: subquad.open_trained("timm/resnet18"),
    "them/theirs is no folder here, and can't be loaded from the hub: ": lambda: load_pipeline("them/theirs"),
}


@pytest.fixture
def without_network(monkeypatch, tmp_path):
    def nowhere(*arguments, **keywords):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.mark.parametrize("says", CALLS)
def test_it_is_said_at_once(says, without_network, capfd):
    start = time.monotonic()
    with pytest.raises(SubquadError) as caught:
        CALLS[says]()
    assert str(caught.value).startswith(f"{says}hub.example can't be reached, Name or service not known")
    assert time.monotonic() - start < 20
    assert "Retry" not in "".join(capfd.readouterr())
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_other_errors_are_their_own_and_proxies_are_asked(without_network, monkeypatch):
    with pytest.raises(KeyError), asking_hub():
        raise KeyError("theirs")
    monkeypatch.setenv("https_proxy", "http://proxy.example:8080")
    with asking_hub():
        assert not huggingface_hub.constants.HF_HUB_OFFLINE
