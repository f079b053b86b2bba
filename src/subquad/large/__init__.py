"""Images that are too large for one process: their tokens over several."""

from subquad.large.bands import band_rows, split_tokens
from subquad.large.chunking import chunk_mlps
from subquad.large.processes import lost_in_one_line

__all__ = ["band_rows", "chunk_mlps", "lost_in_one_line", "split_tokens"]
