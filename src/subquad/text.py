"""Numbers and tables as text, for people."""

from collections.abc import Sequence
from unicodedata import category


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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


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
