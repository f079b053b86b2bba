"""ListOps is generated as released, has the released values, and its distributions are the known ones."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from subquad import SubquadError
from subquad.data.synthetic import listops

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "listops_eval.json").read_text())["rows"]


def reduced(tokens):
    """The value by another way: innermost operations are replaced by their digits until one is left."""
    text = f" {' '.join(tokens)} "
    while "[" in text:
        start = text.rindex("[")
        end = text.index("]", start)
        name, *numbers = text[start + 1 : end].split()
        values = sorted(int(number) for number in numbers)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
        value = {"MIN": values[0], "MAX": values[-1], "MED": middle, "SM": sum(values) % 10}[name]
        text = f"{text[:start]}{value}{text[end + 1 :]}"
    return int(text)


def test_expressions_of_the_release_have_their_values():
    assert len(GOLDEN) == 308
    for text, value, length in GOLDEN:
        tokens = text.split()
        assert listops.evaluate(tokens) == reduced(tokens) == value and len(tokens) == length


@pytest.mark.slow
def test_two_evaluators_agree_on_many_expressions():
    for tokens, value in itertools.islice(listops.expressions(1, shortest=20, longest=400), 2_000):
        assert value == reduced(tokens) == listops.evaluate(tokens)


def test_expressions_follow_from_the_seed_and_do_not_repeat():
    first, again, other = (
        [" ".join(tokens) for tokens, _ in itertools.islice(listops.expressions(seed, shortest=4, longest=30), 300)]
        for seed in (5, 5, 6)
    )
    assert first == again != other and len(set(first)) == 300
    assert all(4 <= len(text.split()) <= 30 for text in first)


def test_operations_have_2_to_10_arguments_and_are_nested_at_most_9_deep():
    arguments, depths = set(), set()
    for tokens, _ in itertools.islice(listops.expressions(3, shortest=200, longest=1999), 20):
        counts = [0]
        for token in tokens:
            if token == listops.CLOSE:
                arguments.add(counts.pop())
            else:
                counts[-1] += 1
            if token in listops.OPERATIONS:
                counts.append(0)
                depths.add(len(counts) - 1)
    assert (min(arguments), max(arguments)) == (2, 10) and max(depths) == 9


def test_the_root_alone_is_guessed_by_what_is_most_frequent_behind_it():
    first, other = (listops.VOCABULARY.index(name) for name in list(listops.OPERATIONS)[:2])
    tokens = np.array([[first, 5, 1], [first, 6, 1], [first, 7, 1], [other, 5, 1]], np.uint8)
    known = listops.Sequences(tokens, np.full(4, 3), np.array([3, 3, 4, 7]))
    assert listops.guess_from_root(known, known) == 75


@pytest.mark.slow
def test_lengths_and_answers_are_distributed_as_known():
    rows = list(itertools.islice(listops.expressions(0), 3000))
    lengths = np.array([len(tokens) for tokens, _ in rows])
    assert lengths.min() > 500 and lengths.max() < 2000
    assert lengths.mean() == pytest.approx(1035, rel=0.03)
    assert np.percentile(lengths, [25, 50, 75]) == pytest.approx([701, 953, 1309], rel=0.05)
    shares = np.bincount([value for _, value in rows], minlength=10) / len(rows)
    known = np.array([16.8, 9.3, 7.3, 8.2, 8.9, 8.8, 7.7, 7.5, 8.5, 17.0]) / 100
    # three standard deviations of a share of 3,000
    assert (abs(shares - known) < 3 * np.sqrt(known * (1 - known) / len(rows))).all()


def test_parts_are_kept_and_do_not_overlap(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    sizes = {"count": 500, "shortest": 5, "longest": 40}
    parts = {split: listops.load_listops(split, **sizes) for split in listops.SPLITS}
    assert [len(part) for part in parts.values()] == [480, 10, 10]
    seen = [row.tobytes() for part in parts.values() for row in part.tokens]
    assert len(set(seen)) == 500
    for part in parts.values():
        for tokens, length, label in zip(part.tokens, part.lengths, part.labels, strict=True):
            words = [listops.VOCABULARY[number] for number in tokens[:length]]
            assert (
                listops.evaluate(words) == label
                and not tokens[length:].any()
                and listops.encode(words) == list(tokens[:length])
            )
    monkeypatch.setattr(listops, "_generated", None)
    assert np.array_equal(listops.load_listops("test", **sizes).tokens, parts["test"].tokens)


@pytest.mark.slow
def test_the_root_alone_answers_more_than_a_third(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_HOME", str(tmp_path))
    whole = listops.load_listops("train", count=3000)
    assert listops.guess_from_root(whole, whole) == pytest.approx(36.5, abs=2.5)


@pytest.mark.parametrize("text", ["", "[MIN ]", "[MIN 1", "1 ]", "1 2", "[MAX 1 x ]", "12"])
def test_what_is_no_expression_is_said(text):
    with pytest.raises(SubquadError):
        listops.evaluate(text.split())


def test_settings_that_make_no_set_are_said():
    with pytest.raises(SubquadError, match="unknown split 'val': known: test, train, validation"):
        listops.load_listops("val")
    with pytest.raises(SubquadError, match="50 expressions leave none to judge by"):
        listops.load_listops("test", count=50)
    with pytest.raises(SubquadError, match="lengths in order: got 30 to 20"):
        next(listops.expressions(0, shortest=30, longest=20))
