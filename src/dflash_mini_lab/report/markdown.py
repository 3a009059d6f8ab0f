"""Results as a Markdown table for documents, made from a benchmark.json and never typed."""

from __future__ import annotations

from dflash_mini_lab.report.format import dig, fixed, interval, moment, percent, times
from dflash_mini_lab.report.ranking import Benchmark, rank
from dflash_mini_lab.report.verdict import verdict_sentence

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def results_block(benchmark: Benchmark) -> str:
    """The verdict, the run's facts and a table of its arms, between BEGIN and END."""
    machine, settings = benchmark["machine"], benchmark["settings"]
    rows = [
        f"| {row.name} | {fixed(row.speed, 1)} | {times(row.mean)} {interval(row.low, row.high)} | {fixed(row.tau)} "
        f"| {percent(row.acceptance)} | {'✓' if row.exact else '✗'} {row.exact_runs}/{row.runs} |"
        for row in rank(benchmark)
    ]
    facts = (
        f"{benchmark['target']['name']}, {benchmark['target']['dtype']}, on {machine['cpu']} with {settings['threads']} threads; "
        f"{dig(benchmark, 'settings', 'prompt_limit')} prompts × {settings['tokens']} tokens × {settings['repeats']} repeats; "
        f"{moment(benchmark['created'])}."
    )
    head = ["| | tok/s | speed-up [95 %] | τ | accepted | exact |", "|---|---|---|---|---|---|"]
    return "\n".join([BEGIN, f"**{verdict_sentence(benchmark)}.**", facts, "", *head, *rows, END])


def with_results(document: str, benchmark: Benchmark) -> str:
    """`document` with the text between its BEGIN and END replaced. Raises ValueError where it has none."""
    before, after = document.index(BEGIN), document.index(END) + len(END)
    return document[:before] + results_block(benchmark) + document[after:]
