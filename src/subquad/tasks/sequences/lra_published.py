"""What is published on the Long Range Arena: test accuracy in percent, and in whose table it stands."""

from typing import NamedTuple


class Published(NamedTuple):
    """A row of a table."""

    name: str
    source: str
    text: float
    listops: float
    retrieval: float
    pathfinder: float
    image: float

    def on(self, task: str) -> float:
        """Give its accuracy in percent on a task."""
        return float(getattr(self, task))


PUBLISHED = (
    # Tay et al. 2020, arXiv 2011.04006, as it stands on the leaderboard: 4 layers and more, other widths for each task
    Published("Transformer", "Tay et al.", 64.27, 36.37, 57.46, 71.40, 42.44),
    Published("Local attention", "Tay et al.", 52.98, 15.82, 53.39, 66.63, 41.46),
    Published("Linear Transformer", "Tay et al.", 65.90, 16.13, 53.09, 75.30, 42.34),
    Published("Reformer", "Tay et al.", 56.10, 37.27, 53.40, 68.50, 38.07),
    Published("Performer", "Tay et al.", 65.40, 18.01, 53.82, 77.05, 42.77),
    Published("Longformer", "Tay et al.", 62.85, 35.63, 56.89, 69.71, 42.22),
    # Skyformer, Chen et al. 2021, arXiv 2111.00035, table 1: the small network that is ours too; no brackets in ListOps
    Published("Transformer", "Chen et al.", 61.95, 38.37, 80.69, 65.26, 40.57),
    Published("Kernelized", "Chen et al.", 60.22, 38.78, 81.77, 70.73, 41.29),
    Published("Nyströmformer", "Chen et al.", 64.83, 38.51, 80.52, 69.48, 41.30),
    Published("Linformer", "Chen et al.", 58.93, 37.45, 78.19, 60.93, 37.96),
    Published("Informer", "Chen et al.", 62.64, 32.53, 77.57, 57.83, 38.10),
    Published("Performer", "Chen et al.", 64.19, 38.02, 80.04, 66.30, 41.43),
    Published("Reformer", "Chen et al.", 62.93, 37.68, 78.99, 66.49, 48.87),
    Published("BigBird", "Chen et al.", 63.86, 39.25, 80.28, 68.72, 43.16),
    Published("Skyformer", "Chen et al.", 64.70, 38.69, 82.06, 70.73, 40.77),
    # PolaFormer, Meng et al. 2025, arXiv 2501.15061: beside rows of Tay et al. and Chen et al., which are left out here
    Published("Transformer", "PolaFormer", 61.55, 38.71, 80.93, 70.39, 39.14),
    Published("Informer", "PolaFormer", 62.13, 37.05, 79.35, 56.44, 37.86),
    Published("Linformer", "PolaFormer", 57.29, 36.44, 77.85, 65.39, 38.43),
    Published("Kernelized", "PolaFormer", 60.02, 38.46, 82.11, 69.86, 32.63),
    Published("cosFormer", "PolaFormer", 63.54, 37.20, 80.28, 70.00, 35.84),
    Published("Nyströmformer", "PolaFormer", 62.36, 37.95, 80.89, 69.34, 38.94),
    Published("Hedgehog", "PolaFormer", 64.60, 37.15, 82.24, 74.16, 40.15),
    Published("PolaFormer, α = 3", "PolaFormer", 73.06, 37.35, 80.50, 70.53, 42.15),
    Published("PolaFormer, α = 5", "PolaFormer", 72.33, 38.76, 80.37, 68.98, 41.91),
    Published("PolaFormer, α = 7", "PolaFormer", 71.93, 37.60, 81.47, 69.09, 42.77),
)
