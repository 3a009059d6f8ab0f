"""Which arm runs when. Pure: the whole plan is known before the first token, and the same arguments give the same plan.

Arms are interleaved inside every (prompt, repeat) cell, so a machine that slows down slows all of them; their order is rotated,
so none always runs on warm caches or right after the heaviest neighbour.
"""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One prompt answered once by every arm. `repeat` counts 0, 1, … for measured cells and -1, -2, … for warm-ups."""

    prompt: str
    repeat: int
    warmup: bool
    order: tuple[str, ...]


def plan(prompts: Sequence[str], repeats: int, arms: Sequence[str], warmup_cells: int, seed: int) -> tuple[Cell, ...]:
    """Warm-up cells, then every prompt once per repeat; repeats are the outer loop, so drift falls on all prompts alike."""
    warmups = [(prompts[cell % len(prompts)], -1 - cell // len(prompts)) for cell in range(warmup_cells)]
    measured = [(prompt, repeat) for repeat in range(repeats) for prompt in prompts]
    warmup_orders = rotated_orders(arms, len(warmups), seed + 1)
    orders = rotated_orders(arms, len(measured), seed)
    return tuple(
        [Cell(prompt, repeat, True, order) for (prompt, repeat), order in zip(warmups, warmup_orders, strict=True)]
        + [Cell(prompt, repeat, False, order) for (prompt, repeat), order in zip(measured, orders, strict=True)]
    )


def rotated_orders(arms: Sequence[str], count: int, seed: int) -> list[tuple[str, ...]]:
    """`count` orders of `arms` in which every arm takes every place equally often (±1 where `count` is no multiple of the arms).

    Each block of len(arms) orders holds all rotations of one shuffled order: places are balanced inside a block, and the
    shuffle changes who follows whom between blocks.
    """
    if not arms:
        return [()] * count
    generator = random.Random(seed)
    orders: list[tuple[str, ...]] = []
    while len(orders) < count:
        base = list(arms)
        generator.shuffle(base)
        shifts = list(range(len(base)))
        generator.shuffle(shifts)
        orders += [tuple(base[shift:] + base[:shift]) for shift in shifts]
    return orders[:count]
