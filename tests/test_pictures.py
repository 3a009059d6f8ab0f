"""The pictures of docs/methods.md: a telling round of every method, from the committed run; and the address that leads to it."""

from __future__ import annotations

import html
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample import sample_benchmark
from sample_rounds import add_rounds, known, rounds, slot, trees
from test_readme import ROOT, committed
from test_report import Page

sys.path.insert(0, str(ROOT / "tools"))
import picture_methods
import png

from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.report import render
from dflash_mini_lab.report.pictures import markdown, picture

TOOL = ROOT / "tools" / "picture_methods.py"
PICTURES = ROOT / "docs" / "methods"
RUN = committed()
PICTURED = [method for method in METHODS if method.key in RUN["rounds"]["methods"]]
"""A new method has no picture before a run with it is committed."""
browser = picture_methods.browser()
needs_a_browser = pytest.mark.skipif(browser is None, reason="no Chromium on the PATH")

kept = known(30, 10, [slot(11), slot(12)], [11, 12], [11, 12, 13], 2)
"""All accepted, nothing of the method's in it."""

late = known(30, 10, [slot(11), slot(12), slot(13)], [11, 12], [11, 14, 13], 1)
"""Cut, and yet not wholly accepted."""


def recorded(*found: dict[str, Any], key: str = "08") -> dict[str, Any]:
    benchmark = add_rounds(sample_benchmark(prompts=1, repeats=1, peers=()))
    if found:
        benchmark["rounds"]["methods"] = {key: {"exact": True, "of": 40, "rounds": list(found)}}
    return benchmark


@pytest.mark.parametrize("method", PICTURED, ids=lambda method: method.slug)
def test_every_method_s_section_has_its_picture_of_the_committed_run(method: Any) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {method.key} {method.name}\n")[1].split("\n## ")[0]
    ((words, name),) = re.findall(r"^!\[((?:[^\]\\]|\\.)*)\]\((.*)\)$", section, re.MULTILINE)
    assert len(words) > 40
    content = (ROOT / "docs" / name).read_bytes()
    assert len(content) <= 150_000
    found = picture(method.key, RUN)
    assert png.source(content) == picture_methods.source(RUN, found), f"run tools/{TOOL.name}"
    width, height = struct.unpack(">II", dict(png.chunks(content))[b"IHDR"][:8])
    assert width == picture_methods.SIZE[0]
    assert 300 < height < 1500


def test_there_is_no_other_picture_and_all_are_a_megabyte_at_most() -> None:
    assert [method.key for method in PICTURED][:14] == [f"{number:02d}" for number in range(1, 15)]
    assert sorted(path.name for path in PICTURES.iterdir()) == [f"{method.key}.png" for method in PICTURED]
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 1_000_000


@pytest.mark.parametrize(
    ("found", "number"),
    [
        ([rounds()[3], kept, rounds()[0]], 3),  # a change that was accepted, before any number of accepted tokens
        ([late, rounds()[1]], 2),  # so is an end just where the drafter would have failed
        ([rounds()[3], kept], 2),  # a change past the verify width is none
        ([kept, rounds()[2]], 2),  # an empty proposal shows more of a method than nothing
        ([rounds()[4], kept, kept], 2),  # the first of equals
    ],
)
def test_the_round_is_one_in_which_the_method_is_seen(found: list[dict[str, Any]], number: int) -> None:
    assert picture("08", recorded(*found)).round == number


def test_a_method_that_changed_nothing_is_not_said_to_have() -> None:
    assert "\n`#explorer-08-round-1`. In none of 2 recorded rounds did it change" in markdown("08", recorded(kept, kept))
    assert "\n`#explorer-08-round-2`. In 1 of 2 recorded rounds it changed" in markdown("08", recorded(kept, rounds()[0]))
    assert markdown("02", recorded(kept)) == "The committed run recorded no round of this method."


def test_of_trees_the_round_is_shown_whose_accepted_path_left_the_first_choices_most_often() -> None:
    benchmark = recorded(trees()[2], trees()[1], trees()[0], key="15")
    assert picture("15", benchmark).round == 3
    assert "`. In 1 of 3 recorded rounds it had a token accepted that was not the" in markdown("15", benchmark)


def test_hostile_tokens_do_not_end_the_alternative_text() -> None:
    benchmark = recorded(kept)
    benchmark["rounds"]["texts"]["13"] = "](http://evil.example)<b>`*"
    assert r"“\](http://evil.example)\<b\>\`\*”" in markdown("08", benchmark)


def test_every_round_has_an_address_on_the_page_once() -> None:
    ids = Page(render(recorded())).attributes("id")
    assert len(ids) == len(set(ids))
    expected = [f"explorer-{key}-round-{number}" for key, count in (("01", 5), ("08", 2)) for number in range(1, count + 1)]
    assert [name for name in ids if "-round-" in name] == expected
    assert picture("01", recorded()).address == "#explorer-01-round-1"


WATCH = """<script type="module">
const seen = [];
function look() {
  const rounds = [...document.querySelectorAll(".round")].filter((round) => round.checkVisibility());
  seen.push([location.hash, document.querySelector("select").value, rounds.map((round) => round.id)]);
}
const wait = () => new Promise((done) => setTimeout(done, 100));
look();
document.querySelector("[data-step='1']").click();
look();
for (const address of ["#explorer-01-08-round-2", "#explorer-01", "#explorer-09-round-1", "#ranking"]) {
  location.hash = address;
  await wait();
  look();
}
document.body.dataset.seen = JSON.stringify(seen);
</script></body>"""


@needs_a_browser
@pytest.mark.slow
def test_an_address_opens_its_round_and_a_step_changes_the_address(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    watched = re.sub(r"script-src \S+", "script-src 'unsafe-inline';", render(recorded()), count=1)
    page.write_text(watched.replace("</body>", WATCH), encoding="utf-8")
    done = picture_methods.browse(browser, page, "#explorer-01-round-3", "--virtual-time-budget=10000", "--dump-dom")
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr
    assert json.loads(html.unescape(seen[1])) == [
        ["#explorer-01-round-3", "01", ["explorer-01-round-3"]],
        ["#explorer-01-round-4", "01", ["explorer-01-round-4"]],
        ["#explorer-01-08-round-2", "01 08", ["explorer-01-round-2", "explorer-08-round-2"]],
        ["#explorer-01-round-1", "01", ["explorer-01-round-1"]],
        ["#explorer-09-round-1", "01", ["explorer-01-round-1"]],
        ["#ranking", "01", ["explorer-01-round-1"]],
    ]


def run_tool(benchmark: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), str(benchmark), str(folder)]
    return subprocess.run(command, env=variables or None, capture_output=True, text=True, encoding="utf-8")


@needs_a_browser
@pytest.mark.slow
def test_the_tool_writes_a_picture_that_names_its_run_and_round(tmp_path: Path) -> None:
    benchmark, path = recorded(rounds()[3], rounds()[0]), tmp_path / "benchmark.json"
    path.write_text(json.dumps(benchmark), encoding="utf-8")
    done = run_tool(path, tmp_path / "pictures")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "pictures").iterdir()
    assert file.name == "08.png"
    assert png.source(file.read_bytes()) == f"{benchmark['created']} #explorer-08-round-2"
    width, height = struct.unpack(">II", dict(png.chunks(file.read_bytes()))[b"IHDR"][:8])
    assert width == 900
    assert 300 < height < 1000


def test_without_a_browser_the_tool_says_so_in_one_sentence(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name.upper() != "PATH"}
    done = run_tool(tmp_path / "none.json", tmp_path, **variables, PATH=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: no browser to take pictures with")


def filtered(pixels: np.ndarray) -> bytes:
    """A PNG of RGB pixels whose rows take the five filters in turn, by the definition, sample by sample."""
    height, width, step = pixels.shape
    flat, data = pixels.reshape(height, -1).astype(int), b""
    for y, row in enumerate(flat):
        above = flat[y - 1] if y else np.zeros_like(row)
        left, corner = (np.concatenate([np.zeros(step, int), line[:-step]]) for line in (row, above))
        nearest = [min((a, b, c), key=lambda v, p=a + b - c: abs(p - v)) for a, b, c in zip(left, above, corner, strict=True)]
        guess = (0 * row, left, above, (left + above) // 2, np.array(nearest))[y % 5]
        data += bytes([y % 5]) + ((row - guess) % 256).astype(np.uint8).tobytes()
    header = struct.pack(png.HEADER, width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return png.SIGNATURE + b"".join(png.chunk(kind, body) for kind, body in parts)


def from_palette(content: bytes) -> np.ndarray:
    kinds = dict(png.chunks(content))
    width, height = struct.unpack(">II", kinds[b"IHDR"][:8])
    indices = np.frombuffer(zlib.decompress(kinds[b"IDAT"]), np.uint8).reshape(height, width + 1)[:, 1:]
    return np.frombuffer(kinds[b"PLTE"], np.uint8).reshape(-1, 3)[indices]


def test_a_screenshot_keeps_its_pixels_up_to_256_colours() -> None:
    order = np.random.default_rng(5)
    pixels = order.integers(0, 256, (256, 3), np.uint8)[order.integers(0, 256, (20, 17))]
    assert (png.decoded(filtered(pixels)) == pixels).all()
    assert (from_palette(png.encoded(pixels, "a run")) == pixels).all()
    many = np.stack([np.arange(300) // 2, np.arange(300) % 2, np.zeros(300)], axis=1).astype(np.uint8)
    many = np.concatenate([many[:200], many]).reshape(5, 100, 3)  # the first 200 are twice there
    again = from_palette(png.encoded(many, "")).astype(int)
    assert (again[:2] == many[:2]).all()
    assert 0 < np.abs(again - many).max() <= 23


def test_another_file_and_a_damaged_one_are_refused() -> None:
    content = png.encoded(np.zeros((2, 2, 3), np.uint8), "a run")
    assert png.source(content) == "a run"
    for wrong in (b"GIF89a", content[:-1], content.replace(b"a run", b"b run")):
        with pytest.raises(ValueError, match="PNG"):
            png.chunks(wrong)


def test_a_panel_that_fills_the_window_is_refused() -> None:
    pixels = np.zeros((100, 4, 3), np.uint8)
    pixels[:70] = 1
    assert len(picture_methods.without_blank_end(pixels)) == 70 + picture_methods.MARGIN
    pixels[:95] = 1
    with pytest.raises(picture_methods.UserError, match="more than the 100 pixels"):
        picture_methods.without_blank_end(pixels)
