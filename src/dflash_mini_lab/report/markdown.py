"""Results as Markdown tables for documents, made from a benchmark.json and never typed.

A document says where a table belongs with a pair of comments, `<!-- NAME: begin -->` and `<!-- NAME: end -->`; BLOCKS knows the
names. Spelling and figures are those of the page: the same view models make both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from dflash_mini_lab.report import facts, measured, pictures
from dflash_mini_lab.report.explorer import WORK
from dflash_mini_lab.report.format import dig, fixed, interval, moment, percent, plain, plural, seconds, size, times
from dflash_mini_lab.report.ranking import Benchmark, rank
from dflash_mini_lab.report.tuning import agreement, difference
from dflash_mini_lab.report.verdict import verdict_sentence

MARKED = re.compile(r"<!-- (?P<name>[\w-]+): begin -->\n(?P<old>.*?)<!-- (?P=name): end -->", re.DOTALL)
MARK = re.compile(r"<!-- [\w-]+: (?:begin|end) -->")
SHOWN_ROWS = ("1", "2", "4", "6", "8")
"""Row counts of the table of weight-reading rates, of those that were measured."""


def with_blocks(document: str, benchmark: Benchmark, others: Sequence[Benchmark] = ()) -> str:
    """`document` with the text between each pair of marks made anew; one without marks stays as it is. `others`: runs of other
    machines, which the block `machines` sets beside this one.

    Raises ValueError for a name that BLOCKS lacks, and for a mark without its partner.
    """
    pairs = list(MARKED.finditer(document))
    for found in pairs:
        if found["name"] not in BLOCKS:
            raise ValueError(f"there is no block {found['name']!r}; known: {', '.join(BLOCKS)}")
    if len(MARK.findall(document)) != 2 * len(pairs):
        raise ValueError("a block's mark has no partner")
    return MARKED.sub(lambda found: block(found["name"], benchmark, others), document)


def block(name: str, benchmark: Benchmark, others: Sequence[Benchmark] = ()) -> str:
    """One block between its marks."""
    text = machines(benchmark, *others) if name == "machines" else BLOCKS[name](benchmark)
    return f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->"


def results(benchmark: Benchmark) -> str:
    """The verdict, the run's facts and a line for each arm."""
    lines = [
        [
            row.name,
            fixed(row.speed, 1),
            f"{times(row.mean)} {interval(row.low, row.high)}",
            fixed(row.tau),
            percent(row.acceptance),
            f"{'✓' if row.exact else '✗'} {row.exact_runs}/{row.runs}",
        ]
        for row in rank(benchmark)
    ]
    heads = ("", "tok/s", "speed-up [95 %]", "τ", "accepted", "exact")
    return f"**{verdict_sentence(benchmark)}.**\n{run_facts(benchmark)}\n\n{table(heads, lines)}"


def run_facts(benchmark: Benchmark) -> str:
    """What was measured, where and when, in one sentence."""
    machine, settings = benchmark["machine"], benchmark["settings"]
    ablations = dig(benchmark, "settings", "ablations")
    return (
        f"{benchmark['target']['name']}, {benchmark['target']['dtype']}, on {machine['cpu']} with {settings['threads']} threads; "
        f"{dig(benchmark, 'settings', 'prompt_limit')} prompts × {settings['tokens']} tokens × {settings['repeats']} repeats; "
        f"{moment(benchmark['created'])}{f'; an ablation: {plain(ablations)}' if ablations else ''}."
    )


def cost(benchmark: Benchmark) -> str:
    """v(W), with the quartiles of its times."""
    found = measured.verify_cost(benchmark, None)
    if not found:
        return "This run has no cost curve."
    lines = [[rows, factor, median, quartiles] for rows, factor, median, quartiles in found["table"]]
    return table(("rows W", "v(W)", "median", "quartiles"), lines) + f"\n\nAfter {found['context']} tokens of context."


def machines(*benchmarks: Benchmark) -> str:
    """A column for each run: its machine and drafter, what a verifier call costs there, and what two methods made of it."""
    columns = [_machine(benchmark) for benchmark in benchmarks]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heads = ("", *(f"{run['machine']['cpu']}, {plural(run['settings']['threads'], 'thread')}" for run in benchmarks))
    return table(heads, [[name, *(column.get(name, "–") for column in columns)] for name in names])


def _machine(benchmark: Benchmark) -> dict[str, str]:
    curve = benchmark["verify_cost"] or {"rows": [], "ratio": []}
    ratios = dict(zip(curve["rows"], curve["ratio"], strict=True))
    files = dig(benchmark, "drafter", "files", default=[])
    drafter = next((file["sha256"][:8] for file in files if file["name"] == "model.safetensors"), "–")
    rows = {row.key: row for row in rank(benchmark)}
    facts = {"lab, drafter": f"{benchmark['lab_version']}, {drafter}", "00, tok/s": fixed(rows["00"].speed, 1)}
    if "generate" in rows:
        facts["transformers generate"] = times(rows["generate"].mean)
    facts |= {f"v({width})": times(ratios.get(width)) for width in (3, 6, 8)}
    facts["draft cost c"] = fixed(dig(benchmark, "results", "arms", "01", "draft_cost"), 3)
    for row in (rows[key] for key in ("01", "15") if key in rows):
        facts[row.name] = f"{times(row.mean)} {interval(row.low, row.high)}".strip()
        facts[f"{row.name}: W, τ"] = f"{row.width or '–'}, {fixed(row.tau)}"
    return facts


def phases(benchmark: Benchmark) -> str:
    """Per arm: what a round takes, phase by phase, and the share of it that is the verifier's."""
    rows = rank(benchmark)
    found = measured.phases(benchmark, rows)
    if not found:
        return "This run has no rounds."
    shares = {row.name: _verifier_share(benchmark, row.key) for row in rows}
    lines = [[*lane["table"][:6], shares[lane["name"]], lane["table"][6]] for lane in found["lanes"]]
    heads = ("", *(label.lower() for _, label in measured.PHASES), "a round", "verifier's share", "a token")
    return table(heads, lines)


def _verifier_share(benchmark: Benchmark, arm: str) -> str:
    spent = dig(benchmark, "results", "arms", arm, "phase_seconds", default={})
    whole = sum(spent.values())
    return percent(spent["verify"] / whole if whole else None)


def economics(benchmark: Benchmark) -> str:
    """Per method: what a round costs beside the verifier, the τ that this needs, and both speed-ups."""
    found = measured.break_even(benchmark, rank(benchmark))
    if not found:
        return "This run has no method with a draft."
    heads = ("", "W", "draft cost c", "break-even τ", "τ", "expected", "measured")
    return table(heads, [lane["table"] for lane in found["lanes"]])


def plans(benchmark: Benchmark) -> str:
    """Per weight shape: how it is stored, and the rate at which products of few rows read it, the stock product's behind."""
    found = facts.linear_plans(benchmark)
    measured_rows = {rows for group in found["groups"] for rows, *_ in group["lines"]} if found else set()
    shown = [rows for rows in SHOWN_ROWS if rows in measured_rows]
    if not found or not shown:
        return "This run measured no linear layer: all are stock ones."
    lines = []
    for group in found["groups"]:
        rates = {rows: f"{here} / {stock}" for rows, here, stock, _ in group["lines"]}
        lines.append([group["shape"], group["storage"], *(rates.get(rows, "–") for rows in shown)])
    heads = ("weights", "stored", *(f"{rows} row{'s' * (rows != '1')}" for rows in shown))
    return f"{table(heads, lines)}\n\n{found['words']}"


def head(benchmark: Benchmark) -> str:
    """How this run's LM head was stored, and what reading it took."""
    hidden = benchmark["target"]["hidden_size"]
    known = [plan for plan in benchmark["linear_plans"] if plan["in_features"] == hidden]
    plan = max(known, key=lambda plan: plan["out_features"], default=None)
    rate = dig(plan, "gigabytes_per_second", "1")
    if not plan or not rate:
        return "In this run no plan of the LM head was measured."
    stock = dig(plan, "stock_gigabytes_per_second", "1")
    width = 4 if benchmark["target"]["dtype"] == "float32" else 2
    gigabytes = plan["out_features"] * plan["in_features"] * width / 1e9
    screened = "screen" in plan["storage"]
    what = f"screened in {plan['storage'].split('-')[0]} bits" if screened else f"read in full ({plan['storage']})"
    took = "the screen, without the exact rows behind it, took" if screened else "it took"
    return (
        f"In this run the LM head of {plan['out_features']:,} × {plan['in_features']} was {what}. When the layers were planned, "
        f"{took} {1e3 * gigabytes / rate:.1f} ms for one row; the stock product, {1e3 * gigabytes / stock:.1f} ms."
    )


def resources(benchmark: Benchmark) -> str:
    """How long the run took, and the most memory that it held."""
    took = minutes_between(benchmark["created"], benchmark.get("finished"))
    peak, before = dig(benchmark, "execution", "peak_memory_bytes"), dig(benchmark, "execution", "memory", "before_bytes")
    arms, cells = plural(len(benchmark["arms"]), "arm"), plural(len(benchmark["cells"]), "cell")
    chosen = [("calibration", dig(benchmark, "calibration", "seconds")), ("tuning", dig(benchmark, "tuning", "seconds"))]
    choosing = " and ".join(f"{seconds(spent)} of {name}" for name, spent in chosen if spent)
    return (
        f"The committed run ({run_facts(benchmark).removesuffix('.')}) took "
        f"{'an unknown time' if took is None else plural(took, 'minute')} once the model was there: {arms} in {cells}, warm-ups "
        f"included{f', and {choosing}' if choosing else ''}. Its peak memory was {size(peak) if peak else 'not recorded'}"
        f"{f', of which {size(before)} were held when it began' if peak and before else ''}."
    )


def minutes_between(start: str, end: str | None) -> int | None:
    if not end:
        return None
    first, last = (datetime.fromisoformat(stamp.replace("Z", "+00:00")) for stamp in (start, end))
    return round((last - first).total_seconds() / 60)


def tuning(benchmark: Benchmark) -> str:
    """Per method: the width that was fastest on the calibration prompts, and the cost model's."""
    entries = dig(benchmark, "tuning", "methods", default={})
    if not entries:
        return "No width was tuned in this run: every method verifies its whole block."
    names = {arm["key"]: arm["name"] for arm in benchmark["arms"]}
    agree = {True: "✓", False: "✗"}
    lines = [
        [
            names.get(key, key),
            plain(entry["chosen"]),
            plain(dig(entry, "analytic", "chosen")),
            difference(dig(benchmark, "tuning", "agreement", "methods", key)) or agree.get(entry["agree"], "–"),
        ]
        for key, entry in entries.items()
    ]
    return f"{table(('', 'fastest W', 'cost model', 'agree'), lines)}\n\n{agreement(benchmark).capitalize()}."


def table(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [heads, *lines]
    text = ["| " + " | ".join(str(cell).strip().replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([text[0].replace("|  |", "| |", 1), "|" + "---|" * len(heads), *text[1:]])


BLOCKS: dict[str, Callable[[Benchmark], str]] = {
    "results": results,
    "run": run_facts,
    "cost": cost,
    "machines": machines,
    "phases": phases,
    "economics": economics,
    "plans": plans,
    "head": head,
    "resources": resources,
    "tuning": tuning,
    **{f"picture-{key}": partial(pictures.markdown, key) for key in WORK},
}
