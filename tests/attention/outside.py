"""The mechanism of docs/adding-a-mechanism.md as somebody else's package, installed in a folder."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-mechanism.md"
SOURCE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[-1]


def install(folder: Path, name: str = "mean", *, source: str = SOURCE, package: str = "elsewhere") -> Path:
    """Write a module and the facts of its package to `folder`, which then holds what `pip install` would leave."""
    folder.mkdir(exist_ok=True)
    (folder / f"{package}.py").write_text(source, encoding="utf-8")
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[subquad.attention]\n{name} = {package}:MeanAttention\n")
    return folder
