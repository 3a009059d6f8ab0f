"""The one decode loop: draft → select → verify → commit → roll back. Every method, target, drafter and test uses it.

Greedy throughout, so the acceptance rule is equality: a draft token is accepted while it is the target's own choice, and the
target's token after the last accepted one (the bonus token) becomes the next anchor. Nothing here knows how a target runs.
Without the bonus token, an ablation, a round that accepted drafts commits those alone: the last of them is the next anchor, and
its row is rolled back with the rejected ones. A round that accepted none commits the target's token either way.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_mini_lab.trees import accepted_rows, depth
from dflash_mini_lab.types import (
    Clock,
    Decoded,
    Drafter,
    DrafterSession,
    Heads,
    Method,
    Proposal,
    Session,
    Step,
    Target,
    UserError,
)


def decode(
    target: Target,
    prompt_ids: Sequence[int],
    method: Method,
    budget: int,
    clock: Clock,
    drafter: Drafter | None = None,
    settings: Mapping[str, float] | None = None,
    verify_width: int | None = None,
    bonus: bool = True,
) -> Decoded:
    """Answer `prompt_ids` with up to `budget` new tokens (≥ 1), ending after the first stop token.

    The drafter always drafts its whole block, as it was trained; `verify_width` W (anchor included; default the block size)
    then caps the proposal at W - 1 tokens. Near the budget and near the context's end it shrinks to what can be committed.
    Raises UserError for a prompt that is empty or leaves no room for a token, and for a method without its drafter or heads, or
    of trees on a target that verifies none.
    """
    if not prompt_ids:
        raise UserError("The prompt is empty: there is nothing to continue.")
    if budget < 1:
        raise UserError(f"The budget is {budget} new tokens: at least 1 is needed.")
    if len(prompt_ids) >= target.max_positions:
        raise UserError(f"The prompt has {len(prompt_ids)} tokens; this target takes at most {target.max_positions - 1}.")
    if method.select is not None and drafter is None:
        raise UserError(f"Method {method.key} {method.name} needs a drafter, and this target has none: run with --prepare first.")
    if drafter is not None:
        refuse_without_heads(method, drafter.heads)
    refuse_without_trees(method, target.trees)

    settings = method.settings if settings is None else settings
    slots = 0
    if drafter is not None and method.select is not None:
        slots = min(drafter.block_size, verify_width or drafter.block_size) - 1
    capacity = min(target.max_positions, len(prompt_ids) + budget + slots)

    started = clock.now()
    session = target.start(prompt_ids, capacity, drafter.taps if drafter is not None and slots else None)
    tokens = [session.prefill()]
    drafting = drafter.start(session, capacity, method.needs) if drafter is not None and slots else None
    now = clock.now()
    prefill_seconds = now - started

    steps: list[Step] = []
    committed = [*prompt_ids, tokens[0]]
    while tokens[-1] not in target.stop_ids and len(tokens) < budget and session.length < target.max_positions:
        room = min(slots, budget - len(tokens) - 1, target.max_positions - session.length - 1)
        step, new, now = _round(session, drafting, method, settings, committed, room, target.stop_ids, bonus, clock, now)
        steps.append(step)
        tokens += new
        committed += new
    finish = "stop" if tokens[-1] in target.stop_ids else "budget" if len(tokens) >= budget else "context"
    return Decoded(tuple(tokens), finish, prefill_seconds, tuple(steps))


def refuse_without_heads(method: Method, heads: Heads) -> None:
    """Raises UserError, one sentence, where `heads` lack what the method needs."""
    lacking = [name for name in method.needs if name not in heads.present]
    if lacking:
        what = f"the {' and the '.join(lacking)} head{'s' if len(lacking) > 1 else ''}"
        raise UserError(
            f"Method {method.key} {method.name} needs {what}, which this drafter has not: train it with --prepare, "
            "or leave the method out."
        )


def refuse_without_trees(method: Method, trees: bool) -> None:
    """Raises UserError, one sentence, where the method proposes trees and the target verifies none."""
    if method.trees and not trees:
        raise UserError(
            f"Method {method.key} {method.name} proposes trees, and a model that runs through transformers' own modules cannot "
            "verify one in a single call: leave the method out."
        )


def _round(
    session: Session,
    drafting: DrafterSession | None,
    method: Method,
    settings: Mapping[str, float],
    committed: Sequence[int],
    room: int,
    stop_ids: frozenset[int],
    bonus: bool,
    clock: Clock,
    started: float,
) -> tuple[Step, list[int], float]:
    """One round from `started`; returns its step, the tokens it commits and the time it ended. Phases share their boundary
    readings, so they sum to the round's time exactly."""
    anchor = committed[-1]
    if drafting is None or method.select is None or room < 1:
        before = clock.now()
        if drafting is None:
            new = [session.decode_one(anchor)]
        else:
            new = session.verify([anchor])
            session.keep(1)
        after = clock.now()
        ended = clock.now()
        return Step(1, 0, 0, 1, 0, 0.0, 0.0, after - before, (before - started) + (ended - after)), new, ended

    draft = drafting.draft(committed)
    drafted = clock.now()
    proposal: Proposal = method.select(draft, settings)
    proposed, parents = proposal.tokens[:room], proposal.parents[:room]  # a tree of so few tokens is no deeper
    selected = clock.now()
    rows = [anchor, *proposed]
    greedy = session.verify(rows, [-1, *(parent + 1 for parent in parents)]) if parents else session.verify(rows)
    verified = clock.now()
    path = accepted_rows(proposed, parents or range(-1, len(proposed) - 1), greedy)
    accepted = len(path) - 1
    kept = max(1, accepted + bonus)  # the anchor's row and those of all new tokens but the last, which is the next anchor
    session.keep(path[:kept] if parents else kept)
    new = [greedy[row] for row in path[:kept]]
    for place, token in enumerate(new):
        if token in stop_ids:
            new = new[: place + 1]
            break
    ended = clock.now()
    step = Step(
        rows=1 + len(proposed),
        proposed=len(proposed),
        accepted=accepted,
        committed=len(new),
        work=proposal.work,
        draft=drafted - started,
        select=selected - drafted,
        verify=verified - selected,
        rest=ended - verified,
        depth=depth(parents) if parents else None,
        path=tuple(path[1:]) if parents else (),
    )
    return step, new, ended
