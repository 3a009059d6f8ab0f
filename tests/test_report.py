"""The page: safe with hostile text, whole for every state of a run, honest about failures and losses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sample
from sample import add_mismatch, add_tuning, interrupt, sample_benchmark
from sample_rounds import add_rounds

import dflash_mini_lab
from dflash_mini_lab.report import render, write_report

EVIL = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\'"&<b>'
SOURCE = Path(dflash_mini_lab.__file__).parent
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements, ids and text of a page; complains about a tag closed out of turn."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in {self.get_starttag_text()}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert [tag] == [self.open.pop() if self.open else None], f"</{tag}> out of turn at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.elements for key, value in attrs.items() if key == name and value is not None]


def states() -> dict[str, dict]:
    without = sample_benchmark(prompts=2, repeats=1, peers=()) | {
        "drafter": None,
        "linear_plans": [],
        "calibration": {"prompts": [], "seconds": 0.0, "methods": {}},
        "verify_cost": None,
    }
    slow = sample_benchmark(prompts=2)
    slow["results"]["arms"]["08"] |= {"verdict": "slower", "speedup": {"mean": 0.8, "low": 0.78, "high": 0.82}}
    bare = {
        "schema_version": 1,
        "complete": False,
        "target": {"name": "x"},
        "settings": {},
        "machine": {},
        "prompts": [],
        "arms": [],
    }
    partial = sample_benchmark(prompts=2)
    partial["complete"] = False
    partial["results"]["arms"]["08"] = {}
    partial["results"]["arms"]["01"] = dict.fromkeys(partial["results"]["arms"]["01"])
    unlucky = sample_benchmark(prompts=1, repeats=1)
    unlucky["results"]["arms"]["01"] |= {
        "slot_conditional": [0.0, None, None, None, None],
        "slot_joint": [0.0] * 5,
        "accepted_histogram": [0] * 6,
        "tau_macro": float("nan"),
    }
    return {
        "default": sample_benchmark(),
        "smoke": sample_benchmark(prompts=1, repeats=1, tokens=16, peers=()),
        "interrupted": interrupt(sample_benchmark(prompts=2), 1),
        "not started": interrupt(sample_benchmark(prompts=2), 0),
        "violation": add_mismatch(sample_benchmark(prompts=2), "08"),
        "ties": add_mismatch(sample_benchmark(prompts=2), "08", "tie"),
        "baseline wrong": add_mismatch(sample_benchmark(prompts=2), "00"),
        "noisy": sample_benchmark(prompts=3, jitter=0.3),
        "no drafter": without,
        "tuned": add_tuning(sample_benchmark(prompts=2)),
        "tuned without calibration": add_tuning(sample_benchmark(prompts=2)) | {"calibration": without["calibration"]},
        "recorded": add_rounds(sample_benchmark(prompts=2)),
        "losing": slow,
        "bare": bare,
        "partial results": partial,
        "nothing accepted": unlucky,
        "baseline only": sample_benchmark(prompts=2, methods=(), peers=()),
    }


STATES = states()


def hostile() -> dict:
    benchmark = sample_benchmark(prompts=2, repeats=1)
    benchmark["prompts"][0] |= {"text": EVIL, "category": EVIL}
    benchmark["reference"][0]["text"] = EVIL
    benchmark["machine"]["cpu"] = benchmark["target"]["name"] = benchmark["arms"][2]["name"] = benchmark["arms"][3]["summary"] = (
        EVIL
    )
    benchmark["command"] = ["run_cpu.py", EVIL]
    benchmark["settings"][EVIL] = EVIL
    benchmark["created"] = EVIL
    benchmark["drafter"]["provenance"] = {EVIL: {EVIL: [EVIL]}}
    benchmark["prompts"][1]["id"] = benchmark["reference"][1]["prompt"] = EVIL
    for cell in benchmark["cells"]:
        cell["prompt"] = EVIL if cell["prompt"] == "primes" else cell["prompt"]
    add_mismatch(benchmark, "01")
    benchmark["gate"]["mismatches"][0]["reference_top2"][0]["text"] = EVIL
    return benchmark


@pytest.mark.parametrize("state", STATES)
def test_every_state_of_a_run_gives_a_well_formed_page_with_unique_ids(state: str) -> None:
    page = Page(render(STATES[state]))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    pointed = [
        name for label in ("aria-labelledby", "aria-describedby") for value in page.attributes(label) for name in value.split()
    ]
    pointed += [value[1:] for value in page.attributes("href") if value.startswith("#")]
    assert set(pointed) <= set(ids)
    assert "None" not in page.text
    assert "nan" not in page.text
    assert "Undefined" not in page.text


def test_hostile_text_never_becomes_markup() -> None:
    html = render(hostile())
    page = Page(html)
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "img", "iframe", "object", "embed", "base", "form", "link"}
    assert not [
        name for _, attrs in page.elements for name in attrs if name.startswith("on") or name in ("style", "src", "srcset")
    ]
    assert page.text.count("<script>alert(1)</script>") >= 10
    assert {value for value in page.attributes("href") if not value.startswith("#")} == {"benchmark.json"}


def test_control_characters_and_lone_surrogates_do_not_reach_the_page() -> None:
    benchmark = sample_benchmark(prompts=1, repeats=1)
    benchmark["reference"][0]["text"] = "a\x00b\x1b[2Jc\ud800d\u202ee\r\nf"
    html = render(benchmark)
    assert "a\ufffdb\ufffd[2Jc\ufffdd\ufffde\nf" in html
    html.encode("utf-8")


def test_the_policy_allows_the_one_style_sheet_by_its_hash_and_nothing_else() -> None:
    html = render(sample_benchmark(prompts=1, repeats=1))
    (policy,) = [attrs["content"] for tag, attrs in Page(html).elements if attrs.get("http-equiv") == "Content-Security-Policy"]
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert html.index("Content-Security-Policy") < html.index("<style>")


def test_the_page_loads_nothing() -> None:
    html = render(sample_benchmark())
    assert not re.findall(r"https?://|url\(|@import|src=", html)


def test_both_files_hold_the_same_bytes_beside_the_raw_data(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "reports"
    written = write_report(sample_benchmark(prompts=1, repeats=1), folder)
    assert written == folder / "index.html"
    assert written.read_bytes() == (folder / "report.html").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "report.html"]


def test_a_page_that_cannot_be_rendered_leaves_the_last_one_as_it_was(tmp_path: Path) -> None:
    written = write_report(sample_benchmark(prompts=1, repeats=1), tmp_path)
    before = written.read_bytes()
    with pytest.raises(KeyError):
        write_report(sample_benchmark(prompts=1, repeats=1) | {"prompts": [{}]}, tmp_path)
    assert written.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_violation_comes_first_and_its_arm_has_no_speedup_anywhere() -> None:
    benchmark = add_mismatch(sample_benchmark(prompts=3), "08")
    benchmark["results"]["arms"]["08"]["speedup"] = {"mean": 3.33, "low": 3.22, "high": 3.77}
    benchmark["results"]["arms"]["08"]["expected_speedup"] = 3.33
    page = Page(render(benchmark))
    assert not re.search(r"3\.33|3\.22|3\.77", page.text)
    assert page.text.index("Output changed: ACT") < page.text.index("Violation: ACT") < page.text.index("Every arm of the run")
    assert "First differs at new token 6. There, the reference preferred its own token by 0.8125" in page.text


def test_a_violation_in_a_warm_up_alone_is_not_called_exact() -> None:
    benchmark = sample_benchmark(prompts=2, repeats=1)
    warmup = benchmark["cells"][0]
    next(run for run in warmup["runs"] if run["arm"] == "08")["tokens"][3] += 1
    benchmark["gate"] |= {
        "verdict": "violation",
        "mismatches": [
            {
                "arm": "08",
                "prompt": warmup["prompt"],
                "repeat": -1,
                "position": 3,
                "reference_top2": [],
                "gap": None,
                "largest_logit_difference": None,
                "verdict": "violation",
            }
        ],
    }
    page = Page(render(benchmark))
    assert "✗ in warm-up" in page.text
    assert "Violation: ACT, prompt tides , warm-up" in page.text
    assert "One of the two texts ended there." in page.text


def test_tokens_that_differ_without_the_gate_saying_so_count_as_a_violation() -> None:
    benchmark = sample_benchmark(prompts=2)
    next(run for run in benchmark["cells"][1]["runs"] if run["arm"] == "08")["tokens"] = [1, 2, 3]
    assert "Output changed: ACT failed the exactness gate" in render(benchmark)


def test_an_arm_that_lost_is_shown_with_its_figure() -> None:
    page = Page(render(STATES["losing"]))
    assert "0.80× [0.78–0.82]" in page.text
    assert "slower" in page.text


def test_a_wide_noise_floor_is_said_above_the_ranking() -> None:
    page = Page(render(STATES["noisy"]))
    assert STATES["noisy"]["results"]["noise_floor"]["wide"]
    assert page.text.index("Noisy machine") < page.text.index("Every arm of the run")


def test_a_run_without_peers_or_drafter_says_so_in_words() -> None:
    page = Page(render(STATES["no drafter"]))
    assert "This run had no drafter." in page.text
    assert "has not been measured" in page.text


def test_a_default_run_stays_under_400_kb() -> None:
    assert len(render(sample_benchmark()).encode()) < 400_000


def test_tables_and_charts_speak_to_a_screen_reader() -> None:
    page = Page(render(sample_benchmark()))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("caption") == tags.count("table") > 5
    assert all(attrs.get("scope") for tag, attrs in page.elements if tag == "th")
    assert all(attrs.get("role") == "img" or attrs.get("aria-hidden") == "true" for tag, attrs in page.elements if tag == "svg")
    assert tags.count("h1") == 1
    assert dict(page.elements[0][1])["lang"] == "en"


def test_the_report_never_imports_torch() -> None:
    code = (
        "import sys, dflash_mini_lab.report, dflash_mini_lab.report.terminal, dflash_mini_lab.report.progress; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert done.stdout.strip() == "[]"


def test_the_sample_file_is_what_its_builder_makes() -> None:
    assert sample.FILE.read_text(encoding="utf-8") == sample.written(sample_benchmark(prompts=3, repeats=2))


@pytest.mark.parametrize("state", ["default", "smoke", "interrupted", "violation", "no drafter", "recorded"])
def test_the_sample_follows_the_schema(state: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    file = SOURCE / "benchmark.schema.json"
    if not file.exists():
        pytest.skip("no schema yet")
    jsonschema.validate(json.loads(json.dumps(STATES[state])), json.loads(file.read_text(encoding="utf-8")))
