"""Attention layers of anybody's classes with rotary positions: their own code tells how they turn, numbers prove it."""

import copy
import pickle

import pytest
import torch
from foreign import difference
from foreign_own import Timms
from foreign_turning import (
    TURNING,
    WIDTH,
    Attn,
    PositionsHanded,
    TablesHanded,
    TurningNetwork,
    Within,
    turning,
)
from torch import nn
from torch.nn import functional as F

import subquad
from subquad import SubquadError
from subquad.exports import open_exported

SIZES = dict.fromkeys(("one table", "reads weights"), ((32, 32),))


@pytest.mark.parametrize("name", TURNING)
def test_with_softmax_it_is_the_teacher_at_every_size_and_comes_back_to_the_bit(name):
    teacher = turning(name)
    student = subquad.convert(copy.deepcopy(teacher), "softmax")
    for size in SIZES.get(name, ((32, 32), (48, 24))):
        images = torch.randn(2, 3, *size)
        assert difference(student(images), teacher(images)) < 1e-6
        assert difference(student(images[:1]), teacher(images[:1])) < 1e-6
    assert torch.equal(subquad.restore(student)(images), teacher(images))


@pytest.mark.parametrize("name", TURNING)
def test_every_kind_takes_mechanisms_that_read_maps_and_is_copied_and_learns(name):
    student = subquad.convert(turning(name), "agent")
    images = torch.randn(2, 3, 32, 32)
    answers = student(images)
    for again in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(again(images), answers)
    student.train()(images).sum().backward()
    assert all(one.grad is not None for one in student.parameters())


@pytest.mark.parametrize("ending", ["pt2", pytest.param("onnx", marks=pytest.mark.long)])
def test_a_file_of_its_program_takes_images_of_any_size(ending, tmp_path):
    teacher = turning("positions")
    del teacher.blocks[1:]
    student = subquad.convert(teacher, "linear")
    subquad.export(student, tmp_path / f"any.{ending}", format=ending, dynamic="batch,size")
    program = open_exported(tmp_path / f"any.{ending}")
    images = torch.randn(3, 3, 48, 24)
    assert difference(program(images), student(images)) < 1e-5


def test_where_code_can_not_be_written_down_compiled_networks_run_it_as_it_is():
    student = subquad.convert(turning("tables"), "linear").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert difference(torch.compile(student, backend="eager")(images), student(images)) < 1e-6


@pytest.mark.parametrize(("name", "dtype"), [("within", torch.float64), ("positions", torch.bfloat16)])
def test_it_computes_in_any_precision(name, dtype):
    teacher = turning(name).to(dtype)
    images = torch.randn(2, 3, 48, 24, dtype=dtype)
    student = subquad.convert(teacher, "softmax")
    assert difference(student(images), teacher(images)) < (1e-12 if dtype == torch.float64 else 0.05)


def test_it_computes_without_numbers_and_where_products_are_lowered():
    student = subquad.convert(turning("positions"), "linear")
    images = torch.randn(2, 3, 32, 32)
    answers = student(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(student(images).float(), answers) < 0.05
    one_by_one = torch.func.vmap(lambda image: student(image[None])[0])
    assert difference(one_by_one(images), answers) < 1e-5
    assert student.to("meta")(images.to("meta")).shape == answers.shape


def test_who_listens_to_a_layer_hears_its_calls_alone():
    student, heard = subquad.convert(turning("positions"), "softmax"), []
    student.blocks[0].attn.register_forward_pre_hook(lambda layer, arguments: heard.append(arguments[0].shape))
    student(torch.randn(2, 3, 32, 32))
    assert heard == [(2, 17, 48)]


def test_hooks_on_parts_that_hear_nothing_or_numbers_of_ours_are_refused():
    teacher = turning("positions")
    attn = teacher.blocks[0].attn
    for part, said in ((attn.attn_drop, "listens to the attn_drop of a"), (attn.rope, "listens to the rope of a")):
        handle = part.register_forward_hook(lambda *_: None)
        with pytest.raises(SubquadError, match=said):
            subquad.convert(teacher, "softmax")
        handle.remove()
    images = torch.randn(2, 3, 32, 32)
    assert difference(subquad.convert(teacher, "softmax")(images), teacher(images)) < 1e-6


def test_layers_that_are_not_called_are_said_to_be_so():
    teacher = turning("within")
    spare = turning("within").blocks[0]
    teacher.spare = nn.ModuleList([spare])
    with pytest.raises(SubquadError, match=r"spare\.0\.attn: .* its network does not call it for images"):
        subquad.convert(teacher, "softmax", blocks=[2])


def test_what_code_sets_on_the_layer_it_does_not_set_there():
    teacher = turning("within")
    student = subquad.convert(teacher, "softmax")
    student(torch.randn(1, 3, 48, 24))
    assert all(not hasattr(one.attn, "last") for network in (teacher, student) for one in network.blocks)


def test_frequencies_that_a_network_learns_are_learned_on():
    teacher, student = turning("complex"), subquad.convert(turning("complex"), "softmax")
    images = torch.randn(2, 3, 32, 32)
    for network in (teacher, student):
        network(images).square().sum().backward()
    assert difference(student.freqs.grad, teacher.freqs.grad) < 1e-5


def test_heads_that_turn_alike_at_first_may_learn_to_differ():
    teacher, images = turning("complex"), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        teacher.freqs.copy_(teacher.freqs[:, :1].expand_as(teacher.freqs))
        student = subquad.convert(teacher, "softmax")
        for network in (teacher, student):
            network.freqs[:, 0] += 1
        assert difference(student(images), teacher(images)) < 1e-6


def test_of_what_does_not_turn_yet_nobody_knows_how_it_would():
    teacher = turning("complex")
    with torch.no_grad():
        teacher.freqs.zero_()
    with pytest.raises(SubquadError, match=r"blocks\.0\.attn: a ComplexNumbers computes something else"):
        subquad.convert(teacher, "softmax")


def test_frequencies_of_a_layer_itself_are_learned_on_as_well():
    teacher, images = turning("learned"), torch.randn(2, 3, 32, 32)
    student = subquad.convert(teacher, "softmax")
    for network in (teacher, student):
        network(images).square().sum().backward()
    assert difference(student.blocks[0].attn.freqs.grad, teacher.blocks[0].attn.freqs.grad) < 1e-5


class Biased(Attn):
    """What is handed over is added to scores."""

    def forward(self, x, rope=None):
        q, k, v = self.heads(x)
        bias = F.pad(rope[0].sum(dim=-1), (1, 0))
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class ValuesToo(Attn):
    """Values are turned as well."""

    def forward(self, x, pos):
        return self.mixed(*(PositionsHanded().rope(heads, pos) for heads in self.heads(x)))


class NormedBehind(TablesHanded):
    """Queries and keys have a norm behind their rotation."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def mixed(self, q, k, v):
        return super().mixed(self.q_norm(q), self.k_norm(k), v)


@pytest.mark.parametrize(
    ("layer", "kind"), [(Biased, TablesHanded), (ValuesToo, PositionsHanded), (NormedBehind, TablesHanded)]
)
def test_what_computes_something_else_is_not_taken_for_it(layer, kind):
    with pytest.raises(SubquadError, match=f"blocks.0.attn: a {layer.__name__} computes something else than softmax"):
        subquad.convert(TurningNetwork(layer, kind), "softmax")


class Unasked(Timms):
    """Takes positions that nobody hands over."""

    def forward(self, x, pos=None):
        assert pos is None
        return super().forward(x)


class Asking(TurningNetwork):
    def forward(self, images, prompt):
        return super().forward(images + prompt)


def test_networks_that_want_more_than_images_are_refused_as_nothing_is_seen_of_their_calls():
    with pytest.raises(SubquadError, match=r"blocks.0.attn: what a Within is handed .* 'prompt'.*register"):
        subquad.convert(Asking(Within), "softmax")


def test_networks_that_want_more_than_images_are_told_what_a_call_brings():
    teacher = Asking(Within).eval()
    student = subquad.convert(teacher, "softmax", given={"images": torch.randn(1, 3, 32, 32), "prompt": 1.0})
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        assert difference(student(images, 2.0), teacher(images, 2.0)) < 1e-6


def test_layers_that_are_plain_where_nothing_is_handed_over_need_no_call():
    teacher = Asking(Unasked).eval()
    images = torch.randn(2, 3, 32, 32)
    assert difference(subquad.convert(teacher, "softmax")(images, 1.0), teacher(images, 1.0)) < 1e-6


def test_calls_that_bring_something_else_than_the_network_did_are_refused():
    student = subquad.convert(turning("tables"), "softmax")
    student.beside = lambda *_: ((), {})
    with pytest.raises(SubquadError, match="called with nothing beside tokens, and was with rope when"):
        student(torch.randn(1, 3, 32, 32))


def test_positions_that_differ_from_image_to_image_are_refused():
    student = subquad.convert(turning("positions"), "softmax")
    images = torch.randn(2, 3, 32, 32)
    usual = student.beside
    student.beside = lambda *sizes: ((usual(*sizes)[0][0] * torch.tensor([1, 2])[:, None, None],), {})
    with pytest.raises(SubquadError, match="batch of 2 images are turned by positions that differ"):
        student(images)


def test_positions_that_nobody_hands_over_are_no_matter():
    teacher = TurningNetwork(Unasked).eval()
    student = subquad.convert(teacher, "softmax")
    images = torch.randn(2, 3, 48, 24)
    assert difference(student(images), teacher(images)) < 1e-6
    student.beside = lambda *_: ((), {"pos": images})
    with pytest.raises(SubquadError, match="called with pos beside tokens"):
        student(images)


@pytest.mark.parametrize("name", ["complex", "one table"])
def test_it_is_aligned_and_kept(name, tmp_path):
    teacher = turning(name)
    student = subquad.convert(copy.deepcopy(teacher), "focused")
    images = torch.randn(8, 3, 32, 32)
    done = subquad.conversion.align(student, images, teacher=teacher, updates=10, batch_size=4)
    assert done.after[0] < done.before[0]
    subquad.conversion.save_converted(student, tmp_path / "delta.safetensors")
    again = subquad.load_converted(tmp_path / "delta.safetensors", teacher)
    assert torch.equal(again(images), student(images))
    assert {key for key in student.state_dict() if ".inner." not in key} == teacher.state_dict().keys()
