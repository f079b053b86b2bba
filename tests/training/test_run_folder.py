import pytest

from subquad.errors import SubquadError
from subquad.runs.run_folder import RunFolder
from subquad.tasks.classification import Recipe
from subquad.writing import replacing


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(RuntimeError), replacing(file) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_with_something_in_it_is_not_taken(tmp_path):
    RunFolder(tmp_path / "new").check_new()
    RunFolder(tmp_path).check_new()
    (tmp_path / "mine").write_text("")
    with pytest.raises(SubquadError, match=r"exists already, and has no run but mine: take another --experiment"):
        RunFolder(tmp_path).check_new()
    RunFolder(tmp_path / "run").create(Recipe(), {})
    with pytest.raises(SubquadError, match=r"exists already: go on with --resume .* or take another --experiment"):
        RunFolder(tmp_path / "run").check_new()


def test_a_run_goes_on_with_its_own_recipe_only(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(SubquadError, match=r"no run in .* to resume"):
        folder.check_resumable(Recipe())
    folder.create(Recipe(), {})
    folder.check_resumable(Recipe(workers=4, data_dir="elsewhere"))
    assert "begun on the data in digits, and is taken to be of those in elsewhere now" in folder.moved_data(
        Recipe(data_dir="elsewhere")
    )
    assert folder.moved_data(Recipe(workers=4)) is None
    with pytest.raises(SubquadError, match=r"another recipe \(epochs 300 → 5\)"):
        folder.check_resumable(Recipe(epochs=5))


def test_metrics_are_rows_of_jsonl_and_csv(tmp_path):
    folder, rows = RunFolder(tmp_path), [{"epoch": 0, "lr": 0.5}, {"epoch": 1, "lr": 0.25}]
    folder.write_rows(rows)
    assert folder.rows() == rows
    assert (tmp_path / "metrics.csv").read_text() == "epoch,lr\n0,0.5\n1,0.25\n"
