"""ListOps of the Long Range Arena: nested operations on digits, whose value is to be told.

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

Tay et al. 2020, arXiv 2011.04006. Generated: the same expressions from the same seed, on every machine. A node at depth
t < 10 is an operation with probability ¼, of 2 to 10 arguments, else a digit; expressions that are too short or too
long are thrown away, and so are repeats. Brackets stay tokens: without them, as part of the literature has it, an
expression has several values.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from subquad.data.synthetic.generation import check_size, kept, part_of
from subquad.errors import SubquadError
from subquad.ranges import Count, Positive, checks_arguments

OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    # the mean of the two in the middle, cut off, where there are two
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
"""What opens an operation, and what it makes of its arguments' values."""

CLOSE = "]"
VOCABULARY = ("", *map(str, range(10)), *OPERATIONS, CLOSE)
"""Tokens by their number; 0 is padding."""

DEEPEST = 10
MOST_ARGUMENTS = 10
MOST_TRIES = 100_000
"""In a row that bring nothing new, before it is said that there is nothing."""

SPLITS = {"train": 0.96, "validation": 0.02, "test": 0.02}
"""Shares of the released sets of 100,000."""


@dataclass(frozen=True)
class Sequences:
    """Expressions as numbers of `VOCABULARY`.

    Attributes:
        tokens: (n, longest), 0 behind the end.
        lengths: (n,).
        labels: (n,), their values.
    """

    tokens: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def draw(rng: random.Random, longest: int) -> tuple[list[str], int] | None:
    """The tokens and the value of a random expression; None for one of `longest` tokens or more."""
    tokens: list[str] = []
    value = _draw(rng, 1, tokens, longest)
    return None if value is None or len(tokens) >= longest else (tokens, value)


def _draw(rng: random.Random, depth: int, tokens: list[str], longest: int) -> int | None:
    if depth >= DEEPEST or rng.random() > 0.25:
        # of random() alone, which is the same in every version of Python
        digit = int(10 * rng.random())
        tokens.append(str(digit))
        return digit
    place = len(tokens)
    tokens.append("")
    values = []
    for _ in range(2 + int((MOST_ARGUMENTS - 1) * rng.random())):
        value = _draw(rng, depth + 1, tokens, longest)
        if value is None or len(tokens) >= longest:
            return None
        values.append(value)
    tokens[place] = list(OPERATIONS)[int(len(OPERATIONS) * rng.random())]
    tokens.append(CLOSE)
    return OPERATIONS[tokens[place]](values)


def expressions(seed: int, *, shortest: int = 501, longest: int = 1999) -> Iterator[tuple[list[str], int]]:
    """Distinct random expressions of `shortest` to `longest` tokens, with their values, as long as there are some."""
    if not 1 <= shortest <= longest:
        raise SubquadError(f"expressions have from 1 token on, and lengths in order: got {shortest} to {longest}")
    rng, seen = random.Random(seed), set()
    in_vain = 0
    while in_vain < MOST_TRIES:
        in_vain += 1
        found = draw(rng, longest + 1)
        if found is None or len(found[0]) < shortest:
            continue
        key = " ".join(found[0])
        if key not in seen:
            seen.add(key)
            yield found
            in_vain = 0
    raise SubquadError(
        f"there are hardly more than {len(seen)} expressions of {shortest} to {longest} tokens: "
        "take a smaller count, or lengths that are further apart"
    )


def evaluate(tokens: Sequence[str]) -> int:
    """The value of an expression.

    Raises:
        SubquadError: it is none.
    """
    open_operations: list[tuple[str, list[int]]] = [("", [])]
    for token in tokens:
        if token in OPERATIONS:
            open_operations.append((token, []))
        elif token == CLOSE and len(open_operations) > 1 and open_operations[-1][1]:
            name, values = open_operations.pop()
            open_operations[-1][1].append(OPERATIONS[name](values))
        elif token.isdigit() and len(token) == 1:
            open_operations[-1][1].append(int(token))
        else:
            raise SubquadError(f"'{token}' has no place in an expression here: {' '.join(tokens)[:60]}")
    if len(open_operations) != 1 or len(open_operations[0][1]) != 1:
        raise SubquadError(f"no whole expression: {' '.join(tokens)[:60]}")
    return open_operations[0][1][0]


def encode(tokens: Sequence[str]) -> list[int]:
    """Tokens as their numbers."""
    return [VOCABULARY.index(token) for token in tokens]


@checks_arguments
def load_listops(
    split: str, *, count: Positive = 100_000, seed: Count = 0, shortest: Positive = 501, longest: Positive = 1999
) -> Sequences:
    """A part of `count` expressions, which are generated once and kept in the data folder.

    Args:
        split: "train", "validation" or "test": 96, 2 and 2 % of them.
        count: of all three together.
        seed: of the generator.
        shortest: tokens of an expression at least.
        longest: tokens of an expression at most.
    """
    if count < 100:
        raise SubquadError(f"{count} expressions leave none to judge by: ask for 100 or more")
    check_size("expressions", count, longest)
    part = part_of(split, SPLITS, count)
    name = f"listops-{seed}-{count}-{shortest}-{longest}"
    whole = kept(name, lambda: asdict(_generated(seed, count, shortest, longest)), count=count)
    return Sequences(**{key: values[part] for key, values in whole.items()})


def _generated(seed: int, count: int, shortest: int, longest: int) -> Sequences:
    tokens = np.zeros((count, longest), np.uint8)
    lengths, labels = np.zeros(count, np.int64), np.zeros(count, np.int64)
    numbers = {token: number for number, token in enumerate(VOCABULARY)}
    stream = expressions(seed, shortest=shortest, longest=longest)
    for row in tqdm(range(count), desc="generating ListOps", leave=False, disable=None):
        words, labels[row] = next(stream)
        lengths[row] = len(words)
        tokens[row, : len(words)] = [numbers[word] for word in words]
    return Sequences(tokens, lengths, labels)


def guess_from_root(sequences: Sequences, known: Sequences) -> float:
    """How often the most frequent answer to an expression's first token is right, in percent.

    It is what a model that looks at nothing else can reach: 36 % of the usual expressions. `known` are those that the
    frequencies are taken from.
    """
    table = np.zeros((len(VOCABULARY), 10), np.int64)
    np.add.at(table, (known.tokens[:, 0], known.labels), 1)
    return 100 * float((table.argmax(1)[sequences.tokens[:, 0]] == sequences.labels).mean())
