"""PNG files, some rows at a time.

A PNG is one deflated stream of rows, each a difference from its neighbours ("filtered"). Python inflates it piece by
piece; what takes a loop over bytes, undoing the filters, is left to Pillow: a strip of rows is wrapped as a small PNG
of its own, behind the row above, which is known by then.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from subquad.data.decoding import BrokenImageError, decode_png
from subquad.errors import SubquadError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Bytes of a pixel of 8 bits by its colour type: grey, RGB, palette, grey and RGB with transparency."""
PIECE = 2**20
"""Bytes that are read at a time."""


class PngRows:
    """An image of 8 bits a channel, not interlaced; rows are read in their order, with a look back at the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _header(path)
        if header is None:
            raise SubquadError(f"{path} is no PNG")
        width, height, _, self.colour, _ = header
        self.shape = height, width
        self.row_bytes = width * CHANNELS[self.colour]
        self._restart()

    def _restart(self) -> None:
        self.next_row = 0
        self.above = bytes(self.row_bytes)
        self.inflated = bytearray()
        self.palette = b""
        self.kept: tuple[int, NDArray[Any]] = (0, np.empty((0, self.shape[1], 3), np.uint8))
        self.pieces = self._inflate()

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows (y, x, 3); those in front of the last read ones are decoded anew from the start."""
        start, kept = self.kept
        if first < start:
            self._restart()
            start, kept = self.kept
        parts = [kept[first - start :]]
        while self.next_row < behind:
            begin = self.next_row
            strip = self._strip(min(behind - begin, max(1, 2**26 // self.row_bytes)))
            if begin + len(strip) > first:
                parts.append(strip[max(0, first - begin) :])
        # all up to the next row of the stream, though fewer are asked for: these may be asked for next
        rows = np.concatenate(parts)
        self.kept = first, rows
        return rows[: behind - first]

    def _strip(self, count: int) -> NDArray[Any]:
        """Decode the next rows, (y, x, 3)."""
        length = count * (1 + self.row_bytes)
        while len(self.inflated) < length:
            piece = next(self.pieces, None)
            if piece is None:
                raise SubquadError(f"{self.path} is damaged: it ends in row {self.next_row} of {self.shape[0]}")
            self.inflated += piece
        filtered = b"\0" + self.above + bytes(self.inflated[:length])
        del self.inflated[:length]
        size = struct.pack(">IIBBBBB", self.shape[1], count + 1, 8, self.colour, 0, 0, 0)
        chunks = [(b"IHDR", size), *([(b"PLTE", self.palette)] if self.palette else [])]
        chunks += [(b"IDAT", zlib.compress(filtered, 0)), (b"IEND", b"")]
        try:
            image = decode_png(SIGNATURE + b"".join(map(_chunk, *zip(*chunks, strict=True))))
        except BrokenImageError as error:
            raise SubquadError(f"{self.path} is damaged near row {self.next_row}: {error}") from None
        self.above = image.crop((0, count, self.shape[1], count + 1)).tobytes()
        self.next_row += count
        if self.next_row == self.shape[0]:
            # to the end of the stream, whose sum tells whether all of it was right
            for _ in self.pieces:
                pass
        return np.asarray(image.convert("RGB"))[1:]

    def _inflate(self) -> Iterator[bytes]:
        """What the file's stream of rows inflates to, in pieces."""
        inflater = zlib.decompressobj()
        with self.path.open("rb") as file:
            file.seek(len(SIGNATURE))
            try:
                for kind, data in _chunks(file):
                    if kind == b"PLTE":
                        self.palette = data
                    elif kind == b"IDAT":
                        while data:
                            yield inflater.decompress(data, PIECE)
                            data = inflater.unconsumed_tail
                yield inflater.flush()
            except zlib.error as error:
                raise SubquadError(f"{self.path} is damaged near row {self.next_row}: {error}") from None


def can_read_by_rows(path: Path) -> bool:
    """Whether a PNG has 8 bits a channel and its rows in their order."""
    header = _header(path)
    return header is not None and header[2] == 8 and header[4] == 0 and header[3] in CHANNELS


def _header(path: Path) -> tuple[int, int, int, int, int] | None:
    """Width, height, bits of a channel, colour type and interlacing; None for other files."""
    with path.open("rb") as file:
        begin = file.read(33)
    if len(begin) < 33 or begin[:8] != SIGNATURE or begin[12:16] != b"IHDR":
        return None
    width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", begin[16:29])
    return width, height, bits, colour, interlaced


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of a PNG by kind, those of pixels in pieces."""
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        check = zlib.crc32(kind)
        while length:
            data = file.read(min(length, PIECE) if kind == b"IDAT" else length)
            if not data:
                return
            length -= len(data)
            check = zlib.crc32(data, check)
            yield kind, data
        if len(told := file.read(4)) == 4 and told != struct.pack(">I", check):
            raise zlib.error(f"the sum of a chunk {kind.decode('latin1')!r} does not fit")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
