"""Numbers and tables as text, for people."""

from collections.abc import Iterator, Sequence
from unicodedata import category, east_asian_width


def si(number: float) -> str:
    """1234567 as 1.23 M."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        # what three digits round up to the next unit is said in that
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def speed_text(per_second: float) -> str:
    """Images a second: with a decimal where there are few."""
    return f"{per_second:.{0 if per_second >= 10 else 1}f}"


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def counted(number: int, what: str) -> str:
    """A number of things: 1 epoch, 9 epochs, 2 passes."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"


def columns(lines: Sequence[Sequence[str]]) -> str:
    """A table for a terminal, the first line its head: words on the left, numbers on the right."""
    widths = [max(map(columns_of, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_in_columns(line, widths)).rstrip() for line in lines)


def _in_columns(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (cell, width) in enumerate(zip(line, widths, strict=True)):
        space = " " * (width - columns_of(cell))
        yield space + cell if place else cell + space


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: East Asian letters two each, marks on other letters none."""
    return sum(
        0 if category(letter) in ("Mn", "Me", "Cf") else 2 if east_asian_width(letter) in ("W", "F") else 1
        for letter in text
    )


def padded(text: str, width: int) -> str:
    """Text with spaces behind it, so that it takes `width` columns of a terminal."""
    return text + " " * (width - columns_of(text))


def shorten(text: str, width: int) -> str:
    """Text in at most `width` columns of a terminal."""
    if columns_of(text) <= width:
        return text
    end = max(end for end in range(len(text)) if columns_of(text[:end]) < width)
    return f"{text[:end]}…"


def one_line(words: object, most: int = 200) -> str:
    """An exception's words, or a name from a file, as they can stand in a line: short, without control characters."""
    text = " ".join(str(words).split())
    text = "".join(letter if letter.isprintable() else "�" for letter in text[: most + 1])
    return text if len(text) <= most else f"{text[:most]}…"


def escaped(text: str, *, without: str = "") -> str:
    """Text whose control characters, but those of `without`, are written out, so that no terminal obeys them."""
    return "".join(
        repr(letter)[1:-1] if category(letter) == "Cc" and letter not in without else letter for letter in text
    )
