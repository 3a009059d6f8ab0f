"""Which of flag, variable, --smoke and default wins, and how a bad value is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_mini_lab.settings import GPU, OPTIONS, Settings, cache_folder, resolve


def test_without_flags_and_variables_a_run_has_six_prompts_of_64_tokens_three_times() -> None:
    settings = resolve({}, {})
    assert (settings.prompt_limit, settings.tokens, settings.repeats) == (6, 64, 3)
    assert (settings.target, settings.dtype, settings.output_dir) == ("smollm2-135m", "float32", Path("cpu-reports"))


def test_every_option_has_a_setting_of_its_name() -> None:
    assert {option.field for option in OPTIONS} <= set(vars(Settings()))


VARIABLES = [
    ("CPU_THREADS", "cpu_threads"),
    ("CPU_TOKENS", "tokens"),
    ("CPU_REPEATS", "repeats"),
    ("CPU_PROMPT_LIMIT", "prompt_limit"),
    ("CPU_CALIBRATION_TOKENS", "calibration_tokens"),
    ("CPU_CALIBRATION_PROMPT_LIMIT", "calibration_prompt_limit"),
]


@pytest.mark.parametrize(("variable", "field"), VARIABLES)
def test_a_variable_beats_the_default_and_its_flag_beats_it(variable: str, field: str) -> None:
    assert getattr(resolve({}, {variable: "11"}), field) == 11
    assert getattr(resolve({field: "12"}, {variable: "11"}), field) == 12


@pytest.mark.parametrize(("variable", "field"), VARIABLES)
@pytest.mark.parametrize("bad", ["-1", "1.5", "many", "1e3", "١", "99999999999999"])
def test_a_bad_value_is_named_with_its_variable_or_flag(variable: str, field: str, bad: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}: '{bad}' is not a whole number from "):
        resolve({}, {variable: bad})
    flag = "--" + field.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{flag}: '{bad}' is not a whole number from "):
        resolve({field: bad}, {})


def test_an_empty_variable_counts_as_unset_but_an_empty_flag_is_a_mistake() -> None:
    assert resolve({}, {"CPU_TOKENS": " ", "DFLASH_TARGET": ""}) == resolve({}, {})
    with pytest.raises(ValueError, match=r"^--target: '' is not some text\.$"):
        resolve({"target": ""}, {})


def test_smoke_beats_variables_and_is_beaten_by_flags() -> None:
    settings = resolve({"smoke": True, "repeats": "2"}, {"CPU_TOKENS": "99", "CPU_REPEATS": "9"})
    assert (settings.prompt_limit, settings.tokens, settings.repeats) == (1, 16, 2)


@pytest.mark.parametrize(
    ("field", "bad", "hint"),
    [
        ("dtype", "int8", "one of float32, bfloat16, float16"),
        ("peers", "generate,vllm", "of generate, prompt-lookup"),
        ("methods", " , ", "names separated by commas"),
        ("artifact_base_url", "file:///etc", "https://"),
        ("artifact_base_url", "ftp://host/x", "https://"),
        ("artifact_release_tag", "../up", "a release's tag"),
        ("prepare_minutes", "0", "above 0"),
        ("prepare_minutes", "inf", "above 0"),
        ("prompts", "no/such/file.json", "a file that exists"),
        ("verify_width", "1", "from 2 to"),
        ("tuning_repeats", "0", "from 1 to"),
        ("ablate", "no-bonus,fast", "of full-logits, no-bonus, full-vocabulary, exact-drafter, stock-linear"),
    ],
)
def test_a_bad_flag_says_what_would_have_been_right(field: str, bad: str, hint: str) -> None:
    with pytest.raises(ValueError, match="^--" + field.replace("_", "-")) as caught:
        resolve({field: bad}, {})
    assert hint in str(caught.value)


def test_lists_keep_their_order_and_lose_repetitions() -> None:
    assert resolve({"methods": "08, 01,08"}, {}).methods == ("08", "01")


def test_ablations_have_one_order_and_a_variable_on_either_runner() -> None:
    both = ("full-logits", "no-bonus")
    assert resolve({"ablate": "no-bonus,full-logits"}, {}).ablate == both
    assert resolve({}, {"CPU_ABLATE": "no-bonus, full-logits,no-bonus"}).ablate == both
    assert resolve({}, {"GPU_ABLATE": "no-bonus", "CPU_ABLATE": "full-logits"}, GPU).ablate == ("no-bonus",)
    assert resolve({}, {"CPU_ABLATE": ""}).ablate == ()
    for name in ("stock-linear", "exact-drafter"):
        with pytest.raises(ValueError, match=f"^--ablate {name}: on a GPU"):
            resolve({"ablate": name}, {}, GPU)


@pytest.mark.parametrize(
    "given",
    [
        {"prepare": True, "download_only": True},
        {"artifact_release_tag": "v1"},
        {"refresh_artifacts": True},
        {"tune": True, "calibration_prompt_limit": "0"},
    ],
)
def test_flags_that_contradict_each_other_are_refused(given: dict[str, str | bool]) -> None:
    with pytest.raises(ValueError, match="^--"):
        resolve(given, {})


def test_the_cache_is_where_each_system_keeps_caches() -> None:
    assert cache_folder({"DFLASH_LAB_CACHE": "/big/disk"}, "linux") == Path("/big/disk")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}, "linux") == Path("/x/dflash-mini-lab")
    assert cache_folder({}, "linux") == Path.home() / ".cache/dflash-mini-lab"
    assert cache_folder({}, "darwin") == Path.home() / "Library/Caches/dflash-mini-lab"
    assert cache_folder({"LOCALAPPDATA": "/local"}, "win32") == Path("/local/dflash-mini-lab")
