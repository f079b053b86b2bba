"""Classification of sequences: the Long Range Arena."""

from subquad.tasks.sequences.lra_data import SEQUENCES, load_sequences
from subquad.tasks.sequences.lra_recipe import LraRecipe
from subquad.tasks.sequences.lra_task import LongRange
from subquad.tasks.sequences.sequence_network import SequenceClassifier, create_sequence_model

__all__ = [
    "SEQUENCES",
    "LongRange",
    "LraRecipe",
    "SequenceClassifier",
    "create_sequence_model",
    "load_sequences",
]
