"""Just enough of PNG for a page's screenshot: what Chromium writes is read, and written again with a palette, much smaller.

The lab has no picture library, and this needs none: 8 bits a sample, RGB or RGBA, not interlaced.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER = ">IIBBBBB"
CHANNELS = {2: 3, 6: 4}
PALETTE = 3
COLOURS = 256


def decoded(png: bytes) -> np.ndarray:
    """Its pixels as uint8 `[height, width, 3]`, without transparency. Raises ValueError for a form other than the above."""
    kinds = dict(chunks(png))
    width, height, depth, form, _, _, interlaced = struct.unpack(HEADER, kinds[b"IHDR"])
    if depth != 8 or form not in CHANNELS or interlaced:
        raise ValueError("not a PNG of 8-bit RGB or RGBA, or an interlaced one")
    step = CHANNELS[form]
    data = zlib.decompress(b"".join(body for kind, body in chunks(png) if kind == b"IDAT"))
    size, above, rows = width * step, bytes(width * step), []
    for start in range(0, height * (size + 1), size + 1):
        above = unfiltered(data[start], data[start + 1 : start + 1 + size], above, step)
        rows.append(above)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(height, width, step)[..., :3]


def unfiltered(kind: int, row: bytes, above: bytes, step: int) -> bytes:
    """A row from its differences: by `kind` from the sample on the left, the one above, their mean, or the nearest of three."""
    if kind == 0:
        return row
    if kind == 2:
        return np.add(np.frombuffer(row, np.uint8), np.frombuffer(above, np.uint8)).tobytes()
    out = bytearray(row)
    for at in range(len(out)):
        left, corner = (out[at - step], above[at - step]) if at >= step else (0, 0)
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + above[at]) // 2
        else:
            guess = paeth(left, above[at], corner)
        out[at] = (out[at] + guess) & 255
    return bytes(out)


def paeth(left: int, up: int, corner: int) -> int:
    """Which of the three is nearest to left + up - corner; the first of equals."""
    to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    if to_left <= to_up and to_left <= to_corner:
        return left
    return up if to_up <= to_corner else corner


def encoded(pixels: np.ndarray, source: str) -> bytes:
    """A PNG of `pixels [height, width, 3]` in at most 256 colours, with `source` (Latin-1) as its origin.

    The most frequent colours are kept, any other becomes the nearest of them: smoothed edges of text, where a page has so many.
    """
    height, width, _ = pixels.shape
    numbers, places, counts = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1]), return_inverse=True, return_counts=True)
    found = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1)
    kept = found[np.argsort(-counts, kind="stable")[:COLOURS]]
    distances = ((found[:, None] - kept[None]) ** 2).sum(axis=2)
    indices = distances.argmin(axis=1).astype(np.uint8)[places.reshape(height, width)]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1)  # each begins with its filter: none
    parts = (
        (b"IHDR", struct.pack(HEADER, width, height, 8, PALETTE, 0, 0, 0)),
        (b"tEXt", b"Source\0" + source.encode("latin-1")),
        (b"PLTE", kept.astype(np.uint8).tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(chunk(kind, body) for kind, body in parts)


def source(png: bytes) -> str:
    """The text that `encoded` put in; empty without one."""
    return dict(chunks(png)).get(b"tEXt", b"\0").split(b"\0", 1)[1].decode("latin-1")


def chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    """(kind, body) of each part of a PNG file, in order. Raises ValueError for another file, or one with a damaged part."""
    if not png.startswith(SIGNATURE):
        raise ValueError("not a PNG file")
    found, at = [], len(SIGNATURE)
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        if png[at : at + 12 + size] != chunk(kind, body):
            raise ValueError("a damaged PNG file")
        found.append((kind, body))
        at += 12 + size
    return found


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
