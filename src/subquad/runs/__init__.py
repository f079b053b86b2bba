"""Folders of runs, and everything that was trained, opened in one place."""

from subquad.runs.hub_folder import save_for_hf, upload
from subquad.runs.opened_networks import made_again, open_trained
from subquad.runs.run_folder import RunFolder, recipe_beside

__all__ = ["RunFolder", "made_again", "open_trained", "recipe_beside", "save_for_hf", "upload"]
