"""The trained drafter, frozen, as the heads' training sees it: one pass without gradients gives what every head reads.

What a head may read at run time is all that comes from the pass: slot states, scores, the context vector. The labels beside
them are the target's own tokens, for the losses only.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig
from dflash_mini_lab.training.blocks import Blocks, block_embeddings, draft_labels, target_to_draft
from dflash_mini_lab.training.losses import UNTRAINED
from dflash_mini_lab.training.model import TrainableDrafter


@dataclass(frozen=True)
class Drafted:
    """N sequences, A blocks each, S slots, K candidates a slot by score, best first. Float32 unless it says ids.

    `hidden [N, A, S, H]` final slot states; `context [N, A, H]` the context vector C; `scores`, `columns` (of the draft
    vocabulary), `ids` (of the target) `[N, A, S, K]`; `anchor_ids [N, A]`; `labels [N, A, S]` target ids, UNTRAINED past the
    end of a sequence; `draft_labels` the same in columns, UNTRAINED outside the draft vocabulary too.
    """

    hidden: Tensor
    context: Tensor
    scores: Tensor
    columns: Tensor
    ids: Tensor
    anchor_ids: Tensor
    labels: Tensor
    draft_labels: Tensor

    @property
    def previous(self) -> Tensor:
        """The true token before each slot, `[N, A, S]` target ids. A slot past the end of a sequence gets any id."""
        return torch.cat([self.anchor_ids[..., None], self.labels[..., :-1].clamp(min=0)], dim=-1)

    @property
    def choices(self) -> Tensor:
        """Which candidate is the true token, `[N, A, S]`; UNTRAINED where none is."""
        return matching_candidate(self.ids, self.labels)

    def kept(self, candidates: int) -> Drafted:
        """The same with the best `candidates` of every slot only, as the methods see them."""
        names = ("scores", "columns", "ids")
        return replace(self, **{name: getattr(self, name)[..., :candidates] for name in names})

    def whole_blocks(self) -> Drafted:
        """The blocks that lie inside their answers, as one sequence of them: N becomes 1."""
        whole = (self.labels >= 0).all(-1)
        return replace(self, **{name: value[whole][None] for name, value in vars(self).items()})


def matching_candidate(ids: Tensor, labels: Tensor) -> Tensor:
    """Place of each label among `ids [..., K]`, UNTRAINED where it is not there (labels UNTRAINED never are)."""
    same = ids == labels[..., None]
    return torch.where(same.any(-1), same.long().argmax(-1), UNTRAINED)


class FrozenDrafter:
    """`checkpoint`: the drafter's tensors as on disk (float16), `target`: `embedding`, `head [vocabulary, hidden]`.

    `dtype` bfloat16 runs the pass under autocast. All is where the target's tensors are. Nothing here has a gradient.
    """

    def __init__(
        self, config: DrafterConfig, checkpoint: dict[str, Tensor], target: dict[str, Tensor], dtype: torch.dtype
    ) -> None:
        self.config, self.dtype = config, dtype
        d2t, self.device = checkpoint.get(DRAFT_TO_TARGET), target["embedding"].device
        self.draft_to_target = (torch.arange(config.vocabulary) if d2t is None else d2t.long()).to(self.device)
        self.to_draft = target_to_draft(self.draft_to_target, config.vocabulary)
        self.model = TrainableDrafter(config)
        self.model.load_state_dict({name: tensor.float() for name, tensor in checkpoint.items() if name != DRAFT_TO_TARGET})
        self.model.requires_grad_(False).eval().to(self.device)
        self.embedding = target["embedding"].detach()
        head = target["head"].detach()[self.draft_to_target].float()
        self.head_weight = self.model.scoring_rows(head).to(dtype).contiguous()

    @torch.no_grad()
    def draft(self, blocks: Blocks, candidates: int) -> Drafted:
        """One pass over `blocks`, of which none has its anchor at position 0 (there is no context row before it)."""
        features = blocks.features.to(self.dtype)
        newest = (blocks.anchors - 1)[..., None].expand(-1, -1, features.shape[-1])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = self.model(features, block_embeddings(blocks, self.embedding, self.config), blocks.anchors).float()
            context = self.model.hidden_norm(self.model.fc(features.gather(1, newest)).float()).float()
        logits = self.head(hidden)
        scores, columns = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
        ids, labels = self.draft_to_target[columns], draft_labels(blocks, self.to_draft)
        return Drafted(hidden, context, scores, columns, ids, blocks.anchor_ids, blocks.labels, labels)

    def head(self, hidden: Tensor) -> Tensor:
        """The target's frozen LM head on `hidden [..., H]`: logits over the draft vocabulary, float32."""
        return F.linear(hidden.to(self.dtype), self.head_weight).float()
