"""Where a target's weights lie on this disk, fetched first if need be. No torch at import, and nothing is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_mini_lab.catalog import TARGETS, Entry
from dflash_mini_lab.targets.embedded import ensure_embedded, ensure_gguf
from dflash_mini_lab.types import UserError

NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What transformers needs of a hub repository. Pickled weights are never fetched."""


def fetch(entry: Entry, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder that `from_pretrained` takes for this target.

    Hub models use huggingface_hub's own cache and obey `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` and the like.
    Raises UserError when the weights cannot be had.
    """
    if entry.kind == "embedded":
        return ensure_embedded(entry, cache, say)
    if entry.kind == "gguf":
        return ensure_gguf(entry, cache, say)
    if entry.kind == "folder":
        return Path(entry.source)
    return fetch_from_hub(entry, say)


def fetch_from_hub(entry: Entry, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = entry.source
    others = ", ".join(other.name for other in TARGETS.values() if other.kind == "embedded")
    try:
        return Path(snapshot_download(name, revision=entry.revision, allow_patterns=list(NEEDED)))
    except HFValidationError as error:
        raise UserError(f"--target {name}: no hub id ({error}).") from error
    except GatedRepoError as error:
        raise UserError(
            f"{name}: its owner asks for consent first: accept on its page, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name}: the hub has no such model, or it is private (then log in with `hf auth login`).") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name}: the hub has no revision {entry.revision!r} of it.") from error
    except (LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        what = f"{name} at {entry.revision}" if entry.revision else name
        raise UserError(
            f"{what}: not in the local cache, and the hub cannot be reached ({reason}). Pass a folder that holds the model: "
            f"--target FOLDER. Only {others} needs no hub."
        ) from error


def resolved_revision(folder: Path) -> str | None:
    """The commit of a snapshot in the hub's cache; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None
