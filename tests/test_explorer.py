"""The mechanism explorer: what a recorded round is shown as, in words and signs; and one script, allowed by its hash."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from sample import sample_benchmark
from sample_rounds import TEXTS, add_rounds, known, rounds, slot, trees
from test_report import EVIL, Page

from dflash_mini_lab.report import render
from dflash_mini_lab.report.explorer import PAIRS, WORK, explorer, parareal, sentence, shown, simple_parareal

DOCS = Path(__file__).resolve().parents[1] / "docs" / "methods.md"
NAMED = {str(token): text for token, text in TEXTS.items()}


def recorded() -> dict:
    return add_rounds(sample_benchmark(prompts=2, repeats=1, peers=()))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "The method proposed 4 tokens, changing slot 2 from “is” to “two” and slot 3 from “low” to “three”. The target "
            "accepted 2, wrote “high” itself, and 2 rows of its cache were rolled back."),
        (1, "The method proposed 1 token. The target accepted it and wrote “tides” itself."),
        (2, "The method proposed nothing: a plain decoding step, in which the target wrote “⏎” itself."),
        (3, "The method proposed 1 token. The target accepted none, wrote “two” itself, "
            "and 1 row of its cache was rolled back."),
        (4, "Nothing was drafted: the target wrote “#19” itself."),
    ],
)  # fmt: skip
def test_every_kind_of_round_is_told_in_its_own_words(number: int, words: str) -> None:
    assert sentence(rounds()[number], NAMED) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "The method proposed 5 tokens in a tree 3 slots deep. The target accepted 2, changing slot 1 from “are” to “is” and "
            "slot 2 from “is” to “two”, wrote “three” itself, and 3 rows of its cache were rolled back."),
        (1, "The method proposed 3 tokens in a tree 2 slots deep. The target accepted none, wrote “two” itself, "
            "and 3 rows of its cache were rolled back."),
        (2, "The method proposed 2 tokens in a tree 2 slots deep. The target accepted all of them and wrote “high” itself."),
    ],
)  # fmt: skip
def test_a_tree_is_told_by_its_depth_and_by_the_path_that_was_accepted(number: int, words: str) -> None:
    assert sentence(trees()[number], NAMED) == words


def drawn(nodes: list[dict]) -> list:
    return [(node["text"], node["outcome"], drawn(node["nodes"])) for node in nodes]


def test_a_tree_is_drawn_each_token_under_the_one_that_it_follows() -> None:
    benchmark = recorded()
    benchmark["rounds"]["methods"]["15"] = {"exact": True, "of": 3, "rounds": trees()}
    *chains, method = explorer(benchmark)["methods"]
    assert not any(known["tree"] for chain in chains for known in chain["rounds"])
    one, two, three = method["rounds"]
    assert drawn(one["tree"]) == [
        ("␣are", "rejected", [("␣is", "rolled", [])]),
        ("␣is", "accepted", [("␣two", "accepted", [("␣low", "rejected", [])])]),
    ]
    assert drawn(two["tree"]) == [("␣are", "rejected", [("␣is", "rolled", [])]), ("␣is", "rejected", [])]
    assert drawn(three["tree"]) == [("␣are", "accepted", [("␣is", "accepted", [("␣low", "unverified", [])])])]
    assert (one["drafted"], one["own"], one["bonus"], one["bonus_slot"]) == (" is two", " three", "␣three", 3)
    assert [(slot["outcome"], slot["changed"], slot["target"]) for slot in one["slots"]] == [
        ("accepted", True, "␣is"), ("accepted", True, "␣two"), ("rejected", False, "␣three")
    ]
    assert [[c["chosen"] for c in slot["candidates"]] for slot in one["slots"]] == [[True, True], [True, True], [True, False]]
    assert [[c["target"] for c in slot["candidates"]] for slot in one["slots"]] == [[False, True], [False, True], [False, True]]
    assert [slot["outcome"] for slot in two["slots"]] == ["rejected", "rolled", "unproposed"]
    page = Page(render(benchmark))
    assert sum(attrs.get("class") == "tree" for _, attrs in page.elements) == 3
    assert sentence(trees()[0], NAMED) in page.text


def test_an_answer_that_ended_within_the_accepted_tokens_is_not_continued_in_words() -> None:
    ended = known(30, 10, [slot(11), slot(12)], [11, 12], [11, 12, 13], 2, committed=2)
    assert sentence(ended, NAMED).endswith("The target accepted all of them and ended its answer within them.")


def test_each_slot_has_its_outcome_and_its_change() -> None:
    method = explorer(recorded())["methods"][0]
    first, cut, _, wide, bare = method["rounds"]
    assert [slot["outcome"] for slot in first["slots"]] == ["accepted", "accepted", "rejected", "rolled"]
    assert [slot["changed"] for slot in first["slots"]] == [False, True, True, False]
    assert [slot["target"] for slot in first["slots"]] == ["␣are", "␣two", "␣high", ""]
    assert [slot["outcome"] for slot in cut["slots"]] == ["accepted", "unproposed", "unproposed"]
    assert [slot["outcome"] for slot in wide["slots"]] == ["rejected", "unverified", "unverified"]
    assert bare["slots"] == []


def test_candidates_say_how_far_they_are_behind_and_which_one_was_chosen() -> None:
    second = explorer(recorded())["methods"][0]["rounds"][0]["slots"][1]["candidates"]
    assert [(c["text"], c["behind"], c["bar"], c["chosen"], c["target"]) for c in second] == [
        ("␣is", "0", 10, False, False),
        ("␣two", "−1.00", 4, True, True),
    ]


def test_the_answer_grows_by_what_each_round_committed() -> None:
    found = explorer(recorded())["methods"][0]["rounds"]
    assert [(r["context"], r["drafted"], r["own"]) for r in found[:3]] == [
        ("There", " are two", " high"),
        ("There are two high", " are", " tides"),
        ("There are two high are tides", "", "\n"),
    ]


def test_a_long_answer_is_shown_from_a_word_s_beginning() -> None:
    benchmark = recorded()
    benchmark["rounds"]["texts"]["10"] = "There" + " and there" * 10
    context = explorer(benchmark)["methods"][0]["rounds"][0]["context"]
    assert context == "…and there" + " and there" * 6


def test_a_token_without_text_is_shown_by_its_number() -> None:
    assert [shown(token, {"1": "a b\n", "2": ""}) for token in (1, 2, 3)] == ["a␣b⏎", "#2", "#3"]


def test_how_much_was_recorded_and_whether_it_is_exact_are_said() -> None:
    page = Page(render(recorded()))
    assert "the first 5 of 31 rounds" in page.text
    assert page.text.count("✗ This answer was not the reference's.") == 1


def test_only_studied_pairs_that_the_run_has_are_offered() -> None:
    found = explorer(recorded())
    assert [pair[:2] for pair in found["pairs"]] == [("01", "08")]
    assert {pair[:2] for pair in PAIRS} == {("10", "13"), ("12", "14"), ("01", "08"), ("01", "15")}


def test_the_work_of_every_method_is_that_of_the_docs() -> None:
    rows = [line.split("|") for line in DOCS.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d\d ", line)]
    assert {row[1].split()[0]: row[3].strip() for row in rows if row[3].strip()} == WORK


def test_without_a_script_every_round_is_on_the_page_and_the_controls_are_hidden() -> None:
    page = Page(render(recorded()))
    for kept in rounds():
        assert sentence(kept, NAMED) in page.text
    tags = [(tag, attrs) for tag, attrs in page.elements if attrs.get("class") in ("controls", "round", "over none")]
    assert [("hidden" in attrs) == (attrs["class"] != "round") for _, attrs in tags] == [True] * len(tags)
    assert sum(attrs["class"] == "round" for _, attrs in tags) == 7


def test_the_one_script_is_allowed_by_its_hash_and_is_not_there_without_rounds() -> None:
    html = render(recorded())
    (script,) = re.findall(r"<script type=\"module\">(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [value for value in Page(html).attributes("content") if "default-src" in value]
    assert f"; script-src 'sha256-{digest}'; base-uri 'none'" in policy
    assert not re.findall(r"https?://|innerHTML|eval\(|fetch\(|import\b", script)
    bare = render(sample_benchmark(prompts=1, repeats=1))
    assert "<script" not in bare
    assert "script-src" not in bare
    assert "holds no recorded rounds" in bare


def test_hostile_tokens_stay_text() -> None:
    benchmark = recorded()
    benchmark["rounds"]["texts"] = dict.fromkeys(benchmark["rounds"]["texts"], EVIL)
    benchmark["prompts"][0]["text"] = EVIL
    page = Page(render(benchmark))
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not {"img", "iframe", "form"} & {tag for tag, _ in page.elements}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on") or name in ("style", "src")]


def test_the_fits_of_12_and_14_are_told_in_a_sentence_each() -> None:
    benchmark = recorded()
    assert parareal(benchmark)["words"] == (
        "After 2 rounds of correction the draft's scores are nearer to the target's: the squared error went from 4.00 to 1.50, "
        "and the same token came first in 53.0\u202f% of slots, 50.0\u202f% before. "
        "31.0\u202f% of the target's scores were too small to have been kept; a floor stands for them."
    )
    fit = benchmark["drafter"]["heads"]["parareal"]["diagnostics"]
    for last, said in ((3.9, "are hardly nearer to the target's"), (4.1, "are further from the target's")):
        fit["mse"] = [4.0, last]
        assert said in parareal(benchmark)["words"]
    benchmark = recorded()
    assert parareal(benchmark)["lines"][1] == ("round 1", "2.000", "0.500", "52.0\u202f%")
    assert simple_parareal(benchmark)["words"].endswith(
        "the estimate raises that to 74.0\u202f%. It switched a slot in 12.0\u202f% of blocks, rightly in 60.0\u202f% of those."
    )
    gap = benchmark["drafter"]["heads"]["gap"]["diagnostics"]
    gap |= {"switch_rate": 0.0, "precision": None}
    assert "It never switched a slot" in simple_parareal(benchmark)["words"]


@pytest.mark.parametrize("heads", [None, {}, {"parareal": {"parameters": 1}}, {"gap": {"diagnostics": {"held_out_slots": 0}}}])
def test_a_fit_that_reported_nothing_is_left_out(heads: dict | None) -> None:
    benchmark = recorded()
    benchmark["drafter"]["heads"] = heads
    assert parareal(benchmark) is simple_parareal(benchmark) is None


def test_a_run_with_every_method_stays_under_two_megabytes() -> None:
    benchmark = recorded()
    method = benchmark["rounds"]["methods"]["01"]
    wide = rounds()[0] | {"slots": [slot(11, 12, 13, 14, 15)] * 15, "proposal": [11] * 15, "greedy": [11] * 16}
    method["rounds"] = [wide | {"proposed": 15, "accepted": 9, "committed": 10}] * 8
    benchmark["rounds"]["methods"] = {f"{number:02d}": method for number in range(1, 16)}
    assert len(render(benchmark).encode()) < 2_000_000
