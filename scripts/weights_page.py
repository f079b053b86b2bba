"""Write the tables of docs/weights.md from the table of links: `python scripts/weights_page.py`."""

import re
from pathlib import Path

from subquad.weights.links import LINKS, PAGES, TAGS

PAGE = Path(__file__).parents[1] / "docs" / "weights.md"
BEGIN, END = "<!-- {} -->\n", "<!-- end -->"


def link_rows() -> list[str]:
    """Network, name in timm, size, published top-1, link and command of every file."""
    tags = {row: tagged for tagged, row in TAGS.items()}
    lines = [
        "| network | timm | px | top-1 % | link | page | command |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for row, link in LINKS.items():
        top1 = "" if link.top1 is None else f"{link.top1}"
        cells = [f"`{row}`", f"`{tags.get(row, row)}`", f"{link.px}", top1, f"[{link.label}]({link.url})", link.page]
        lines.append(f"| {' | '.join([*cells, f'`subquad download {row}`'])} |")
    return lines


def page_rows() -> list[str]:
    """The authors' pages, what is known of their licences, and how many files they have."""
    lines = ["| page | where | licence | files |", "| --- | --- | --- | ---: |"]
    for name, page in PAGES.items():
        count = sum(link.page == name for link in LINKS.values())
        lines.append(f"| {name} | {page.url} | {page.licence} | {count} |")
    return lines


TABLES = {"pages": page_rows, "links": link_rows}


def filled(text: str) -> str:
    """The page with its tables as they are to be."""
    for name, rows in TABLES.items():
        begin = BEGIN.format(name)
        table = begin + "\n".join(rows()) + "\n" + END
        text = re.sub(re.escape(begin) + r".*?" + re.escape(END), lambda _, table=table: table, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
