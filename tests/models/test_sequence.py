"""The sequence classifier: sizes of the literature, padding that changes no answer, and complaints."""

import pytest
import torch
from mechanisms import assert_refused, refuses

from subquad import ATTENTION, SubquadError
from subquad.tasks.sequences.sequence_network import by_length, create_sequence_model

# with softmax, as Skyformer's sizes give them
KNOWN = {
    "listops": (209_802, {"vocab_size": 32, "max_length": 2048, "num_classes": 10}),
    "pathfinder": (173_954, {"vocab_size": 512, "max_length": 1024, "num_classes": 2}),
    "retrieval": (395_138, {"vocab_size": 512, "max_length": 4096, "num_classes": 2, "pairs": True}),
    "text": (370_562, {"vocab_size": 512, "max_length": 4096, "num_classes": 2}),
    "image": (158_602, {"vocab_size": 256, "max_length": 1024, "num_classes": 10}),
}


HONOUR_PADDING = [name for name in ATTENTION if not refuses(name, "padding")]


@pytest.mark.parametrize("attention", sorted(ATTENTION.keys() - set(HONOUR_PADDING)))
def test_sequences_with_padding_are_refused_in_one_line_where_a_mechanism_can_not_honour_it(attention):
    model, tokens = small(attention), torch.randint(1, 20, (3, 23))
    with torch.no_grad():
        assert torch.equal(model(tokens), model(torch.nn.functional.pad(tokens, (0, 9))))
        tokens[0, 9:] = 0
        assert_refused(attention, lambda: model(tokens), "padding")


def small(attention, **settings):
    torch.manual_seed(0)
    model = create_sequence_model(attention, vocab_size=20, max_length=60, num_classes=3, embed_dim=32, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval().double()


@pytest.mark.parametrize("task", KNOWN)
def test_the_usual_networks_have_the_known_number_of_parameters(task):
    known, sizes = KNOWN[task]
    assert sum(p.numel() for p in create_sequence_model("softmax", **sizes).parameters()) == known


@pytest.mark.parametrize("attention", HONOUR_PADDING)
def test_padding_changes_no_answer(attention):
    model = small(attention)
    tokens = torch.randint(1, 20, (3, 23))
    tokens[0, 9:] = 0
    with torch.no_grad():
        alone = torch.cat([model(tokens[:1, :9]), model(tokens[1:])])
        assert torch.allclose(model(tokens), alone, atol=1e-12)
        for longer in (40, 60, 75):
            padded = torch.nn.functional.pad(tokens, (0, longer - 23))
            assert torch.allclose(model(padded), alone, atol=1e-12)
        padded = torch.nn.functional.pad(tokens, (0, 37))
        # what stands where the padding is does not matter either: the embedding of 0 is never seen
        model.embed.weight[0] += 10
        assert torch.allclose(model(padded), alone, atol=1e-12)


def test_sequences_of_like_length_are_computed_together_and_up_to_the_longest_of_them():
    lengths = torch.tensor([700, 30, 0, 1900, 40, 650, 1, 690])
    tokens = (torch.arange(2000) < lengths[:, None]).long() * torch.randint(1, 9, (8, 2000))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        order, groups = by_length(tokens)
    finally:
        torch.set_num_threads(threads)
    assert [tuple(group.shape) for group in groups] == [(2, 1), (2, 40), (2, 690), (2, 1900)]
    assert lengths[order].tolist() == sorted(lengths.tolist())
    for row, place in zip([row for group in groups for row in group], order, strict=True):
        assert torch.equal(row[row != 0], tokens[place][: lengths[place]])


@pytest.mark.parametrize("attention", HONOUR_PADDING)
def test_a_batch_of_groups_is_answered_in_its_order(attention):
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "max_length": 3000, "num_classes": 3, "embed_dim": 16}
    model = create_sequence_model(attention, **sizes).eval().double()
    tokens = torch.randint(1, 9, (2 * torch.get_num_threads() + 3, 3000))
    tokens[:-1] *= torch.arange(3000) < 7
    # sorted, the first three change places in a ring: putting them back is not sorting them again
    tokens[1] *= torch.arange(3000) < 3
    tokens[2] *= torch.arange(3000) < 5
    with torch.no_grad():
        alone = torch.cat([model(one[None]) for one in tokens])
        assert torch.allclose(model(tokens), alone, atol=1e-12)


@pytest.mark.parametrize("attention", ATTENTION)
def test_pairs_are_read_by_one_network(attention):
    model = small(attention, pairs=True)
    tokens = torch.randint(1, 20, (2, 2, 30))
    if attention in HONOUR_PADDING:
        tokens[0, 1, 11:] = 0
    with torch.no_grad():
        u, v = model.encode(tokens[:, 0]), model.encode(tokens[:, 1])
        assert torch.allclose(model(tokens), model.head(torch.cat([u, v, u * v, u - v], -1)))


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_parameter_but_unused_taps_gets_a_gradient(attention):
    model = small(attention).train()
    model(torch.randint(1, 20, (2, 50))).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def test_an_empty_sequence_has_an_answer():
    with torch.no_grad():
        assert small("linear")(torch.zeros(1, 5, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("attention", HONOUR_PADDING)
def test_of_no_sequences_there_are_no_answers(attention, pairs):
    tokens = torch.ones(0, *[2] * pairs, 9, dtype=torch.long)
    assert small(attention, pairs=pairs)(tokens).shape == (0, 3)


@pytest.mark.parametrize(
    ("tokens", "pairs", "message"),
    [
        (torch.ones(2, 3, 9, dtype=torch.long), True, r"pairs of sequences \(b, 2, n\), got shape \(2, 3, 9\)"),
        (torch.ones(2, 9), False, r"int64 or int32, got float32: hand over tokens.long\(\)"),
        (torch.ones(2, 9, dtype=torch.bool), False, "int64 or int32, got bool"),
        (torch.full((2, 9), 20), False, "from 0, which is padding, to 19, got 20"),
        (torch.full((2, 9), -1), False, "to 19, got -1"),
    ],
)
def test_what_are_no_tokens_of_the_network_is_refused_in_one_line(tokens, pairs, message):
    with pytest.raises(SubquadError, match=message) as caught:
        small("linear", pairs=pairs)(tokens)
    assert "\n" not in str(caught.value)


def test_complaints_name_the_numbers():
    model = small("linear")
    with pytest.raises(SubquadError, match="61 tokens, the network is made for 60"):
        model(torch.ones(1, 61, dtype=torch.long))
    with pytest.raises(SubquadError, match="expected sequences"):
        model(torch.ones(1, 2, 7, dtype=torch.long))
    with pytest.raises(SubquadError, match="unknown attention 'sofmax'"):
        small("sofmax")
    with pytest.raises(SubquadError, match="num_agent"):
        small("agent", num_agent=3)
    with pytest.raises(SubquadError, match="max_length must be a whole number of at least 1"):
        create_sequence_model("linear", vocab_size=2, max_length=0, num_classes=2)


@torch.no_grad()
def test_compiled_networks_cut_no_sequence_either():
    """What stood behind was cut off without a word."""
    model = small("linear", depth=1)
    torch._dynamo.reset()
    compiled, tokens = torch.compile(model, backend="eager"), torch.randint(1, 20, (2, 61))
    assert torch.allclose(compiled(tokens * (torch.arange(61) < 60)), model(tokens[:, :60]), atol=1e-12)
    with pytest.raises(RuntimeError, match="longer than the 60 tokens that the network is made for: cut it"):
        compiled(tokens)
