"""The commands of `subquad` by name: the file of cli/ that has each, and what it does, in a line.

`subquad --help` is made of this table alone, without PyTorch, which every task imports. It lies outside of cli/, where
no task is named. What an installed plug-in adds is not in it.
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("task_commands", "Train a model with a recipe; flags override the recipe."),
    "compare": ("task_commands", "Train one host with several mechanisms and seeds, and print one table."),
    "eval": ("task_commands", "Accuracy, confusion matrix and throughput of trained weights."),
    "predict": ("task_commands", "Class names and probabilities for images; a picture grid for a folder."),
    "segment": ("task_commands", "Semantic segmentation: train, compare, evaluate, predict."),
    "detect": ("task_commands", "Detection and instance segmentation: train, compare, evaluate, predict."),
    "lra": (
        "task_commands",
        "A task of the Long Range Arena with several mechanisms and seeds, beside what is published.",
    ),
    "stream": (
        "streaming_command",
        "Take one large image, gigapixels, through a network exactly: logits, labels, heat.",
    ),
    "diffuse": (
        "diffuse",
        "Make images with a pipeline of diffusers: as it is, through agents, or both from the same noise.",
    ),
    "analyze": (
        "analyze",
        "Measure what the layers of trained networks attend to, and write a page, a table and JSON.",
    ),
    "bench": ("bench", "Time attention layers, operations or whole networks against what they have to beat."),
    "tune": (
        "tuning_command",
        "Choose the tiles of GPU kernels by time on this device, and keep them for what runs here.",
    ),
    "export": ("exporting_commands", "Write a network for another engine, and keep it if it computes the same there."),
    "convert": ("conversion_commands", "Give a trained network another attention, with images but without labels."),
    "advise": (
        "conversion_commands",
        "Say where a network's time goes, what other attention gains, and which engine to take; measured here.",
    ),
    "convert-checkpoint": ("library_commands", "Write the authors' weights as safetensors of ours."),
    "list": ("library_commands", "What there is: mechanisms, hosts, models, backends and what they compute."),
    "report": ("library_commands", "Write one HTML page about runs, which opens anywhere without a network."),
    "download": (
        "released_weights",
        "Fetch the authors' weights of networks, and keep them as safetensors of ours.",
    ),
    "upload": (
        "released_weights",
        "Put a trained classifier on the Hugging Face hub, or into a folder like those there, with a model card.",
    ),
}
"""In the order in which `subquad --help` shows them."""
