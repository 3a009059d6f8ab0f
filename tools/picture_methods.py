"""The pictures of docs/methods.md: the report's mechanism explorer, at one telling round of each method.

    python tools/picture_methods.py docs/results/smollm2-135m/benchmark.json docs/methods
    python tests/test_readme.py

The second command writes the words around them. For maintainers: it needs Chromium, or Chrome, on the PATH, and the lab's
environment (`.venv`), of which jinja2 and numpy are enough. A picture names its run and round: a test finds an old one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import png

from dflash_mini_lab import benchmark_file
from dflash_mini_lab.files import replace_file
from dflash_mini_lab.report import render
from dflash_mini_lab.report.pictures import Picture, picture
from dflash_mini_lab.types import UserError

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZE = (900, 2000)
"""Pixels of the window. The height is more than any round needs: what is blank below it is cut off."""
ONLY_THE_EXPLORER = """
body { max-width: none; padding: 0 .75rem .75rem; }
.skip, header, footer, section:not(#explorer), section > :not(.explorer) { display: none; }
section { padding: 0; }
"""
MARGIN = 12
SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description="Take a picture of each method in a run's mechanism explorer.")
    parser.add_argument("benchmark", type=Path, metavar="benchmark.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    try:
        take_all(given.benchmark, given.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def take_all(path: Path, folder: Path) -> None:
    """Write a picture for every method with recorded rounds. Raises UserError."""
    program = browser()
    if not program:
        raise UserError(f"no browser to take pictures with: put Chromium or Chrome on the PATH (one of {', '.join(PROGRAMS)}).")
    benchmark = benchmark_file.read(path)
    keys = (benchmark.get("rounds") or {}).get("methods", {})
    pictures = [found for key in keys if (found := picture(key, benchmark))]
    if not pictures:
        raise UserError(f"{path} holds no recorded rounds: there is nothing to take a picture of.")
    with TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        page.write_text(panel_alone(render(benchmark)), encoding="utf-8")
        for found in pictures:
            pixels = without_blank_end(png.decoded(screenshot(program, page, found)))
            content = png.encoded(pixels, source(benchmark, found))
            replace_file(folder / found.file, content)
            print(f"{found.file}: round {found.round} of {found.of}, {len(content) / 1000:.0f} kB", flush=True)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def panel_alone(html: str) -> str:
    """The page with everything but the explorer out of sight; it still may load nothing."""
    html = re.sub(r"style-src \S+", "style-src 'unsafe-inline';", html, count=1)
    return html.replace("</head>", f"<style>{ONLY_THE_EXPLORER}</style></head>", 1)


def screenshot(program: str, page: Path, found: Picture) -> bytes:
    """The window at the picture's address, as Chromium's own PNG. Raises UserError where it wrote none."""
    out = page.with_name("screenshot.png")
    out.unlink(missing_ok=True)
    done = browse(program, page, found.address, f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={out}")
    if not out.is_file():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"{program} took no picture of {found.address}: {last}.")
    return out.read_bytes()


def browse(program: str, page: Path, address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """One run of the browser, without a window, in light colours and with a profile beside the page. Raises UserError."""
    command = [program, "--headless", "--disable-gpu", "--hide-scrollbars", "--disable-lcd-text", "--force-device-scale-factor=1"]
    command += ["--no-sandbox"]  # in a container Chromium starts only so; the page is the lab's own and loads nothing
    command += ["--no-first-run", f"--user-data-dir={page.with_name('profile')}", "--blink-settings=preferredColorScheme=1"]
    command += [*flags, page.as_uri() + address]
    try:
        return subprocess.run(command, capture_output=True, timeout=SECONDS, text=True, encoding="utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        raise UserError(f"{program} took more than {SECONDS} s over {address}.") from None


def source(benchmark: benchmark_file.Benchmark, found: Picture) -> str:
    """What a picture says about itself: its run and its round."""
    return f"{benchmark['created']} {found.address}"


def without_blank_end(pixels: np.ndarray) -> np.ndarray:
    """`pixels [height, width, 3]` up to the margin below the panel. Raises UserError where the window was too small."""
    height = int(np.flatnonzero((pixels != pixels[-1, -1]).any(axis=(1, 2)))[-1]) + 1 + MARGIN
    if height > 0.9 * len(pixels):
        raise UserError(f"a round needs more than the {len(pixels)} pixels of the window.")
    return pixels[:height]


if __name__ == "__main__":
    sys.exit(main())
