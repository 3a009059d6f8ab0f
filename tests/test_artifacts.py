"""The manifest is the root of trust: what it does not pin, to the bit, is never used. Attacks come from a real local server."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_mini_lab import artifacts
from dflash_mini_lab.artifacts import MANIFEST, fetch_file, locate, prepared_folder, read_manifest, verify, write_manifest
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.types import UserError

BODY = bytes(range(256)) * 40
DIGEST = hashlib.sha256(BODY).hexdigest()


def quiet(line: str) -> None: ...


# The manifest.


def manifest_of(tmp_path: Path, **change: Any) -> Path:
    content: dict[str, Any] = {
        "schema_version": 1,
        "target": "t",
        "files": [{"name": "a.safetensors", "bytes": len(BODY), "sha256": DIGEST, **change}],
    }
    path = tmp_path / MANIFEST
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../a", "..", ".", "", "/etc/passwd", "a/b", "a\\b",
        "..\\a", "C:a", "C:\\a", "\\\\host\\share", "a\0b", "a\nb", ".hidden", "-rf",
        "a.", "a ", "nul", "CON.txt", "com1", "lpt9.bin",
        "a:stream", "～a", "a" * 200, MANIFEST, MANIFEST.upper(), 7, None, ["a"],
    ],
)  # fmt: skip
def test_a_name_that_could_be_another_place_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(UserError, match="refused the file name"):
        read_manifest(manifest_of(tmp_path, name=name))


@pytest.mark.parametrize("size", [0, -1, 1.0, "10", None, True, 2**60])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(UserError, match="refused the size"):
        read_manifest(manifest_of(tmp_path, bytes=size))


@pytest.mark.parametrize("digest", ["", DIGEST.upper(), DIGEST[:-1], DIGEST + "0", None, "g" * 64, DIGEST + "\n"])
def test_a_digest_that_is_none_is_refused(tmp_path: Path, digest: Any) -> None:
    with pytest.raises(UserError, match="refused the SHA-256"):
        read_manifest(manifest_of(tmp_path, sha256=digest))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"files": []}', "[" * 100_000,
        '{"schema_version": 1, "target": "t", "files": []}',
        '{"schema_version": 2, "target": "t", "files": []}',
        '{"schema_version": 1, "target": "t", "files": {"a": 1}}',
        '{"schema_version": 1, "target": "t", "files": [{"name": "a"}]}',
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=MANIFEST):
        read_manifest(tmp_path / MANIFEST)


def test_a_file_listed_twice_is_refused_whatever_its_case(tmp_path: Path) -> None:
    path = manifest_of(tmp_path)
    content = json.loads(path.read_text())
    content["files"].append({**content["files"][0], "name": "A.safetensors"})
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="one twice"):
        read_manifest(path)


def test_a_written_manifest_pins_every_file_and_reads_back(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(BODY)
    (tmp_path / "config.json").write_text("{}")
    manifest = read_manifest(write_manifest(tmp_path, "t", {"steps": 3}))
    assert [file.name for file in manifest.files] == ["a.bin", "config.json"]
    assert verify(tmp_path, manifest) == {}
    write_manifest(tmp_path, "t")  # again: the manifest does not list itself
    assert read_manifest(tmp_path / MANIFEST) == manifest


@pytest.mark.parametrize("position", [0, 1, 255, len(BODY) // 2, len(BODY) - 2, len(BODY) - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_seen(tmp_path: Path, position: int, bit: int) -> None:
    damaged = bytearray(BODY)
    damaged[position] ^= 1 << bit
    (tmp_path / "a.safetensors").write_bytes(damaged)
    assert list(verify(tmp_path, read_manifest(manifest_of(tmp_path)))) == ["a.safetensors"]


@pytest.mark.parametrize("length", [0, 1, len(BODY) // 2, len(BODY) - 1, len(BODY) + 1])
def test_a_truncated_or_padded_file_is_seen_by_its_size(tmp_path: Path, length: int) -> None:
    (tmp_path / "a.safetensors").write_bytes((BODY + b"x")[:length])
    problem = verify(tmp_path, read_manifest(manifest_of(tmp_path)))["a.safetensors"]
    assert problem == f"has {length:,} bytes instead of {len(BODY):,}"


# A server that can lie.

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


def honest(request: BaseHTTPRequestHandler, body: bytes) -> None:
    start = int((request.headers["Range"] or "bytes=0-")[6:-1])
    request.send_response(206 if request.headers["Range"] else 200)
    if request.headers["Range"]:
        request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    request.send_header("Content-Length", str(len(body) - start))
    request.end_headers()
    request.wfile.write(body[start:])


def no_range(request: BaseHTTPRequestHandler, body: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def lying_length(request: BaseHTTPRequestHandler, body: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(body) + 1))
    request.end_headers()
    request.wfile.write(body + b"x")


def endless(request: BaseHTTPRequestHandler, body: bytes) -> None:
    request.send_response(200)
    request.end_headers()
    for _ in range(100_000):  # 1 GB if nobody stops reading
        try:
            request.wfile.write(body)
        except OSError:
            return


def wrong_part(request: BaseHTTPRequestHandler, body: bytes) -> None:
    request.send_response(206)
    request.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def other_bytes(request: BaseHTTPRequestHandler, body: bytes) -> None:
    honest(request, bytes(len(body)))


def redirect(where: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler, body: bytes) -> None:
        request.send_response(302)
        request.send_header("Location", where)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def status(code: int) -> Answer:
    def answer(request: BaseHTTPRequestHandler, body: bytes) -> None:
        request.send_response(code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def cut(at: int) -> Answer:
    """Promise everything that was asked for, send the first `at` bytes of it, hang up."""

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> None:
        start = int((request.headers["Range"] or "bytes=0-")[6:-1])
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        request.wfile.write(body[start : start + at])

    return answer


class Server(ThreadingHTTPServer):
    """Gives the answers of `script` in turn, the last one forever; `seen` are the ranges that were asked for."""

    script: list[Answer]
    seen: list[str | None]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(self.headers["Range"])
        answer = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        answer(self, BODY)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(artifacts, "PAUSE_S", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(("127.0.0.1", 0), Handler)
    server.script, server.seen = [honest], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(server: Server, folder: Path) -> Path:
    fetch_file(f"{server.base}/a.bin", folder / "a.bin", len(BODY), DIGEST, quiet)
    return folder / "a.bin"


def test_a_file_arrives_whole_and_leaves_no_part(server: Server, tmp_path: Path) -> None:
    assert fetch(server, tmp_path / "new").read_bytes() == BODY
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("at", [1, 255, 5000, len(BODY) - 1])
def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(server: Server, tmp_path: Path, at: int) -> None:
    server.script = [cut(at), honest]
    assert fetch(server, tmp_path).read_bytes() == BODY
    assert server.seen == [None, f"bytes={at}-"]


def test_a_later_run_goes_on_with_the_part_of_a_killed_one(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BODY[:1000])
    assert fetch(server, tmp_path).read_bytes() == BODY
    assert server.seen == ["bytes=1000-"]


@pytest.mark.parametrize("part", [b"something else", BODY + b"longer", bytes(len(BODY))])
def test_a_part_of_another_file_is_thrown_away_not_trusted(server: Server, tmp_path: Path, part: bytes) -> None:
    (tmp_path / "a.bin.part").write_bytes(part)
    assert fetch(server, tmp_path).read_bytes() == BODY


def shifted(request: BaseHTTPRequestHandler, body: bytes) -> None:
    """The right number of bytes, from one byte too early."""
    start = int(request.headers["Range"][6:-1])
    request.send_response(206)
    request.send_header("Content-Range", f"bytes {start - 1}-{len(body) - 2}/{len(body)}")
    request.send_header("Content-Length", str(len(body) - start))
    request.end_headers()
    request.wfile.write(body[start - 1 : -1])


def test_a_part_from_another_place_than_asked_for_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BODY[:1000])
    server.script = [shifted]
    with pytest.raises(UserError, match="another part than the one asked for"):
        fetch(server, tmp_path)


def test_a_server_that_cannot_resume_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BODY[:1000])
    server.script = [no_range]
    assert fetch(server, tmp_path).read_bytes() == BODY


def test_a_server_that_comes_back_is_waited_for(server: Server, tmp_path: Path) -> None:
    server.script = [status(503), status(429), honest]
    assert fetch(server, tmp_path).read_bytes() == BODY


def test_what_arrived_is_kept_when_the_server_stays_away(server: Server, tmp_path: Path) -> None:
    server.script = [cut(100)]
    with pytest.raises(UserError, match="run again to go on"):
        fetch(server, tmp_path)
    assert (tmp_path / "a.bin.part").read_bytes() == BODY[: 100 * artifacts.TRIES]
    assert not (tmp_path / "a.bin").exists()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lying_length, "offers 10241 bytes instead of 10,240"),
        (endless, "more than the 10,240 bytes"),
        (other_bytes, "its SHA-256 is not the one"),
        (wrong_part, "another part"),
        (status(404), "404"),
        (status(403), "403"),
        (redirect("file:///etc/passwd"), "is not allowed"),
        (redirect("ftp://127.0.0.1/a.bin"), "refused the redirect"),
        (redirect("https://127.0.0.1:1/a.bin"), "refused the redirect"),
    ],
)
def test_a_body_that_is_not_the_pinned_one_is_refused_by_name(
    server: Server, tmp_path: Path, answer: Answer, sentence: str
) -> None:
    (tmp_path / "a.bin").write_bytes(b"what was there before")
    server.script = [answer]
    with pytest.raises(UserError, match="a.bin") as caught:
        fetch(server, tmp_path)
    assert sentence in str(caught.value)
    assert (tmp_path / "a.bin").read_bytes() == b"what was there before"


def test_a_redirect_within_the_scheme_is_followed(server: Server, tmp_path: Path) -> None:
    server.script = [redirect(f"{server.base}/elsewhere"), honest]
    assert fetch(server, tmp_path).read_bytes() == BODY


def test_another_scheme_is_not_even_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only https"):
        fetch_file(f"file://{tmp_path}/x", tmp_path / "a.bin", 1, DIGEST, quiet)


# Where a target's files are.


@pytest.fixture
def places(tmp_path: Path) -> tuple[Settings, Path]:
    repository = tmp_path / "repository"
    (repository / "t").mkdir(parents=True)
    manifest_of(repository / "t")
    return Settings(cache=tmp_path / "cache"), repository


def test_files_beside_the_repositorys_manifest_are_used(places: tuple[Settings, Path]) -> None:
    settings, repository = places
    (repository / "t" / "a.safetensors").write_bytes(BODY)
    assert locate(settings, "t", quiet, repository) == repository / "t"


def test_a_damaged_file_of_the_repository_is_refused_by_name(places: tuple[Settings, Path]) -> None:
    settings, repository = places
    (repository / "t" / "a.safetensors").write_bytes(BODY[:-1] + b"?")
    with pytest.raises(UserError, match=r"a\.safetensors is damaged.*git checkout"):
        locate(settings, "t", quiet, repository)


def test_a_target_that_nobody_pinned_or_prepared_has_none(places: tuple[Settings, Path]) -> None:
    settings, repository = places
    assert locate(settings, "another", quiet, repository) is None


def test_pinned_files_without_an_address_are_none_so_that_the_run_prepares(places: tuple[Settings, Path]) -> None:
    settings, repository = places
    assert locate(settings, "t", quiet, repository) is None


def test_pinned_files_are_downloaded_once_and_then_verified(places: tuple[Settings, Path], server: Server) -> None:
    settings, repository = places
    settings = replace(settings, artifact_base_url=server.base, artifact_release_tag="v1")
    folder = locate(settings, "t", quiet, repository)
    assert folder is not None
    assert (folder / "a.safetensors").read_bytes() == BODY
    assert locate(settings, "t", quiet, repository) == folder
    assert len(server.seen) == 1


def test_a_damaged_download_is_replaced_and_without_an_address_refused(places: tuple[Settings, Path], server: Server) -> None:
    settings, repository = places
    online = replace(settings, artifact_base_url=server.base)
    folder = locate(online, "t", quiet, repository)
    assert folder is not None
    (folder / "a.safetensors").write_bytes(BODY[:-1])
    with pytest.raises(UserError, match=r"a\.safetensors has 10,239 bytes"):
        locate(settings, "t", quiet, repository)
    assert locate(online, "t", quiet, repository) == folder
    assert (folder / "a.safetensors").read_bytes() == BODY


def test_refresh_downloads_again(places: tuple[Settings, Path], server: Server) -> None:
    settings, repository = places
    settings = replace(settings, artifact_base_url=server.base, refresh_artifacts=True)
    locate(settings, "t", quiet, repository)
    locate(settings, "t", quiet, repository)
    assert len(server.seen) == 2


def test_a_drafter_prepared_here_is_used_when_none_is_pinned(places: tuple[Settings, Path]) -> None:
    settings, repository = places
    folder = prepared_folder(settings.cache, "own")
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(BODY)
    write_manifest(folder, "own")
    assert locate(settings, "own", quiet, repository) == folder
    (folder / "a.bin").write_bytes(BODY[1:])
    with pytest.raises(UserError, match=r"a\.bin has 10,239 bytes.*--prepare"):
        locate(settings, "own", quiet, repository)


def test_a_drafter_prepared_here_is_used_when_the_pinned_one_cannot_be_had(places: tuple[Settings, Path]) -> None:
    settings, repository = places
    folder = prepared_folder(settings.cache, "t")
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(BODY)
    write_manifest(folder, "t")
    assert locate(settings, "t", quiet, repository) == folder


def test_an_artifact_folder_with_its_own_manifest_wins(places: tuple[Settings, Path], tmp_path: Path) -> None:
    settings, repository = places
    own = tmp_path / "own"
    own.mkdir()
    (own / "a.bin").write_bytes(BODY)
    write_manifest(own, "t")
    assert locate(replace(settings, artifact_dir=own), "t", quiet, repository) == own
    with pytest.raises(UserError, match="belongs to the target t, not to u"):
        locate(replace(settings, artifact_dir=own), "u", quiet, repository)


def test_an_artifact_folder_without_a_manifest_must_hold_the_pinned_files(places: tuple[Settings, Path], tmp_path: Path) -> None:
    settings, repository = places
    own = replace(settings, artifact_dir=tmp_path / "own")
    with pytest.raises(UserError, match=r"lacks a\.safetensors"):
        locate(own, "t", quiet, repository)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.safetensors").write_bytes(BODY)
    assert locate(own, "t", quiet, repository) == tmp_path / "own"
    with pytest.raises(UserError, match="pins no files for another"):
        locate(own, "another", quiet, repository)
