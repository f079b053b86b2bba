"""Images that are too large for one process: their tokens over several."""

from subquad.large.bands import band_rows, split_tokens

__all__ = ["band_rows", "split_tokens"]
