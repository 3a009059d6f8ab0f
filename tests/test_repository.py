"""What lies in the repository is whole: the embedded target's drafter is found, verified, and fits its target."""

from __future__ import annotations

from pathlib import Path

from dflash_mini_lab import artifacts
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, load_checkpoint
from dflash_mini_lab.settings import DEFAULT_TARGET, Settings

MEGABYTES = 1e6


def test_the_default_target_s_drafter_is_in_the_repository_and_verified(tmp_path: Path) -> None:
    folder = artifacts.locate(Settings(cache=tmp_path), DEFAULT_TARGET, print)
    assert folder is not None
    assert folder.is_relative_to(artifacts.COMMITTED)
    config, tensors = load_checkpoint(folder)
    assert (config.target_name, config.hidden_size, config.vocabulary, config.target_layers) == (DEFAULT_TARGET, 576, 49152, 30)
    chosen = tensors[DRAFT_TO_TARGET]
    assert (chosen[1:] > chosen[:-1]).all()
    assert int(chosen[-1]) < config.vocabulary
    assert sum(path.stat().st_size for path in folder.iterdir()) < 30 * MEGABYTES
