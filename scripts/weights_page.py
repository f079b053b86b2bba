"""Write the tables of docs/weights.md from the tables of links: `python scripts/weights_page.py`."""

import re
from pathlib import Path

from subquad.models.pretrained import figures_text
from subquad.weights.dense_links import DENSE_LINKS
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


def dense_rows() -> list[str]:
    """Network and head, published figures, link and command of every detector and segmenter."""
    lines = ["| network | published | link | page | command |", "| --- | --- | --- | --- | --- |"]
    for row, link in DENSE_LINKS.items():
        command = f"`subquad {link.task} predict photos --pretrained {row}`"
        cells = [f"`{row}`", figures_text(link.figures), f"[{link.label}]({link.url})", link.page, command]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page_rows() -> list[str]:
    """The authors' pages, what is known of their licences, and how many files they have."""
    lines = ["| page | where | licence | files |", "| --- | --- | --- | ---: |"]
    for name, page in PAGES.items():
        count = sum(link.page == name for table in (LINKS, DENSE_LINKS) for link in table.values())
        lines.append(f"| {name} | {page.url} | {page.licence} | {count} |")
    return lines


TABLES = {"pages": page_rows, "links": link_rows, "dense": dense_rows}


def filled(text: str) -> str:
    """The page with its tables as they are to be."""
    for name, rows in TABLES.items():
        begin = BEGIN.format(name)
        table = begin + "\n".join(rows()) + "\n" + END
        text = re.sub(re.escape(begin) + r".*?" + re.escape(END), lambda _, table=table: table, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
