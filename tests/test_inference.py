"""Networks made ready for inference compute what they did, in fewer steps."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hosts import SMALL, drawn, small
from timm.layers import DropPath
from torch import nn
from torch.testing import assert_close

import subquad
from subquad import SubquadError, kernels, use_backend
from subquad.attention.linear import LinearAttention
from subquad.inference import own_blocks
from subquad.inference.windowed_halves import half_in_windows
from subquad.kernels import choosing, multipliers, replaying
from subquad.kernels.cpu import tape
from subquad.models.layers import Block, LayerScale
from subquad.substituting import substituted


def blocks_of(model):
    return [block for block in model.modules() if isinstance(block, Block)]


@pytest.mark.parametrize("kind", SMALL)
def test_an_optimized_network_gives_what_it_gave(kind):
    model, image = drawn(small(kind, "linear")), torch.randn(2, 3, 64, 64)
    expected, names = model(image), list(model.state_dict())
    optimized = subquad.optimize(model)
    assert optimized is model and list(model.state_dict()) == names
    assert_close(optimized(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    with use_backend("eager"):
        assert_close(optimized(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    # gated MLPs are no plain ones
    assert any(block.fused for block in blocks_of(model)) == (kind != "eva02")


@pytest.mark.parametrize("attention", subquad.ATTENTION)
@pytest.mark.parametrize("kind", ["pvt", "swin"])
@torch.inference_mode()
def test_layers_that_are_plain_on_some_grids_are_fused_there(kind, attention):
    model = drawn(small(kind, attention))
    images = [torch.randn(1, 3, *size) for size in ((64, 64), (96, 72), (224, 64))]
    expected = [model(image) for image in images]
    subquad.optimize(model)
    for image, own in zip(2 * images, 2 * expected, strict=True):
        assert_close(model(image), own, rtol=1e-4, atol=1e-4 * own.abs().max().item())
    called = [known for block in blocks_of(model) for known in replaying.tapes_of(block)["block"].tapes.values()]
    if not kernels.unavailable("native"):
        # PyTorch makes a bias of Swin's offsets
        assert any(called) == ((kind, attention) != ("swin", "softmax"))


@pytest.mark.parametrize("attention", ["softmax", "linear", "agent"])
@pytest.mark.parametrize("kind", ["pvt", "swin"])
@torch.inference_mode()
def test_keys_that_are_reduced_and_windows_are_as_good_as_bf16_is(kind, attention):
    model, image = drawn(small(kind, attention)), torch.randn(16, 3, 96, 72)
    exact = copy.deepcopy(model).double()(image.double())
    plain = copy.deepcopy(model).bfloat16()(image.bfloat16()).double()
    subquad.optimize(model, torch.bfloat16)
    for _ in range(2):
        assert (model(image.bfloat16()).double() - exact).norm() <= 1.5 * (plain - exact).norm()


@pytest.mark.parametrize("attention", subquad.ATTENTION)
@torch.no_grad()
def test_windows_are_few_steps(attention, monkeypatch):
    cut = []
    monkeypatch.setattr(multipliers, "products_lag", lambda: True)
    monkeypatch.setattr(own_blocks, "half_in_windows", lambda *a, **k: cut.append(a) or half_in_windows(*a, **k))
    shift = attention == "softmax"
    model = drawn(small("swin", attention, window_size=(5,) * 4, shift=shift, fixed_windows=True))
    # one that is whole windows, one that is filled up; two of each, as steps are made again
    for image in [torch.randn(2, 3, *size) for size in ((160, 160), (96, 72))]:
        expected = model(image)
        fast = subquad.optimize(copy.deepcopy(model))
        for _ in range(2):
            assert_close(fast(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert cut


@pytest.mark.parametrize("kind", ["pvt", "swin", "vit"])
def test_a_layer_that_says_nothing_of_its_calls_is_called(kind):
    model, image = drawn(small(kind, "linear")), torch.randn(1, 3, 64, 64)
    for block in blocks_of(model):
        block.attn.__class__ = type("Zeros", (type(block.attn),), {"forward": lambda self, x, **given: 0 * x})
    expected = model(image)
    subquad.optimize(model)
    assert not any(block.fused_edges or block.fused_attention for block in blocks_of(model))
    for _ in range(2):
        assert_close(model(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["vit", "dinov2"])
@pytest.mark.parametrize("batch", [1, 3])
def test_linear_attention_is_computed_with_what_is_around_it(kind, batch, monkeypatch):
    model, called = drawn(small(kind, "linear", feature_map="elu")), []
    image = torch.randn(batch, 3, 72, 64)
    expected = model(image)
    steps = subquad.optimize(model).stages[0].blocks[0].fused_attention
    for block in blocks_of(model):
        assert block.fused_attention is steps
        block.fused_attention = steps._replace(answers=lambda *given: called.append(True) or steps.answers(*given))
    with torch.no_grad():
        assert_close(model(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        assert len(called) == len(blocks_of(model))
        with use_backend("eager"):
            assert_close(model(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert len(called) == len(blocks_of(model))


@pytest.mark.parametrize("attention", sorted(subquad.ATTENTION))
def test_any_mechanism_has_its_norm_and_projections_in_two_steps(attention):
    without = {"class_token": False} if attention == "circulant" else {}
    model, image = drawn(small("vit", attention, **without)), torch.randn(2, 3, 64, 64)
    exact = copy.deepcopy(model).double().forward_features(image.double())
    plain = copy.deepcopy(model).bfloat16().forward_features(image.bfloat16()).double()
    called = []
    for block in blocks_of(subquad.optimize(model, torch.bfloat16)):
        edges, block.fused_attention = block.fused_edges, None
        block.fused_edges = lambda *given, edges=edges: called.append(edges(*given)) or called[-1]
    got = model.forward_features(image.bfloat16()).double()
    assert len(called) == len(blocks_of(model)) and not any(found is None for found in called)
    assert (got - exact).norm() <= 1.25 * (plain - exact).norm()
    with use_backend("eager"):
        model(image.bfloat16())
    assert called[-1] is None
    for _ in range(2):
        model.float()(image)
    assert called[-1] is not None


def test_what_listens_around_a_mechanism_is_called():
    model, image, seen = drawn(small("vit", "agent")), torch.randn(1, 3, 64, 64), []
    for place, block in enumerate(blocks_of(model)):
        listened = (block.attn.qkv, block.norm1, block.attn)[place]
        listened.register_forward_hook(lambda *_, place=place: seen.append(place))
    blocks_of(subquad.optimize(model))[0].attn.inner.register_forward_hook(lambda *_: seen.append("inner"))
    model(image)
    assert seen == [0, "inner", 1, 2]
    assert not any(block.fused_edges for block in blocks_of(model))
    inner = drawn(small("vit", "agent"))
    blocks_of(inner)[1].attn.inner.register_forward_hook(lambda *_: seen.append("mixed"))
    subquad.optimize(inner)(image)
    assert all(block.fused_edges for block in blocks_of(inner)) and seen[-1] == "mixed"
    for times in range(2, 5):
        inner(image)
        assert seen.count("mixed") == times
    # one who comes later, and one who listens to everything
    later = subquad.optimize(drawn(small("vit", "agent")))
    later(image)
    handles = [blocks_of(later)[0].attn.inner.register_forward_hook(lambda *_: seen.append("later"))]
    for times in range(1, 4):
        later(image)
        assert seen.count("later") == times
    for handle in handles:
        handle.remove()
    for _ in range(2):
        later(image)
    handles = [torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))]
    try:
        later(image)
        assert all(block.attn.inner in seen for block in blocks_of(later))
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kind", ["vit", "pvt_v2", "swin", "mllanet"])
@torch.no_grad()
def test_who_listens_to_what_drops_branches_hears_both(kind):
    model, heard = subquad.optimize(drawn(small(kind, "linear")), torch.bfloat16), []
    for block in blocks_of(model):
        block.drop_path.register_forward_hook(lambda *given: heard.append(True))
    for _ in range(2):
        model(torch.randn(1, 3, 64, 64).bfloat16())
    assert len(heard) == 4 * len(blocks_of(model))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("attention", ["linear", "agent"])
@pytest.mark.parametrize("kind", ["vit", "pvt_v2", "swin", "cswin"])
def test_who_listens_to_gradients_or_to_all_modules_hears_every_step(kind, attention):
    model, image = drawn(small(kind, attention)).requires_grad_(False), torch.randn(1, 3, 32, 32, requires_grad=True)
    fast = subquad.optimize(copy.deepcopy(model))
    fast(image)
    for listens in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        assert heard_of(fast, image, listens) == heard_of(model, image, listens)
    assert heard_of(fast, image) == heard_of(model, image)


def heard_of(model, image, listens=None):
    """How often somebody hears of each module, by name: of its gradients, or of its call as whoever listens to all."""
    heard, names = [], {module: name for name, module in model.named_modules()}
    if listens is None:
        every = torch.nn.modules.module.register_module_forward_hook
        handles = [every(lambda module, *given: heard.append(names[module]))]
    else:
        handles = [listens(module, lambda module, *given: heard.append(names[module])) for module in names]
    try:
        model(image).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return sorted(heard)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("kind", SMALL)
def test_what_drops_elements_may_go_on_in_evaluation(kind, attention):
    """As Monte Carlo dropout asks for: dropouts alone are in training."""
    model, image = drawn(small(kind, attention, drop_rate=0.3, drop_path_rate=0.3)), torch.randn(2, 3, 32, 32)
    fast = subquad.optimize(copy.deepcopy(model))
    fast(image)
    answers = []
    for network in (model, fast):
        for module in (part for block in blocks_of(network) for part in block.modules()):
            if isinstance(module, (nn.Dropout, DropPath)):
                module.train()
        torch.manual_seed(1)
        answers.append([network(image), network(image)])
    assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4 * answers[0][0].abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("place", ["mlp.drop1", "mlp.drop2", "drop_path"])
@pytest.mark.parametrize("kind", ["vit", "pvt_v2"])
def test_what_stands_in_the_place_of_what_drops_is_called(kind, place):
    model, image = drawn(small(kind, "linear")), torch.randn(1, 3, 32, 32)
    fast = subquad.optimize(copy.deepcopy(model))
    fast(image)
    for network in (model, fast):
        for block in blocks_of(network):
            block.set_submodule(place, nn.Softsign().eval())
    expected = model(image)
    for _ in range(2):
        assert_close(fast(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_what_is_not_linear_attention_alone_goes_its_steps():
    for changes in ({"local": True}, {"attn_norm": True}, {"attention": "inline"}):
        model = subquad.optimize(small("vit", changes.pop("attention", "linear"), **changes))
        assert not any(block.fused_attention for block in blocks_of(model))

    class Own(nn.Linear):
        pass

    others = small("vit", "linear")
    blocks_of(others)[0].attn.qkv = Own(24, 72)
    blocks_of(others)[1].attn.inner.__class__ = type("Mine", (LinearAttention,), {})
    subquad.optimize(others)
    assert [block.fused_attention is not None for block in blocks_of(others)] == [False, False, True]
    heard = small("vit", "linear")
    blocks_of(heard)[1].attn.proj.register_forward_hook(lambda *_: None)
    subquad.optimize(heard)
    assert [block.fused_attention is not None for block in blocks_of(heard)] == [True, False, True]


def test_an_optimized_network_in_bf16_is_as_good_as_bf16_is():
    model, image = drawn(small("dinov2", "inline")), torch.randn(2, 3, 64, 64)
    assert isinstance(blocks_of(model)[0].ls2, LayerScale)
    exact = copy.deepcopy(model).double()(image.double())
    plain = copy.deepcopy(model).bfloat16()(image.bfloat16()).double()
    got = subquad.optimize(model, torch.bfloat16)(image.bfloat16())
    assert got.dtype == torch.bfloat16 and not got.requires_grad
    assert (got.double() - exact).norm() <= 1.25 * (plain - exact).norm()


SEES_MAP = ["pvt_v2", "mavit", "hvit3", "mllanet"]


@pytest.mark.parametrize("kind", SEES_MAP)
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@torch.inference_mode()
def test_blocks_that_see_the_map_are_steps_of_the_library(kind, attention):
    model, image = drawn(small(kind, attention)), torch.randn(8, 3, 72, 64)
    exact = copy.deepcopy(model).double().forward_features(image.double())
    plain = copy.deepcopy(model).bfloat16().forward_features(image.bfloat16()).double()
    blocks, given = blocks_of(subquad.optimize(model, torch.bfloat16)), []
    for block in blocks:
        block.fused = lambda *now, fused=block.fused: given.append(fused(*now)) or given[-1]
    for _ in range(2):
        got = model.forward_features(image.bfloat16()).double()
        assert (got - exact).norm() <= 1.25 * (plain - exact).norm()
    if not kernels.unavailable("native"):
        assert len(given) >= len(blocks) and not any(one is None for one in given)
    with use_backend("eager"):
        got = model.forward_features(image.bfloat16()).double()
    assert (got - exact).norm() <= 1.25 * (plain - exact).norm()


@pytest.mark.parametrize("kind", SEES_MAP)
@pytest.mark.parametrize("attention", subquad.ATTENTION)
@torch.inference_mode()
def test_blocks_that_see_the_map_give_what_they_gave_around_any_mechanism(kind, attention):
    model, image = drawn(small(kind, attention)), torch.randn(2, 3, 72, 64)
    expected = copy.deepcopy(model).double().forward_features(image.double())
    subquad.optimize(model)
    for _ in range(2):
        got = model.forward_features(image).double()
        assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", SEES_MAP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_what_sees_the_map_and_is_listened_to_is_called(kind, dtype):
    model, image, seen = drawn(small(kind, "linear")).to(dtype), torch.randn(1, 3, 64, 64).to(dtype), []
    expected = model(image)
    convolutions = [module for module in model.stages.modules() if getattr(module, "groups", 1) > 1]
    convolutions = [conv for conv in convolutions if conv.stride == (1, 1)]
    for conv in convolutions:
        conv.register_forward_hook(lambda conv, *_: seen.append(conv))
    subquad.optimize(model)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for times in (1, 2):
        assert_close(model(image), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
        assert all(seen.count(conv) == times for conv in convolutions) and convolutions


def test_projections_without_biases_go_their_steps():
    model, image = drawn(small("vit", "linear")), torch.randn(1, 3, 64, 64)
    mlps = [block.mlp for block in blocks_of(model)]
    mlps[0].fc1.bias, mlps[1].fc2.bias = None, None
    expected = model(image)
    subquad.optimize(model)
    assert [block.fused is not None for block in blocks_of(model)] == [False, False, True]
    assert_close(model(image), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_what_is_between_is_kept_for_each_thread_unless_it_is_large():
    room = tape._room_of(1000)
    assert tape._room_of(500) is room and tape._room_of(room.numel() + 1) is not room
    with ThreadPoolExecutor(1) as others:
        assert others.submit(tape._room_of, 500).result().data_ptr() != tape._room_of(500).data_ptr()
    kept = tape._room_of(500)
    assert tape._room_of(tape._MOST_KEPT + 1) is not kept and tape._room_of(500) is kept


def test_training_and_autocast_take_the_single_steps(monkeypatch):
    model, image = drawn(small("vit", "linear", drop_rate=0.5)), torch.randn(2, 3, 64, 64)
    expected = model(image)
    subquad.optimize(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(image).float(), expected, rtol=0.1, atol=0.05)
    model.train()
    assert not torch.equal(model(image), model(image))


def test_what_somebody_listens_to_is_computed():
    model, image, seen = drawn(small("vit", "linear")), torch.randn(1, 3, 64, 64), []
    blocks_of(model)[1].mlp.act.register_forward_hook(lambda *_: seen.append(True))
    subquad.optimize(model)(image)
    assert [block.fused is not None for block in blocks_of(model)] == [True, False, True] and seen == [True]


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(torch.int8, r"torch\.int8"), ("bf16", "'bf16'"), (torch.float8_e4m3fn, r"torch\.float8_e4m3fn")],
)
def test_a_dtype_that_no_network_computes_in_is_refused(dtype, named):
    model = small("vit").train()
    with pytest.raises(SubquadError, match=f"torch.float16, not in {named}"):
        subquad.optimize(model, dtype)
    assert model.training and all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_what_is_no_network_is_not_made_ready():
    for wrong in (None, "deit_tiny", torch.nn.Linear, {}):
        with pytest.raises(SubquadError, match=r"is no network: subquad\.create_model") as caught:
            subquad.optimize(wrong)
        assert "\n" not in str(caught.value)


def _added_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


def _added_behind_the_back_of_versions(model):
    for parameter in model.parameters():
        parameter.data.add_(0.1)


def _moved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1


def _replaced(model):
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() + 0.1, requires_grad=False))


def _loaded(model):
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})


def _assigned(model):
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()}, assign=True)


def _turned(model):
    for block in blocks_of(model):
        block.attn.proj.weight.data = block.attn.proj.weight.data.mT


def _cut(model):
    for block in blocks_of(model):
        mlp = block.mlp
        mlp.fc1.weight.data, mlp.fc1.bias.data = mlp.fc1.weight.data[:20], mlp.fc1.bias.data[:20]
        mlp.fc2.weight.data = mlp.fc2.weight.data[:, :20]


def _with_another_eps(model):
    for block in blocks_of(model):
        block.norm1.eps = block.norm2.eps = 1.0


IN_PLACE = [_added_in_place, _added_behind_the_back_of_versions]
CHANGES = [*IN_PLACE, _moved, _replaced, _loaded, _assigned, _turned, _cut, _with_another_eps]
AGAIN = [("linear", torch.float32), *((name, torch.bfloat16) for name in ("linear", "softmax", "agent", "inline"))]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("attention", "dtype"), AGAIN)
@torch.inference_mode()
def test_what_is_made_again_sees_every_change_of_its_parameters(attention, dtype, change):
    model, image = drawn(small("vit", attention)), torch.randn(1, 3, 64, 64).to(dtype)
    subquad.optimize(model, dtype=dtype)
    # listened to, and made again
    before = [model(image) for _ in range(2)][-1]
    # what was listened to is given away with nothing: copies have parameters of their own
    copied = copy.deepcopy(model)
    change(model)
    expected = copy.deepcopy(model)(image)
    for _ in range(4):
        changed = model(image)
        assert_close(changed, expected, rtol=0, atol=0)
    assert (changed - before).abs().max() > 0
    assert_close(copied(image), before, rtol=0, atol=0)


@pytest.mark.skipif(bool(kernels.unavailable("native")), reason="no kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", subquad.ATTENTION)
@torch.inference_mode()
def test_a_block_of_kernels_is_one_call_from_the_second_time_on(attention, dtype, monkeypatch):
    model = subquad.optimize(drawn(small("vit", attention)), dtype=dtype)
    images, chosen, choose = [torch.randn(n, 3, 64, 64).to(dtype) for n in (1, 2)], [], choosing.choose

    def noting(operator, *arguments, **keywords):
        if operator is not kernels.patch_tokens:
            chosen.append(operator.name)
        return choose(operator, *arguments, **keywords)

    monkeypatch.setattr(choosing, "choose", noting)
    first = model(images[0])
    steps = len(chosen)
    assert steps >= 3 * len(blocks_of(model))
    for _ in range(3):
        assert_close(model(images[0]), first, rtol=0, atol=0)
    assert len(chosen) == steps
    model(images[1])
    assert len(chosen) == 2 * steps


@pytest.mark.skipif(bool(kernels.unavailable("native")), reason="no kernels here")
@torch.inference_mode()
def test_several_threads_may_make_the_same_calls_again():
    model = subquad.optimize(drawn(small("vit", "agent")), torch.bfloat16)
    images = torch.randn(8, 1, 3, 64, 64).bfloat16()
    expected = [copy.deepcopy(model)(image) for image in images]

    def answers(number):
        with torch.inference_mode():
            return [model(images[number]) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for number, results in enumerate(pool.map(answers, range(len(images)))):
            for result in results:
                assert_close(result, expected[number], rtol=0, atol=0)


@pytest.mark.skipif(bool(kernels.unavailable("native")), reason="no kernels here")
def test_several_threads_may_come_when_weights_have_changed():
    model, image = subquad.optimize(drawn(small("vit", "linear"))), torch.randn(1, 3, 64, 64)
    gate = Barrier(4)

    def answer(number):
        gate.wait()
        return model(image)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(12):
            expected = model(image)
            model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
            for result in pool.map(answer, range(4)):
                assert_close(result, expected, rtol=0, atol=0)


@torch.inference_mode()
def test_what_changes_again_and_again_is_not_listened_to_again_and_again():
    model, image = subquad.optimize(drawn(small("vit", "linear"))), torch.randn(1, 3, 64, 64)
    recorders, known = [], copy.deepcopy(model)
    for number in range(3 * replaying.MOST):
        for block in [*blocks_of(model), *blocks_of(known)]:
            block.norm1.eps = 1e-6 * (1 + number)
        expected = copy.deepcopy(known)(image)
        with substituted(replaying, "Recorder", lambda *given: recorders.append(given) or tape.Recorder(*given)):
            assert_close(model(image), expected, rtol=0, atol=0)
    # of whole blocks first, then of their halves
    assert len(recorders) == 2 * replaying.MOST * len(blocks_of(model))


@torch.inference_mode()
def test_sizes_that_never_come_again_are_listened_to_some_times():
    model = subquad.optimize(drawn(small("vit", "linear")))
    for width in range(64, 64 + 16 * 2 * replaying.MOST, 16):
        model(torch.randn(1, 3, 32, width))
    found = [known for block in blocks_of(model) for known in replaying.tapes_of(block).values()]
    assert all(len(known.tapes) == replaying.MOST for known in found if any(known.tapes.values()))


@torch.no_grad()
def test_what_is_made_again_holds_for_what_was_listened_to(tmp_path):
    model = subquad.optimize(drawn(small("vit", "linear")))
    images = [torch.randn(shape) for shape in ((1, 3, 64, 64), (3, 3, 64, 64), (1, 3, 96, 64))]
    expected = [copy.deepcopy(model)(image) for image in images]
    for _ in range(4):
        for image, one in zip(images, expected, strict=True):
            assert_close(model(image), one, rtol=0, atol=0)
    with use_backend("eager"):
        plain = model(images[0])
    assert_close(plain, expected[0], rtol=1e-4, atol=1e-4)
    model(images[0])
    with torch.enable_grad():
        # of the very shape that was listened to last
        image = images[0].clone().requires_grad_()
        model(image).sum().backward()
        assert image.grad.abs().max() > 0
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_close(again(images[0]), expected[0], rtol=0, atol=0)


EMBEDDED = {
    "deit_tiny": {},
    "without positions": {"pos_embed": "none"},
    "positions of patches": {"pos_embed": "patches", "reg_tokens": 3},
    "no prefix": {"class_token": False},
    "patches of 14": {"patch_size": 14, "in_chans": 2},
}


@pytest.mark.parametrize("size", [(224, 224), (96, 160), (100, 90), (512, 544)])
@pytest.mark.parametrize("settings", EMBEDDED.values(), ids=EMBEDDED)
@torch.inference_mode()
def test_patches_become_tokens_in_one_step(settings, size):
    stage = drawn(subquad.create_model("deit_tiny", attention="linear", depth=1, **settings)).stages[0]
    images = torch.randn(2, settings.get("in_chans", 3), *size)
    expected, grid = copy.deepcopy(stage).double().tokens_of(images.double())
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        optimized = subquad.optimize(copy.deepcopy(stage), dtype)
        assert optimized.fused_embed is not None
        tokens, found = optimized.tokens_of(images.to(dtype))
        assert found == grid
        assert_close(tokens.double(), expected, rtol=0, atol=most * expected.abs().max().item())


@pytest.mark.skipif(bool(kernels.unavailable("native")), reason="no kernels here")
@torch.inference_mode()
def test_patches_are_not_one_step_where_somebody_listens_or_they_are_no_plain_ones():
    heard = subquad.create_model("deit_tiny", attention="linear", depth=1)
    heard.stages[0].embed.proj.register_forward_hook(lambda *_: None)
    with_margin = subquad.create_model("deit_tiny", attention="linear", depth=1, image_margin=8)
    for model in (heard, with_margin):
        assert subquad.optimize(model).stages[0].fused_embed is None
    plain = subquad.optimize(subquad.create_model("deit_tiny", attention="linear", depth=1), torch.bfloat16)
    seen, image = [], torch.randn(1, 3, 224, 224).bfloat16()
    convolve = torch.nn.functional.conv2d
    with substituted(torch.nn.functional, "conv2d", lambda *given, **more: seen.append(1) or convolve(*given, **more)):
        plain(image)
        assert not seen
        with use_backend("eager"):
            plain(image)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", SMALL)
@torch.inference_mode()
def test_images_of_another_dtype_are_refused_in_one_line(kind):
    model, image = subquad.optimize(small(kind, "linear"), torch.bfloat16), torch.randn(1, 3, 64, 64)
    for call in (model, model.forward_features):
        with pytest.raises(
            SubquadError, match=r"computes in bfloat16 and was given float32: .*images.to\(torch.bfloat16"
        ):
            call(image)
    assert model(image.bfloat16()).dtype == torch.bfloat16
    assert model.float()(image).dtype == torch.float32


@torch.inference_mode()
def test_what_was_listened_to_goes_with_its_network():
    model = subquad.optimize(small("vit", "linear"))
    for _ in range(3):
        model(torch.randn(1, 3, 64, 64))
    alive = weakref.ref(blocks_of(model)[0])
    del model
    gc.collect()
    assert alive() is None


@torch.no_grad()
def test_autocast_decides_on_what_is_made_again():
    model, image = subquad.optimize(drawn(small("vit", "agent"))), torch.randn(1, 3, 64, 64)
    plain = [model(image) for _ in range(2)][-1]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(image).dtype == torch.bfloat16
    assert_close(model(image), plain, rtol=0, atol=0)


def test_parameters_that_learn_again_have_gradients():
    model, image = subquad.optimize(drawn(small("vit", "linear"))), torch.randn(1, 3, 64, 64)
    for _ in range(3):
        model(image)
    model.requires_grad_(True)
    model(image).sum().backward()
    assert all(block.mlp.fc1.weight.grad.abs().max() > 0 for block in blocks_of(model))


@pytest.mark.parametrize("listened", [0, 1, 2])
@torch.inference_mode()
def test_tokens_that_lie_within_others_are_read_where_they_lie(listened):
    block = blocks_of(subquad.optimize(drawn(small("vit", "linear")), torch.bfloat16))[0]
    grid = small("vit", "linear").stages[0].grid
    images = torch.randn(3, grid.num_tokens, block.norm1.normalized_shape[0]).bfloat16()
    expected = [copy.deepcopy(block)(image[None].clone(), grid=grid) for image in images]
    for place in (listened, 0, 1, 2):
        assert_close(block(images[place : place + 1], grid=grid), expected[place], rtol=0, atol=0)
