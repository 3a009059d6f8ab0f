"""Drafters: the block drafter of DFlash and the checkpoint format it shares with published ones."""
