"""docs/adding-a-method.md does what it says: its file and its test run as they stand. docs/methods.md knows every method."""
from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.test_layers import PACKAGE, violations
from tests.tiny_models import ScriptedDrafter, TickingClock, plain_greedy, random_ids, tiny_target

from dflash_mini_lab import methods
from dflash_mini_lab.benchmark.arms import make_arms
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.methods import METHODS, by_key
from dflash_mini_lab.types import Method

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def blocks() -> tuple[str, str]:
    """The method's file and its test."""
    method, test = BLOCK.findall((DOCS / "adding-a-method.md").read_text(encoding="utf-8"))
    return method, test


@pytest.fixture
def echo(blocks: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Method:
    """The page followed: its file is a module of the package, its method the last of the table."""
    module = ModuleType("dflash_mini_lab.methods.m16_echo")
    exec(compile(blocks[0], "m16_echo.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(methods, "METHODS", (*METHODS, module.ECHO))
    return module.ECHO


def test_the_page_s_own_test_passes(echo: Method, blocks: tuple[str, str]) -> None:
    names: dict = {}
    exec(compile(blocks[1], "test_echo.py", "exec"), names)
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 1
    names[tests[0]]()


def test_the_new_method_is_found_becomes_an_arm_and_decodes_exactly(echo: Method) -> None:
    assert by_key("16") is by_key("echo") is echo
    assert make_arms(("00", "16"), (), 6, None, {})[-1].settings == {"candidates": 4, "bonus": 0.5}
    prompt = random_ids(6, 0)
    answer = plain_greedy("llama", prompt, 20)
    for kind in ("right", "random"):
        drafter = ScriptedDrafter(kind, len(prompt), answer, 6)
        assert list(decode(tiny_target("llama", "lean"), prompt, echo, 20, TickingClock(), drafter).tokens) == answer


def test_the_new_file_keeps_the_layers(blocks: tuple[str, str]) -> None:
    assert violations(PACKAGE / "methods" / "m16_echo.py", blocks[0]) == []


def test_the_readme_lists_every_method_in_order() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\d) \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    assert rows == [(method.key, method.name) for method in METHODS]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
def test_every_method_has_its_paragraph_and_its_row(method: Method) -> None:
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    assert f"\n## {method.key} {method.name}\n" in text
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {method.key} {method.name} |"))
    _, _, *cells, _ = row.split("|")
    needs, _, grid = (tuple(word.strip() for word in cell.split(",") if word.strip()) for cell in cells)
    assert needs == method.needs
    assert grid == (("that of 10",) if method.settings_of else tuple(method.grid))
    paragraph = text.split(f"\n## {method.key} {method.name}\n")[1].split("\n## ")[0]
    for name in () if method.settings_of or method.key == "07" else method.settings:
        assert f"`{name}`" in paragraph
