"""Files that are replaced whole or not at all."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Make `content` the file `path`, in one step."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
