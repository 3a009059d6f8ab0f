from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from dflash_mini_lab.benchmark.run import choose_prompts
from dflash_mini_lab.catalog import TARGETS
from dflash_mini_lab.prompts import Prompt, encode_prompts, load_prompts, refuse_overlap, training_seeds, written_requests
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.types import UserError


def written(folder: Path, content: bytes, name: str = "mine.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"One?\nTwo, with \xc3\xa9.\n",
        b"\xef\xbb\xbfOne?\r\n\r\nTwo, with \xc3\xa9.\r\n",
        b"One?\rTwo, with \xc3\xa9.",
        b'["One?", "Two, with \xc3\xa9."]',
        b'\xef\xbb\xbf["One?",\r\n "Two, with \xc3\xa9."]\r\n',
        b'{"prompts": [{"text": "One?"}, "Two, with \\u00e9."]}',
    ],
    ids=["text", "BOM and CRLF", "CR", "JSON", "JSON with BOM and CRLF", "object"],
)
def test_a_users_file_may_be_text_or_json_with_any_line_ends(tmp_path: Path, content: bytes) -> None:
    prompts = load_prompts(written(tmp_path, content))
    assert [(prompt.id, prompt.text) for prompt in prompts] == [("prompt-1", "One?"), ("prompt-2", "Two, with é.")]


def test_ids_and_categories_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path, b'[{"id": "a", "category": "code", "text": "x"}]', "p.json")
    assert load_prompts(path) == [Prompt("a", "code", "x")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'["One?", "  "]', "'prompt-2' is empty"),
        (b'[{"id": "greeting", "text": ""}]', "'greeting' is empty"),
        (b"\n \n", "no prompt"),
        (b"[]", "no prompt"),
        (b'["One?", 7]', "prompt 2 is neither"),
        (b'[{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]', "two prompts have the id 'a'"),
        (b'["One?"', "not valid JSON"),
        (b'{"questions": []}', "expected a list"),
        (b"\xff\xfeO\x00", "not UTF-8"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_file_and_prompt(tmp_path: Path, content: bytes, said: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        load_prompts(tmp_path / "nowhere.txt")


ONE, OTHER = Prompt("one", "own", "What is a kite?"), Prompt("other", "own", "What is a boat?")


def test_an_overlap_with_calibration_names_the_prompt() -> None:
    with pytest.raises(UserError, match="'one' is also calibration prompt 'twin'"):
        refuse_overlap([OTHER, ONE], [Prompt("twin", "own", "what  is a KITE")], [])


@pytest.mark.parametrize("held_out", [([ONE], [OTHER]), ([OTHER], [ONE])], ids=["benchmark", "calibration"])
def test_an_overlap_with_a_training_seed_names_the_prompt(held_out: tuple[list[Prompt], list[Prompt]]) -> None:
    with pytest.raises(UserError, match="'one' is also a training seed"):
        refuse_overlap(*held_out, ["Who am I?", "What is a kite?"])


def test_sets_without_an_overlap_pass() -> None:
    refuse_overlap([ONE], [OTHER], ["What is a kite for?"])


def test_training_seeds_are_patterns_times_values(tmp_path: Path) -> None:
    seeds = {"groups": [{"patterns": ["What is {x}?", "Draw {x}."], "values": ["a kite", "a boat"]}]}
    path = written(tmp_path, json.dumps(seeds).encode(), "seeds.json")
    assert sorted(training_seeds(path)) == ["Draw a boat.", "Draw a kite.", "What is a boat?", "What is a kite?"]


def test_written_requests_are_the_groups_without_a_pattern(tmp_path: Path) -> None:
    groups = [{"patterns": ["Draw {x}."], "values": ["a kite"]}, {"patterns": ["{x}"], "values": ["Who flew the first kite?"]}]
    path = written(tmp_path, json.dumps({"groups": groups}).encode(), "seeds.json")
    assert written_requests(path) == ["Who flew the first kite?"]
    assert sorted(training_seeds(path)) == ["Draw a kite.", "Who flew the first kite?"]


def test_no_written_request_shares_five_words_in_a_row_with_a_held_out_prompt() -> None:
    requests = written_requests(TARGETS["smollm2-135m"].training_file)
    assert len(requests) == len(set(requests)) > 6000
    held_out = runs_of_words([prompt.text for part in choose_prompts(Settings()) for prompt in part])
    assert not runs_of_words(requests) & held_out


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    with pytest.raises(UserError, match="'one' has 15 tokens; this target takes at most 14"):
        encode_prompts([ONE], lambda text: [1] * len(text), 15)
    assert encode_prompts([ONE], lambda text: [1] * len(text), 16) == {"one": [1] * 15}


@pytest.mark.parametrize("target", ["smollm2-135m", "lfm2.5-350m", "qwen3-0.6b"])
def test_the_labs_own_sets_are_held_out_from_each_other(target: str) -> None:
    measured, calibration = choose_prompts(Settings(target=target))
    assert len(measured) == 6
    assert len(calibration) == 4
    assert len({prompt.category for prompt in measured}) == 6


def test_limits_take_the_first_prompts() -> None:
    measured, calibration = choose_prompts(Settings(prompt_limit=2, calibration_prompt_limit=0))
    assert [prompt.id for prompt in measured] == ["sky", "sailor"]
    assert calibration == []


def test_no_topic_of_the_training_seeds_occurs_in_a_held_out_prompt() -> None:
    groups = json.loads(TARGETS["smollm2-135m"].training_file.read_text(encoding="utf-8"))["groups"]
    values = {value.casefold() for group in groups for value in group["values"]}
    measured, calibration = choose_prompts(Settings())
    for prompt in (*measured, *calibration):
        words = f" {' '.join(re.findall(r'[a-z0-9]+', prompt.text.casefold()))} "
        assert not [value for value in values if f" {value} " in words], prompt.id


def runs_of_words(texts: list[str], length: int = 5) -> set[tuple[str, ...]]:
    found = (re.findall(r"\w+", text.casefold()) for text in texts)
    return {tuple(words[start : start + length]) for words in found for start in range(len(words) - length + 1)}


def test_the_base_model_s_openings_are_its_own() -> None:
    """An opening that begins as another does is not held out, so no five words in a row may be shared, also with the others'."""
    entry, others = TARGETS["qwen3-0.6b"], TARGETS["smollm2-135m"]
    measured, calibration = choose_prompts(Settings(target=entry.name))
    seeds = list(training_seeds(entry.training_file))
    assert len(seeds) == len(set(seeds)) == 24
    sets = [runs_of_words([prompt.text for prompt in prompts]) for prompts in (measured, calibration)]
    sets += [runs_of_words(seeds), runs_of_words([p.text for part in choose_prompts(Settings(target=others.name)) for p in part])]
    for one, other in combinations(sets, 2):
        assert not one & other


def test_a_user_may_not_measure_on_a_training_seed(tmp_path: Path) -> None:
    path = written(tmp_path, b"Write a haiku about jazz music.")
    with pytest.raises(UserError, match="'prompt-1' is also a training seed"):
        choose_prompts(Settings(prompts=path))
