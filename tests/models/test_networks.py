"""Every network of the table with every mechanism: sizes, settings, training, export, files."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hosts import without_prefix
from mechanisms import assert_refused, refuses
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad
from subquad import ATTENTION, SubquadError
from subquad.attention import AgentAttention, LinearAttention, SoftmaxAttention, traits_of
from subquad.models import HOSTS, VARIANTS

every_mechanism = pytest.mark.parametrize("attention", ATTENTION)
every_host = pytest.mark.parametrize(
    "name",
    [name for name, row in VARIANTS.items() if name.endswith(("tiny", "_b0")) and HOSTS[row.host].takes_mechanisms],
)
SMALL = {"embed_dim": 24, "num_heads": 2, "depths": (2,), "img_size": 32, "patch_size": 4, "num_classes": 5}


def small(attention="softmax", **changes):
    needed = without_prefix(attention) if isinstance(attention, str) else {}
    return subquad.create_model("deit_tiny", attention=attention, **(SMALL | needed | changes))


def test_the_example_of_the_readme():
    model = subquad.create_model("deit_tiny", attention="pola", img_size=32, patch_size=2, num_classes=10)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.thinned(5)
@pytest.mark.slow
@every_host
@every_mechanism
def test_every_host_builds_on_the_meta_device(name, attention):
    with torch.device("meta"):
        needed = without_prefix(attention) if VARIANTS[name].host == "vit" else {}
        # SOFT's network has a class token in its last stage
        if VARIANTS[name].host == "softnet" and refuses(attention, "prefix"):
            assert_refused(attention, partial(subquad.create_model, name, attention=attention), "prefix")
            return
        model = subquad.create_model(name, attention=attention, **needed)
        assert model(torch.empty(2, 3, *model.img_size)).shape == (2, 1000)


@every_mechanism
@pytest.mark.parametrize("size", [(32, 32), (32, 20), (33, 47), (64, 24), (3, 90)])
def test_images_of_any_size_go_through(attention, size):
    model = small(attention).eval()
    y = model(torch.randn(2, 3, *size))
    assert y.shape == (2, 5) and y.isfinite().all()


@every_mechanism
def test_a_network_made_for_an_oblong_image_takes_it(attention):
    model = small(attention, img_size=(24, 40)).eval()
    assert model(torch.randn(1, 3, 24, 40)).shape == (1, 5)


@pytest.mark.parametrize("reg_tokens", [0, 1, 4])
@pytest.mark.parametrize("class_token", [False, True])
@every_mechanism
def test_class_and_register_tokens_are_optional(attention, class_token, reg_tokens):
    if (class_token or reg_tokens) and refuses(attention, "prefix"):
        sizes = SMALL | {"class_token": class_token, "reg_tokens": reg_tokens}
        create = partial(subquad.create_model, "deit_tiny", attention=attention, **sizes)
        assert_refused(attention, create, "prefix")
        return
    model = small(attention, class_token=class_token, reg_tokens=reg_tokens).eval()
    y = model.forward_features(torch.randn(1, 3, 40, 32))
    prefix = class_token + reg_tokens
    assert y.shape == ((1, 80 + prefix, 24) if prefix else (1, 10, 8, 24))
    assert model.forward_head(y).shape == (1, 5)


@every_mechanism
def test_one_training_step_reaches_every_parameter(attention):
    model = small(attention, drop_path_rate=0.1, drop_rate=0.1).train()
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None]


@every_mechanism
def test_gradients_have_gradients(attention):
    model = small(attention).double()
    torch.manual_seed(0)
    x, direction = torch.randn(2, 1, 3, 16, 24, dtype=torch.float64).unbind()

    def gradient(x, **settings):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x, **settings)[0], x

    # PyTorch's fused attention has none of them
    with sdpa_kernel(SDPBackend.MATH) if attention == "softmax" else nullcontext():
        first, at = gradient(x, create_graph=True)
        (second,) = torch.autograd.grad((first * direction).sum(), at)
    ahead, behind = (gradient(x + step * direction)[0] for step in (1e-5, -1e-5))
    difference = (ahead - behind) / 2e-5
    assert (second - difference).norm() < 1e-6 * difference.norm()


@every_mechanism
def test_gradient_checkpointing_changes_memory_not_gradients(attention):
    model = small(attention)
    x = torch.randn(2, 3, 32, 32)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(), plain)


def test_attention_is_one_name_or_one_for_each_block_or_stage():
    def classes(attention, **settings):
        return [type(block.attn.inner) for block in small(attention, depths=(3,), **settings).blocks]

    assert classes("agent") == [AgentAttention] * 3
    assert classes(["agent"]) == [AgentAttention] * 3
    assert classes(["agent", "softmax", "linear"]) == [AgentAttention, SoftmaxAttention, LinearAttention]
    assert classes([("agent", 2), ("softmax", 1)]) == [AgentAttention, AgentAttention, SoftmaxAttention]
    assert classes([["agent", 2], ["softmax", 1]], num_agents=[9, 16, None]) == [
        AgentAttention,
        AgentAttention,
        SoftmaxAttention,
    ]
    with pytest.raises(SubquadError, match="2 entries for 1 stages and 3 blocks"):
        classes(["agent", "softmax"])


def test_settings_reach_the_mechanisms_that_know_them():
    model = small(["agent", "linear:feature_map=elu,local=true"], num_agents=16)
    assert model.blocks[0].attn.inner.agent_grid.shape == (4, 4)
    assert model.blocks[1].attn.inner.feature_map == "elu"
    assert model.blocks[1].attn.inner.local is not None
    per_block = small("agent", num_agents=[9, 25])
    assert [block.attn.inner.agent_grid.height for block in per_block.blocks] == [3, 5]


def test_depth_is_the_number_of_blocks_where_there_is_one_stage():
    model = subquad.create_model("deit_tiny", depth=2, embed_dim=24, img_size=32)
    assert len(model.blocks) == 2 and model.creation["depths"] == [2]
    with pytest.raises(SubquadError, match="blocks of one stage, and there are 4: give depths"):
        subquad.create_model("swin_tiny", depth=2)
    # it made one stage of three blocks
    with pytest.raises(SubquadError, match="depths has 2 entries, and deit_tiny has one stage: give depth=3"):
        subquad.create_model("deit_tiny", depths=(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "agnet"}, "unknown attention 'agnet': did you mean agent?"),
        ({"num_agent": 4, "attention": "agent"}, "did you mean num_agents?"),
        ({"num_agents": 4}, "unknown setting .*'num_agents'"),
        ({"attention": "linear:feature_mop=elu"}, "did you mean feature_map?"),
        ({"attention": "linear:elu"}, "'elu' in 'linear:elu' is no setting"),
        ({"attention": "linear:feature_map=tanh"}, "unknown feature_map 'tanh'"),
        ({"attention": "agent", "num_agents": 50}, "num_agents=50 is not a perfect square: use 49 or 64"),
        ({"num_heads": 5}, "5 heads do not divide a width of 24"),
        ({"img_size": 0}, "img_size must be a whole number of at least 1 or a list of 2 .*, got 0"),
        ({"img_size": (32, 32, 3)}, "img_size must be a whole number .*or a list of 2 whole numbers"),
        ({"depths": ()}, "every stage needs a block"),
        ({"depth": 0}, "depth must be a whole number of at least 1"),
        ({"depth": 2, "depths": (3,)}, r"depth is 2 and depths is \(3,\): give one of them"),
        ({"attention": "pola", "kernel_size": 4}, "odd kernel_size, got 4"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(arguments, message):
    with pytest.raises(SubquadError, match=message) as caught:
        small(**arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(SubquadError, match="unknown model 'deit_tinny': did you mean deit_tiny"):
        subquad.create_model("deit_tinny")


@every_mechanism
def test_a_saved_model_restores_itself_from_the_file_alone(attention, tmp_path):
    model = small(attention, img_size=(32, 24)).eval()
    subquad.save_weights(model, tmp_path / "model.safetensors", {"classes": ["a", "b"]})
    restored, note = subquad.restore_model(tmp_path / "model.safetensors")
    x = torch.randn(2, 3, 32, 24)
    assert torch.equal(restored.eval()(x), model(x))
    assert note["classes"] == ["a", "b"] and restored.creation == model.creation


def test_a_checkpoint_of_another_model_is_refused_with_the_keys_and_leaves_the_model_alone(tmp_path):
    model = small("softmax")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    subquad.save_weights(small("agent"), tmp_path / "agent.safetensors")
    with pytest.raises(SubquadError, match=r"unexpected \(stages\.0\.blocks\.0\.attn\.inner\.agent_bias") as caught:
        subquad.load_checkpoint(model, tmp_path / "agent.safetensors")
    assert "\n" not in str(caught.value)
    with pytest.raises(SubquadError, match=r"head\.bias is \(7,\), the model's \(5,\)"):
        subquad.load_checkpoint(model, small("softmax", num_classes=7).state_dict())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_weights_are_found_under_the_keys_that_trainers_use(tmp_path):
    model, other = small("agent"), small("agent")
    state = {f"module.{key}": tensor for key, tensor in model.state_dict().items()}
    torch.save({"epoch": 3, "model": {}, "state_dict_ema": state}, tmp_path / "run.pth")
    subquad.load_checkpoint(other, tmp_path / "run.pth")
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80\x02}q\x00."])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_damaged_file_is_one_line(tmp_path, content, suffix):
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(content)
    with pytest.raises(SubquadError) as caught:
        subquad.load_checkpoint(small(), path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SubquadError, match="no weight file"):
        subquad.load_checkpoint(small(), tmp_path / "missing.pth")


@pytest.mark.thinned(4)
@pytest.mark.slow
@every_mechanism
def test_the_whole_network_compiles_without_a_graph_break(attention):
    torch.compiler.reset()  # what other tests compiled would decide what is compiled here
    model = small(attention, depths=(1,)).eval()
    # for one size alone every host is compiled in test_hosts.py; gradients of the layer are traced in its contract
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for size in ((36, 28), (44, 36)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(4)
@pytest.mark.slow
@every_mechanism
def test_the_whole_network_exports_for_any_batch(attention):
    model = small(attention, depths=(1,)).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 3, 32, 32),), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [name for name, cls in ATTENTION.items() if not traits_of(cls).quadratic][:1])
def test_inductor_computes_the_same(attention):
    model = small(attention, depths=(1,)).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-3, atol=1e-4)


def test_resetting_the_classifier_keeps_device_and_dtype():
    model = small().double()
    model.reset_classifier(11)
    assert model.num_classes == 11 and model(torch.randn(1, 3, 32, 32, dtype=torch.float64)).shape == (1, 11)
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.float64)).shape == (1, 24)


def test_parameters_that_recipes_do_not_decay_exist():
    model = small(reg_tokens=2)
    assert model.no_weight_decay() <= {key for key, _ in model.named_parameters()}
