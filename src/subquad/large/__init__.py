"""Images of more tokens than fit: streamed through a network, or spread over processes."""

from subquad.large.bands import band_rows, split_tokens
from subquad.large.chunked_blocks import chunk_blocks
from subquad.large.chunking import chunk_mlps
from subquad.large.image_rows import rows_of
from subquad.large.processes import lost_in_one_line
from subquad.large.streamed_hosts import host_of
from subquad.large.streamed_network import Outputs, Streamed, check_kept, stream_network
from subquad.large.walking_along import identity_of

__all__ = [
    "Outputs",
    "Streamed",
    "band_rows",
    "check_kept",
    "chunk_blocks",
    "chunk_mlps",
    "host_of",
    "identity_of",
    "lost_in_one_line",
    "rows_of",
    "split_tokens",
    "stream_network",
]
