"""Files that are replaced whole or not at all."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 5.0 if sys.platform == "win32" else 0.0
"""On Windows a file that someone reads, a virus scanner or a browser, cannot be replaced until they have done."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when the block ends, and is removed when it raises.

    Whoever reads `path`, and a run killed at any moment, sees the old file or the new one. Beside it, because a rename across
    file systems is a copy. What must survive a power cut, the block syncs itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        replace_patiently(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Make `content` the file `path`, in one step."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def replace_patiently(source: Path, destination: Path, patience: float = PATIENCE_S) -> None:
    """`os.replace`, tried again for `patience` seconds where the destination is in use."""
    deadline = time.monotonic() + patience
    while True:
        try:
            os.replace(source, destination)
            return
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
