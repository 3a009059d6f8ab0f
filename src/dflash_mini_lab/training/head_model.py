"""The extra heads of methods 02–05, 07, 09 and 11 as trainable modules, and the loss of each. No optimiser, no data here.

Parameter names are the tensor names of `heads.safetensors`. Tables have a row for every id of the target's vocabulary; the
losses are over the candidates that the drafter kept, since nothing else can be chosen: a slot whose true token is not among
them trains no choice. Over a whole draft vocabulary the same losses cost a hundred times as much.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_mini_lab.training.frozen import Drafted, FrozenDrafter
from dflash_mini_lab.training.losses import UNTRAINED, dpace_weights, slot_cross_entropy

JUMP_WEIGHT = 0.5
"""λ of method 04, with which the jump head's scores enter what 05 is distilled from."""
TRUE_TOKEN_SHARE = 0.7
"""Share of the cross-entropy to the true token in 05's loss; the rest is the divergence from 04's distribution."""


class Heads(nn.Module):
    """Every head for one drafter. Untrained, none changes a score: its second table, or its output, is zero."""

    def __init__(self, frozen: FrozenDrafter, rank: int, offsets: tuple[int, ...], jump_inner: int) -> None:
        """`offsets`: the slots, 1-based, that the jump head and the fused residual score."""
        super().__init__()
        slots, hidden, vocabulary = frozen.config.block_size - 1, frozen.config.hidden_size, frozen.config.vocabulary
        start = principal_rows(frozen.embedding, rank)
        self.pair = Pair(start, hidden)
        self.jump = Jump(offsets, hidden, jump_inner, frozen.config.eps)
        spread = hidden**-0.5 / frozen.model.norm.weight.square().mean().sqrt().item()
        self.fused = Fused(offsets, hidden, vocabulary, rank, spread)
        self.markov = Markov(start, slots)
        self.confidence = Confidence(hidden + rank)

    def losses(self, drafted: Drafted, frozen: FrozenDrafter, kept: int) -> dict[str, Tensor]:
        """One loss a head, each over that head's parameters only. `kept`: candidates a slot that method 09 chooses from."""
        previous, choices = drafted.previous, drafted.choices
        pair = drafted.scores + self.pair(previous, drafted.context, drafted.ids)
        markov = drafted.scores + self.markov(previous, drafted.ids)
        jump_logits = frozen.head(frozen.model.norm(self.jump(drafted.context)))
        at = self.jump.places
        jump_labels = drafted.draft_labels[..., at]
        columns = drafted.columns[..., at, :]
        likely = drafted.scores[..., at, :]
        lookahead = likely + JUMP_WEIGHT * jump_logits.detach().gather(-1, columns)
        fused = likely + self.fused(drafted.hidden, drafted.ids)
        chosen, before = self.markov.choose(drafted.kept(kept))
        confidence = self.confidence(drafted.hidden, self.markov.previous.detach()[before])
        return {
            "pair": choice_loss(pair, choices),
            "jump": _mean_where(slot_cross_entropy(jump_logits.log_softmax(-1), jump_labels), jump_labels >= 0),
            "fused": distilled_loss(fused, lookahead, choices[..., at], drafted.labels[..., at] >= 0),
            "markov": choice_loss(markov, choices),
            "confidence": survival_loss(confidence, chosen, drafted.labels),
        }


class Pair(nn.Module):
    """`pair(u, v) = r^-1/2 Σ_j A[u,j] g_j(C) Bt[v,j]`, `g(C) = tanh(W C + b)`."""

    def __init__(self, start: Tensor, hidden: int) -> None:
        super().__init__()
        self.previous, self.next = nn.Parameter(start.clone()), nn.Parameter(torch.zeros_like(start))
        self.gate = nn.Linear(hidden, start.shape[1])
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)

    def forward(self, previous: Tensor, context: Tensor, ids: Tensor) -> Tensor:
        """`previous [N, A, S]`, `context [N, A, H]`, `ids [N, A, S, K]` → `[N, A, S, K]`."""
        gate = torch.tanh(self.gate(context))[..., None, :]
        return _low_rank(F.embedding(previous, self.previous) * gate, F.embedding(ids, self.next))


class Jump(nn.Module):
    """A state for each offset from the context vector alone: `h = C + e`, `h += down · silu(up · rmsnorm(h))`."""

    offsets: Tensor

    def __init__(self, offsets: tuple[int, ...], hidden: int, inner: int, eps: float) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor(offsets, dtype=torch.int32))
        self.offset_embedding = nn.Parameter(0.02 * torch.randn(len(offsets), hidden))
        self.norm = nn.RMSNorm(hidden, eps)
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.zeros_(self.down.weight)

    @property
    def places(self) -> Tensor:
        """The offsets as indices of slots."""
        return self.offsets.long() - 1

    def forward(self, context: Tensor) -> Tensor:
        """`[N, A, H]` → `[N, A, J, H]`; the drafter's final norm and the target's LM head make scores of it."""
        h = context[..., None, :] + self.offset_embedding
        return h + self.down(F.silu(self.up(self.norm(h))))


class Fused(nn.Module):
    """`R[i,k] = r^-1/2 Σ_j tanh(Q h_i + e_offset)_j D[id[i,k], j]` at the offsets."""

    offsets: Tensor

    def __init__(self, offsets: tuple[int, ...], hidden: int, vocabulary: int, rank: int, spread: float) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor(offsets, dtype=torch.int32))
        self.slot = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.slot.weight, std=spread)
        self.offset_embedding = nn.Parameter(torch.zeros(len(offsets), rank))
        self.token = nn.Parameter(torch.zeros(vocabulary, rank))

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """`hidden [N, A, S, H]`, `ids [N, A, S, K]`, every slot → `[N, A, J, K]`, the offsets only."""
        at = self.offsets.long() - 1
        state = torch.tanh(self.slot(hidden[..., at, :]) + self.offset_embedding)
        return _low_rank(state, F.embedding(ids[..., at, :], self.token))


class Markov(nn.Module):
    """`s_i r^-1/2 Σ_j P[x_{i-1},j] N[v,j]`."""

    def __init__(self, start: Tensor, slots: int) -> None:
        super().__init__()
        self.previous, self.next = nn.Parameter(start.clone()), nn.Parameter(torch.zeros_like(start))
        self.scale = nn.Parameter(torch.ones(slots))

    def forward(self, previous: Tensor, ids: Tensor) -> Tensor:
        """`previous [N, A, S]`, `ids [N, A, S, K]` → `[N, A, S, K]`."""
        return self.scale[:, None] * _low_rank(F.embedding(previous, self.previous), F.embedding(ids, self.next))

    @torch.no_grad()
    def choose(self, drafted: Drafted) -> tuple[Tensor, Tensor]:
        """Left to right, each slot after the token chosen before it: chosen ids and the ids before them, `[N, A, S]`."""
        token, chosen, before = drafted.anchor_ids, [], []
        for slot in range(len(self.scale)):
            before.append(token)
            ids = drafted.ids[..., slot, :]
            bias = _low_rank(self.previous[token], self.next[ids])
            best = (drafted.scores[..., slot, :] + self.scale[slot] * bias).argmax(-1, keepdim=True)
            token = ids.gather(-1, best)[..., 0]
            chosen.append(token)
        return torch.stack(chosen, dim=-1), torch.stack(before, dim=-1)


class Confidence(nn.Module):
    """Logit of `c_i = σ(w · [h_i ; P[x_{i-1}]] + b)`."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs)), nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """`hidden [N, A, S, H]`, `before [N, A, S, r]` rows of P → `[N, A, S]`."""
        return torch.cat([hidden, before], dim=-1) @ self.weight + self.bias


def prefix_survival(chosen: Tensor, labels: Tensor) -> Tensor:
    """`[..., S]` bool: this slot and every earlier one are the target's own tokens."""
    return (chosen == labels).long().cumprod(-1).bool()


def survival_loss(confidence: Tensor, chosen: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of `confidence [..., S]` (logits) with prefix survival, over the slots inside their sequence."""
    survival = prefix_survival(chosen, labels).float()
    losses = F.binary_cross_entropy_with_logits(confidence, survival, reduction="none")
    return _mean_where(losses, labels >= 0)


def choice_loss(scores: Tensor, choices: Tensor) -> Tensor:
    """Cross-entropy of the candidates' `scores [..., S, K]` to `choices [..., S]`, with D-PACE weights."""
    losses = slot_cross_entropy(scores.log_softmax(-1), choices)
    there = choices != UNTRAINED
    weights = dpace_weights(torch.exp(-losses) * there) * there
    return (weights * losses).sum() / weights.sum().clamp(min=1e-6)


def distilled_loss(scores: Tensor, teacher: Tensor, choices: Tensor, inside: Tensor) -> Tensor:
    """0.7 cross-entropy to the true token + 0.3 KL(softmax(teacher) ‖ softmax(scores)), over the candidates `[..., J, K]`."""
    student = scores.log_softmax(-1)
    divergence = F.kl_div(student, teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    truth = _mean_where(slot_cross_entropy(student, choices), choices != UNTRAINED)
    return TRUE_TOKEN_SHARE * truth + (1 - TRUE_TOKEN_SHARE) * _mean_where(divergence, inside)


def principal_rows(embedding: Tensor, rank: int) -> Tensor:
    """`[vocabulary, rank]`: the embedding along its `rank` directions of most variance, each scaled to unit variance.

    A table that starts here knows which tokens are alike, so that a rare one has learned something from its neighbours.
    """
    centred = embedding.float() - embedding.float().mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    rows = centred @ directions[:, -rank:]
    if rows.shape[1] < rank:
        rows = torch.cat([rows, torch.randn(len(rows), rank - rows.shape[1])], dim=1)
    return rows / rows.std(0).clamp(min=1e-6)


def _low_rank(left: Tensor, right: Tensor) -> Tensor:
    """`left [..., r]`, `right [..., K, r]` → `r^-1/2 Σ_j left_j right_kj`, `[..., K]`."""
    return (right @ left[..., None])[..., 0] / left.shape[-1] ** 0.5


def _mean_where(values: Tensor, there: Tensor) -> Tensor:
    """Mean over `there`; 0 where there is nothing."""
    return (values * there).sum() / there.sum().clamp(min=1)
