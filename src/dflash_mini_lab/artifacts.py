"""The drafter's files: a manifest that pins each file's SHA-256 and size, and a download that trusts nothing else.

The manifest in the repository (`artifacts/<target>/artifact-manifest.json`), or one that was written on this machine, is the
root of trust. A manifest is never downloaded.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mini_lab.files import replace_file
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.types import UserError

MANIFEST = "artifact-manifest.json"
SCHEMA_VERSION = 1
LARGEST_FILE = 16 * 2**30
TRIES = 4
PAUSE_S = 1.0
SILENCE_S = 30.0
"""Seconds without a byte after which a transfer counts as broken off."""
BLOCK = 2**18
COMMITTED = Path(__file__).resolve().parents[2] / "artifacts"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

Say = Callable[[str], None]


@dataclass(frozen=True)
class ArtifactFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    target: str
    files: tuple[ArtifactFile, ...]


# The manifest.


def read_manifest(path: Path) -> Manifest:
    """The manifest in `path`. Raises UserError for anything but plain file names with a size and a digest."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(check_file(item, path) for item in content["files"])
        manifest = Manifest(str(content["target"]), files)
        version = content["schema_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a manifest of artifacts ({type(error).__name__}: {error}).") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: has schema version {version!r}; this lab reads version {SCHEMA_VERSION}.")
    if not files or len({file.name.lower() for file in files}) != len(files):
        raise UserError(f"{path}: lists no files, or one twice.")
    return manifest


def check_file(item: Any, path: Path) -> ArtifactFile:
    """One entry. Names are flat: no folders, no drives, nothing that any system reads as another place."""
    name, size, digest = item["name"], item["bytes"], item["sha256"]
    if (
        not isinstance(name, str)
        or not NAME.fullmatch(name)
        or name.endswith(".")
        or RESERVED.fullmatch(name)
        or name.lower() == MANIFEST
    ):
        raise UserError(f"{path}: refused the file name {name!r}: only plain names of letters, digits, dots and dashes are safe.")
    if type(size) is not int or not 0 < size <= LARGEST_FILE:
        raise UserError(f"{path}: {name}: refused the size {size!r}.")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UserError(f"{path}: {name}: refused the SHA-256 {digest!r}.")
    return ArtifactFile(name, size, digest)


def write_manifest(
    folder: Path, target: str, facts: Mapping[str, Any] | None = None, only: Sequence[str] | None = None
) -> Path:
    """Pin every file in `folder` as it is now (with `only`, those of these names that are there); `facts` are kept beside them
    for people to read. Returns the manifest's path.

    Written last and in one step: a folder with a manifest is a whole one.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    names = [name for name in names if only is None or name in only]
    files = [{"name": name, "bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names]
    path = folder / MANIFEST
    for item in files:
        check_file(item, path)
    content = {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "files": files,
        **({"facts": dict(facts)} if facts else {}),
    }
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode("utf-8"))
    return path


# Verification.


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def problem_with(path: Path, file: ArtifactFile) -> str | None:
    """None when `path` is exactly the pinned file; otherwise what is wrong with it."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != file.bytes:
        return f"has {size:,} bytes instead of {file.bytes:,}"
    return None if sha256(path) == file.sha256 else "is damaged (its SHA-256 differs from the manifest's)"


def verify(folder: Path, manifest: Manifest) -> dict[str, str]:
    """File name → what is wrong; empty when every pinned file is whole."""
    found = {file.name: problem_with(folder / file.name, file) for file in manifest.files}
    return {name: problem for name, problem in found.items() if problem}


def verified(folder: Path, manifest: Manifest, way_out: str) -> Path:
    """`folder`, or UserError that names the first bad file and the way out."""
    for name, problem in verify(folder, manifest).items():
        raise UserError(f"{folder / name} {problem}; {way_out}")
    return folder


# Where a target's files are.


def prepared_folder(cache: Path, target: str) -> Path:
    """Where a drafter that was trained on this machine lies, with the manifest that its training wrote."""
    return cache / "prepared" / target


def locate(settings: Settings, target: str, say: Say, repository: Path = COMMITTED) -> Path | None:
    """The folder with the target's verified files, downloading them if they are pinned but absent; None: there are none yet.

    In this order: `--artifact-dir` with a manifest of its own; the repository's manifest, with its files beside it, in
    `--artifact-dir`, in the cache, or downloaded; a drafter prepared on this machine.
    Raises UserError that names the file which is damaged, refused or cannot be had. Nothing unverified is ever returned.
    """
    own = settings.artifact_dir
    if own and (own / MANIFEST).is_file():
        return verified(own, read_for(own / MANIFEST, target), "copy it again, or run --prepare.")
    pinned = repository / target / MANIFEST
    if pinned.is_file():
        found = locate_pinned(settings, pinned.parent, read_for(pinned, target), say)
        if found:
            return found
    elif own:
        raise UserError(f"--artifact-dir {own}: has no {MANIFEST}, and the lab pins no files for {target}.")
    prepared = prepared_folder(settings.cache, target)
    if (prepared / MANIFEST).is_file():
        return verified(prepared, read_for(prepared / MANIFEST, target), "run --prepare again.")
    return None


def manifest_of(folder: Path, target: str, repository: Path = COMMITTED) -> Manifest | None:
    """The manifest that `folder`, as `locate` found it, was verified by: its own, or the repository's."""
    for path in (folder / MANIFEST, repository / target / MANIFEST):
        if path.is_file():
            return read_for(path, target)
    return None


def locate_pinned(settings: Settings, beside: Path, manifest: Manifest, say: Say) -> Path | None:
    downloads = settings.artifact_dir or settings.cache / "artifacts" / manifest.target
    if any((beside / file.name).exists() for file in manifest.files) and not settings.artifact_dir:
        return verified(beside, manifest, f"restore it with: git checkout -- artifacts/{manifest.target}")
    wrong = verify(downloads, manifest)
    if not wrong and not settings.refresh_artifacts:
        return downloads
    base = settings.artifact_base_url
    if base:
        base = f"{base}/{settings.artifact_release_tag}" if settings.artifact_release_tag else base
        for file in manifest.files:
            if file.name in wrong or settings.refresh_artifacts:
                fetch_file(f"{base}/{file.name}", downloads / file.name, file.bytes, file.sha256, say)
        return verified(downloads, manifest, "run again with --refresh-artifacts.")
    present = [f"{downloads / name} {problem}" for name, problem in wrong.items() if (downloads / name).exists()]
    if present or settings.artifact_dir:
        bad = present[0] if present else f"{downloads} lacks {', '.join(wrong)}"
        raise UserError(f"{bad}; pass --artifact-base-url to download it, or remove the folder.")
    return None


def read_for(path: Path, target: str) -> Manifest:
    manifest = read_manifest(path)
    if manifest.target != target:
        raise UserError(f"{path}: belongs to the target {manifest.target}, not to {target}.")
    return manifest


# Download.


class BrokenOff(Exception):
    """A transfer that may go on where it stopped."""


class SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only within its scheme: https must not become http, nor either of them a file."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if urllib.parse.urlsplit(newurl).scheme != urllib.parse.urlsplit(req.full_url).scheme:
            fp.close()
            raise UserError(f"{req.full_url}: refused the redirect to {newurl}: it leaves the address's scheme.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch_file(url: str, destination: Path, size: int, digest: str, say: Say) -> None:
    """Download exactly `size` bytes with this SHA-256 to `destination`, which is replaced in one step or not at all.

    What arrived stays in `NAME.part`; a broken transfer goes on from there, within this call and in a later one.
    Raises UserError for a body that is not the pinned one, for a refusal, and when the server stays away.
    """
    from filelock import FileLock

    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url}: only https:// and http:// addresses are downloaded from.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(destination.name + ".part")
    with FileLock(part.with_suffix(".lock")):  # two runs at once would append to the same part
        say(f"Downloading {destination.name} ({size / 1e6:,.1f} MB) ...")
        resumed = complete_part(url, part, size)
        if sha256(part) != digest and resumed:
            part.unlink()  # the old part may have been another file's beginning
            complete_part(url, part, size)
        if sha256(part) != digest:
            part.unlink()
            raise UserError(f"{url}: refused: its SHA-256 is not the one in the manifest.")
        os.replace(part, destination)


def complete_part(url: str, part: Path, size: int) -> bool:
    """Transfer until `part` has `size` bytes; returns whether any of them came from an earlier transfer."""
    resumed = part.exists()
    for attempt in range(1, TRIES + 1):
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        try:
            if have < size:
                resumed |= have > 0
                transfer(url, part, have, size)
            return resumed
        except BrokenOff as error:
            if attempt == TRIES:
                raise UserError(f"{url}: {error}; what arrived is kept, run again to go on.") from error
            time.sleep(PAUSE_S * attempt)
    raise AssertionError("unreachable")


def transfer(url: str, part: Path, have: int, size: int) -> None:
    """One request for the bytes after `have`. Raises BrokenOff when it may be tried again, UserError when it may not."""
    from tqdm import tqdm

    headers = {
        "Accept-Encoding": "identity",
        "User-Agent": "dflash-mini-lab",
        **({"Range": f"bytes={have}-"} if have else {}),
    }
    opener = urllib.request.build_opener(SameScheme)
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=SILENCE_S) as answer:
            have = accepted_start(answer, url, have, size)
            with (
                part.open("ab" if have else "wb") as file,
                tqdm(total=size, initial=have, unit="B", unit_scale=True, disable=None) as bar,
            ):
                while block := answer.read(min(BLOCK, size - have + 1)):
                    have += len(block)
                    if have > size:
                        raise UserError(f"{url}: refused: more than the {size:,} bytes of the manifest.")
                    file.write(block)
                    bar.update(len(block))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is longer than what the server has
            part.unlink(missing_ok=True)
        elif error.code < 500 and error.code != 429:
            raise UserError(f"{url}: the server says {error.code} {error.reason}.") from error
        raise BrokenOff(f"the server says {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise  # ours, not the network's
        raise BrokenOff(f"the transfer broke off ({getattr(error, 'reason', None) or error or type(error).__name__})") from error
    if have < size:
        raise BrokenOff(f"the transfer ended after {have:,} of {size:,} bytes")


def accepted_start(answer: http.client.HTTPResponse, url: str, have: int, size: int) -> int:
    """The position that the body starts at: `have` if the server resumes, else 0. Refuses a body of another size unread."""
    if answer.status == 206:
        sent = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
        if not have or sent is None or int(sent[1]) != have or sent[2] not in ("*", str(size)):
            raise UserError(f"{url}: refused: the server sent another part than the one asked for, or of a file of another size.")
    else:
        have = 0
    length = answer.headers.get("Content-Length")
    if length is not None and length != str(size - have):
        raise UserError(f"{url}: refused: the server offers {length} bytes instead of {size - have:,}.")
    return have
