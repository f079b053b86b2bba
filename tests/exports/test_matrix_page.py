"""docs/deployment.md shows what docs/export_matrix.json has."""

import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def matrix(monkeypatch):
    """The script."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import export_matrix

    return export_matrix


def test_the_page_is_that_of_the_cells(matrix):
    page = matrix.PAGE.read_text()
    assert page == matrix.with_tables(page, json.loads(matrix.DONE.read_text()))


def test_what_fails_and_what_is_not_there_are_said(matrix):
    made = {"date": "2026-11-25", "torch": "2.14.1"}
    cells = {
        "vit linear onnx dynamic": {"off": 2e-7, **made},
        "vit agent onnx dynamic": {"error": "no such operator", **made},
        "swin softmax pt2 static": {"off": 0.0, **made},
    }
    lines = matrix.tables(cells).splitlines()
    row = next(line for line in lines if line.startswith("| vit, onnx")).split(" | ")
    assert [cell.strip(" |") for cell in row].count("") == len(row) - 3 and "2e-07" in row and "fails" in row
    assert any(line.startswith("| swin, pt2 | 0 |") for line in lines)
    assert "2 cells, 2e-07 at most (vit linear onnx dynamic)" in lines[-2]
    assert lines[-1] == "- fails: vit agent onnx dynamic: no such operator"
