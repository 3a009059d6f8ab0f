"""The words of the report, explained: (id, term, meaning). The page prints them all; its tables link to them."""

from __future__ import annotations

TERMS: tuple[tuple[str, str, str], ...] = (
    (
        "target",
        "Target (verifier)",
        "The language model whose text you want. In speculative decoding it only checks proposals, "
        "several at once, and its own greedy choice always wins: that is why the text cannot change.",
    ),
    (
        "drafter",
        "Drafter",
        "The small network that proposes the next few tokens in one pass, from the target's own hidden states. "
        "A poor drafter costs time, never correctness.",
    ),
    (
        "method",
        "Method",
        "The rule that turns the drafter's scores into a proposal. Methods differ only here; the loop that "
        "verifies and rolls back is the same for all.",
    ),
    (
        "normal",
        "Normal (method 00)",
        "Cached greedy decoding with the target alone, on the fastest one-token path there is. "
        "It is 1.00× by definition, and everything else is compared with it.",
    ),
    (
        "anchor",
        "Anchor, slot, round",
        "A round starts from the anchor, the last token known; the drafter fills the slots after it; "
        "the target checks anchor and proposal in one call, keeps what agrees, and adds one token of its own.",
    ),
    ("width", "Verify width W", "Rows of one target call, the anchor included: W = 6 checks five proposed tokens."),
    (
        "new",
        "New tokens",
        "What the reader of the text gets: cut at the budget and after the first stop token, never counted beyond.",
    ),
    (
        "throughput",
        "Throughput (tok/s)",
        "New tokens divided by decode seconds, the median over runs. Reading the prompt (prefill) is "
        "not in it; it is given apart, as the time to the first token.",
    ),
    (
        "speedup",
        "Speed-up",
        "Decode time of Normal divided by that of the method, for the same prompt in the same repeat; "
        "over all of them, the geometric mean. The brackets hold a 95\u202f% bootstrap interval over prompts; a single "
        "measurement has none.",
    ),
    (
        "floor",
        "Noise floor",
        "Normal runs twice, as two arms. Whatever differs between them is noise: a speed-up whose interval "
        "overlaps that of Normal over itself, or that has no interval, is called “no difference”.",
    ),
    (
        "tau",
        "τ, acceptance length",
        "New tokens per target call, prefill not counted; 1 for Normal. The tables show the mean over "
        "requests (macro); all tokens over all calls (micro) stands beside it, since published tools disagree.",
    ),
    ("acceptance", "Acceptance rate", "Accepted drafts divided by proposed drafts, over all rounds."),
    (
        "slot",
        "Acceptance by slot",
        "Joint: how often this slot and all before it were right. Conditional: how often this slot was right "
        "when all before it were. Of a tree, a slot is right where any of its tokens there goes on the accepted path.",
    ),
    (
        "cost",
        "Verify cost v(W)",
        "Time of a target call with W rows divided by the time of one with a single row, measured in this run. "
        "Where it stays near 1, checking several tokens costs no more than making one.",
    ),
    ("draftcost", "Draft cost c", "Drafting, selecting and bookkeeping of one round, in units of one single-row decode."),
    ("breakeven", "Break-even τ", "c + v(W): the acceptance length from which a method is faster than Normal."),
    (
        "expected",
        "Expected speed-up",
        "E(W) / (c + v(W)), from the measured acceptance and the cost curve. It stands beside the "
        "measured speed-up so that the two can be checked against each other.",
    ),
    (
        "exact",
        "Exact, tie, violation",
        "Every run's tokens are compared with plain greedy decoding by a separate, unmodified path. At the first "
        "difference, it is a tie if the two tokens' scores were closer than twice the numerical difference between the "
        "paths, else a "
        "violation. An arm with a violation gets no speed-up.",
    ),
    ("peer", "Peer", "Another implementation, run in the same schedule and held to the same gate."),
    ("work", "Guidance work", "Candidate scores that a method computes in a round, beyond the drafter's own."),
    ("warmup", "Warm-up", "Cells that run first, stay in the raw data, and count in no number here."),
)
