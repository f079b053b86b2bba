"""What one thread traces, exports or puts in a place is nothing to the networks that others serve meanwhile."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import subquad
from subquad.exports.foreign_forms import forms_of_any_size
from subquad.kernels import backends, use_backend
from subquad.substituting import substituted
from subquad.tracing import insist, is_exporting, is_traced


def elsewhere(function):
    """What a function gives in another thread."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


def asked():
    return is_traced(), is_exporting()


class Asking(nn.Module):
    """Asks whether it is traced, in the thread that calls it and in another one."""

    def forward(self, x):
        self.__dict__["answers"] = asked(), elsewhere(asked)
        return x + 1


def test_a_thread_that_exports_is_traced_alone():
    network = Asking()
    torch.export.export(network, (torch.zeros(2),), strict=False)
    assert network.answers == ((True, True), (False, False))
    assert asked() == (False, False)


def test_a_thread_that_compiles_is_traced_alone():
    heard, answers = [], []

    def backend(graph, examples):
        heard.append(elsewhere(asked))
        return graph.forward

    def function(x):
        return x + 1 if is_traced() else x

    torch._dynamo.reset()
    answers.append(torch.compile(function, backend=backend)(torch.zeros(1)))
    assert heard == [(False, False)] and answers == [torch.ones(1)]


def test_what_is_put_in_a_place_is_gone_when_all_have_left_in_whatever_order():
    class Owner:
        place = "first"

    for left in ("one", "other"):
        one, other = substituted(Owner, "place", "one"), substituted(Owner, "place", "other")
        order = [one, other] if left == "other" else [other, one]
        one.__enter__()
        other.__enter__()
        assert Owner.place == "other"
        order[0].__exit__(None, None, None)
        assert Owner.place == left
        order[1].__exit__(None, None, None)
        assert Owner.place == "first"


def test_a_backend_is_asked_for_until_all_who_did_have_left_in_whatever_order():
    before, one, other = backends.asked(None), use_backend("eager"), use_backend("auto")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert backends.asked(None) == "auto"
    other.__exit__(None, None, None)
    assert backends.asked(None) == before


def test_other_threads_go_on_with_what_pytorch_computes_while_one_exports():
    image = torch.rand(1, 3, 9, 7).mul(255).to(torch.uint8)

    def smooth():
        return functional.interpolate(image, size=(5, 4), mode="bicubic", antialias=True)

    plain = smooth()
    with forms_of_any_size():
        assert torch.equal(elsewhere(smooth), plain)
    assert torch.equal(smooth(), plain)


@pytest.mark.slow
def test_two_threads_export_one_after_the_other(tmp_path):
    network = subquad.create_model("deit_tiny", attention="linear", img_size=32, depth=1, embed_dim=24, num_heads=2)
    written = []

    def write(number):
        path = tmp_path / f"{number}.pt2"
        written.append(subquad.export(network, path, format="pt2", dynamic="batch"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    before = functional.interpolate
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 2 and all(one.difference < 1e-5 for one in written)
    assert functional.interpolate is before


def test_compiled_code_asks_of_numbers_when_it_runs():
    def checked(x):
        insist((x > 0).all(), "numbers are above 0")
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(checked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="numbers are above 0"):
        compiled(-torch.ones(2))
    with pytest.raises(subquad.SubquadError, match="numbers are above 0"):
        checked(-torch.ones(2))
