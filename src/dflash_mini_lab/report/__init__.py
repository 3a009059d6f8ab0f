"""The pages, each one self-contained HTML file: a run, two runs compared, and (`site`) an index over several.

Never imports torch, never reaches the network. `view` prepares, `charts` draws, the templates place. Prompts, model output and
machine names are untrusted text: autoescape is on, the page may load nothing, and its one style sheet is allowed by its hash. So
is the mechanism explorer's script, where a run has recorded rounds; no other page runs any.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from dflash_mini_lab.files import replace_file
from dflash_mini_lab.report import comparison_view, view
from dflash_mini_lab.report.comparison import Comparison
from dflash_mini_lab.report.format import visible
from dflash_mini_lab.report.verdict import verdict_sentence

__all__ = ["render", "render_comparison", "verdict_sentence", "write_comparison", "write_report"]

TEMPLATES = Path(__file__).parent / "templates"
_INTERVAL = re.compile(r"\[[0-9.]+–[0-9.]+\]")
PAGES = ("index.html", "report.html")
COMPARISON_PAGE = "compare.html"


def write_report(benchmark: dict[str, Any], folder: Path) -> Path:
    """Write index.html and report.html, the same bytes, beside the benchmark.json that they link; returns index.html.

    Each file is replaced at once, so that a reader, or a run killed half-way, never sees half a page.
    """
    content = render(benchmark).encode("utf-8")
    for name in PAGES:
        replace_file(folder / name, content)
    return folder / PAGES[0]


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write compare.html, replaced at once; returns its path."""
    path = folder / COMPARISON_PAGE
    replace_file(path, render_comparison(comparison).encode("utf-8"))
    return path


def render(benchmark: dict[str, Any]) -> str:
    """The page of a run as text."""
    return fill("page.html.j2", view.page(benchmark))


def render_comparison(comparison: Comparison) -> str:
    """The page of a comparison as text."""
    return fill("compare.html.j2", comparison_view.page(comparison))


def fill(template: str, page: dict[str, Any]) -> str:
    """The template with `page` in it, as one self-contained file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    environment.filters["whole"] = _whole
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "explorer.js").read_text(encoding="utf-8") if page.get("explorer") else ""
    scripts = f"script-src '{_digest(script)}'; " if script else ""
    policy = f"default-src 'none'; style-src '{_digest(style)}'; {scripts}base-uri 'none'; form-action 'none'"
    return environment.get_template(template).render(page=page, style=Markup(style), script=Markup(script), policy=policy)


def _digest(text: str) -> str:
    """As a content security policy names what it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _finalize(value: Any) -> Any:
    return visible(value) if type(value) is str else value  # Markup, a subclass of str, is ours and stays as it is


def _whole(text: str) -> Markup:
    """Text whose intervals do not break across lines."""
    return Markup(_INTERVAL.sub(r'<span class="whole">\g<0></span>', str(escape(visible(text)))))
