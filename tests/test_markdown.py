"""Tables for documents: what they are made from, and that a document's marks are taken seriously."""

from __future__ import annotations

import copy

import pytest
from sample import add_tuning, interrupt, sample_benchmark

from dflash_mini_lab.report.markdown import BLOCKS, block, table, with_blocks

SAMPLE = sample_benchmark()
DOCUMENT = "# Title\n\n<!-- run: begin -->\nold\n<!-- run: end -->\n\nBetween.\n\n<!-- cost: begin -->\n<!-- cost: end -->\n"


def lines(name: str, benchmark: dict) -> list[str]:
    return block(name, benchmark).splitlines()[1:-1]


def test_only_what_lies_between_marks_is_made_anew_and_only_once() -> None:
    made = with_blocks(DOCUMENT, SAMPLE)
    assert "old" not in made
    assert made.startswith("# Title\n\n<!-- run: begin -->\n")
    assert "\n<!-- run: end -->\n\nBetween.\n\n<!-- cost: begin -->\n| rows W |" in made
    assert with_blocks(made, SAMPLE) == made
    assert with_blocks("no marks", SAMPLE) == "no marks"


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("<!-- speed: begin -->\n<!-- speed: end -->", "no block 'speed'; known: results, run, cost"),
        ("<!-- run: begin -->\n", "no partner"),
        ("<!-- run: begin -->\n<!-- cost: end -->", "no partner"),
        (DOCUMENT + "<!-- run: end -->", "no partner"),
    ],
)
def test_a_mark_that_means_nothing_is_refused(document: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        with_blocks(document, SAMPLE)


def test_a_table_is_one_row_of_heads_and_one_for_each_line() -> None:
    assert table(("", "x"), [["a|b", 1]]) == "| | x |\n|---|---|\n| a\\|b | 1 |"


def test_the_cost_curve_has_a_line_for_each_row_count() -> None:
    found = lines("cost", SAMPLE)
    assert [line.split(" | ")[0] for line in found[2:10]] == [f"| {rows}" for rows in range(1, 9)]
    assert found[2].startswith("| 1 | 1.00× | ")


def test_phases_and_shares_are_those_of_the_results() -> None:
    benchmark = copy.deepcopy(SAMPLE)
    arm = benchmark["results"]["arms"]["01"]
    arm["rounds"], arm["phase_seconds"] = 10, {"draft": 0.5, "select": 0.25, "verify": 3.0, "rest": 0.25}
    (found,) = (line for line in lines("phases", benchmark) if line.startswith("| DFlash |"))
    cells = [cell.strip().replace("\u202f", " ") for cell in found.split("|")[1:-1]]
    assert cells[1:7] == ["50.0 ms", "25.0 ms", "300 ms", "25.0 ms", "400 ms", "75 %"]


def test_rates_stand_before_the_stock_products_and_a_run_without_plans_says_so() -> None:
    benchmark = copy.deepcopy(SAMPLE)
    rates, stock = {"1": 20.0, "3": 1.0, "8": 30.0}, {"1": 10.0, "3": 1.0, "8": 5.0}
    plan = {"out_features": 8, "in_features": 4, "storage": "oneDNN prepacked"}
    benchmark["linear_plans"] = [{**plan, "gigabytes_per_second": rates, "stock_gigabytes_per_second": stock}]
    assert lines("plans", benchmark)[:3] == [
        "| weights | stored | 1 row | 8 rows |", "|---|---|---|---|", "| 8 × 4 | oneDNN prepacked | 20.0 / 10.0 | 30.0 / 5.0 |"
    ]  # fmt: skip
    for plans in ([], [{**plan, "storage": "plain", "gigabytes_per_second": {}, "stock_gigabytes_per_second": {}}]):
        benchmark["linear_plans"] = plans
        assert lines("plans", benchmark) == ["This run measured no linear layer: all are stock ones."]
        assert lines("head", benchmark) == ["In this run no plan of the LM head was measured."]


def test_the_head_is_the_tallest_weight_on_the_hidden_state() -> None:
    benchmark = copy.deepcopy(SAMPLE)
    benchmark["target"] |= {"hidden_size": 500, "dtype": "float32"}
    rates = {"gigabytes_per_second": {"1": 20.0}, "stock_gigabytes_per_second": {"1": 10.0}}
    shapes = ((100_000, 500, "8-bit screen"), (500, 500, "oneDNN prepacked"), (200_000, 9, "oneDNN prepacked"))
    benchmark["linear_plans"] = [{"out_features": out, "in_features": into, "storage": way, **rates} for out, into, way in shapes]
    assert lines("head", benchmark) == [
        "In this run the LM head of 100,000 × 500 was screened in 8 bits. When the layers were planned, "
        "the screen, without the exact rows behind it, took 10.0 ms for one row; the stock product, 20.0 ms."
    ]


def test_tuned_widths_stand_beside_the_cost_models() -> None:
    assert "No width was tuned" in lines("tuning", SAMPLE)[0]
    benchmark = add_tuning(sample_benchmark())
    entry = benchmark["tuning"]["methods"]["01"]
    (found,) = (line for line in lines("tuning", benchmark) if line.startswith("| DFlash |"))
    assert entry["agree"]
    assert found == f"| DFlash | {entry['chosen']} | {entry['analytic']['chosen']} | ✓ |"
    (found,) = (line for line in lines("tuning", benchmark) if line.startswith("| ACT |"))
    assert found.endswith("| 3 | 6 | within the noise, +1.2 ± 2.8% |")


def test_an_ablation_is_named_where_the_run_is() -> None:
    benchmark = copy.deepcopy(SAMPLE)
    benchmark["settings"]["ablations"] = ["no-bonus", "full-logits"]
    assert "; an ablation: no-bonus, full-logits." in block("run", benchmark)
    assert "; an ablation: no-bonus, full-logits." in block("results", benchmark)
    assert "ablation" not in block("results", SAMPLE)


def test_a_run_s_minutes_and_memory_are_told_where_they_are_known() -> None:
    benchmark = copy.deepcopy(SAMPLE)
    benchmark |= {"created": "2026-01-02T10:00:00Z", "finished": "2026-01-02T10:31:00Z"}
    benchmark["execution"] = {"peak_memory_bytes": 1_500_000_000}
    (told,) = lines("resources", benchmark)
    assert "took 31 minutes once the model was there" in told
    assert told.endswith("Its peak memory was 1.5\u202fGB.")
    benchmark["execution"]["memory"] = {"before_bytes": 300_000_000}
    (told,) = lines("resources", benchmark)
    assert told.endswith("Its peak memory was 1.5\u202fGB, of which 300.0\u202fMB were held when it began.")
    benchmark |= {"finished": None, "execution": None}
    (told,) = lines("resources", benchmark)
    assert "took an unknown time" in told
    assert told.endswith("Its peak memory was not recorded.")


def test_each_machine_has_a_column_and_what_it_did_not_run_is_a_dash() -> None:
    other = copy.deepcopy(SAMPLE)
    other["machine"]["cpu"], other["settings"]["threads"] = "Another", 1
    other["results"]["arms"].pop("01")
    other["arms"] = [arm for arm in other["arms"] if arm["key"] != "01"]
    text = block("machines", SAMPLE, [other]).splitlines()[1:-1]
    assert text[0].endswith(" | Another, 1 thread |")
    assert {line.count("|") for line in text} == {4}
    (method,) = (line for line in text if line.startswith("| DFlash |"))
    assert "×" in method
    assert method.endswith("| – |")
    assert block("machines", other) != block("machines", SAMPLE)


@pytest.mark.parametrize("name", BLOCKS)
def test_an_unfinished_run_has_every_block(name: str) -> None:
    unfinished = interrupt(sample_benchmark(), 0)
    assert lines(name, unfinished)
    unfinished["verify_cost"], unfinished["results"] = None, None
    assert lines(name, unfinished)
