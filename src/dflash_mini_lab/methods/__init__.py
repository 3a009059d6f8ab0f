"""The decoding paths, in order. A new method is one file here, one line in METHODS, one paragraph in the docs, and its tests."""
from __future__ import annotations

from dflash_mini_lab.methods.m00_normal import NORMAL
from dflash_mini_lab.methods.m01_dflash import DFLASH
from dflash_mini_lab.methods.m02_dflash2 import DFLASH2
from dflash_mini_lab.methods.m03_mobs import MOBS
from dflash_mini_lab.methods.m04_jump_mobs import JUMP_MOBS
from dflash_mini_lab.methods.m05_fused_jump import FUSED_JUMP
from dflash_mini_lab.methods.m06_boltzmann import BOLTZMANN
from dflash_mini_lab.methods.m07_bmobs import BMOBS
from dflash_mini_lab.methods.m08_act import ACT
from dflash_mini_lab.methods.m09_dspark_lite import DSPARK_LITE
from dflash_mini_lab.methods.m10_advanced_boltzmann import ADVANCED_BOLTZMANN
from dflash_mini_lab.methods.m11_gated_mobs import GATED_MOBS
from dflash_mini_lab.methods.m12_parareal import PARAREAL
from dflash_mini_lab.methods.m13_minop import MINOP
from dflash_mini_lab.methods.m14_simple_parareal import SIMPLE_PARAREAL
from dflash_mini_lab.methods.m15_tree import TREE
from dflash_mini_lab.types import Method, UserError

METHODS: tuple[Method, ...] = (
    NORMAL,
    DFLASH,
    DFLASH2,
    MOBS,
    JUMP_MOBS,
    FUSED_JUMP,
    BOLTZMANN,
    BMOBS,
    ACT,
    DSPARK_LITE,
    ADVANCED_BOLTZMANN,
    GATED_MOBS,
    PARAREAL,
    MINOP,
    SIMPLE_PARAREAL,
    TREE,
)


def by_key(key: str) -> Method:
    """The method with this key (`08`) or slug (`act`). Raises UserError that lists the known ones."""
    for method in METHODS:
        if key in (method.key, method.slug):
            return method
    known = ", ".join(f"{method.key} ({method.slug})" for method in METHODS)
    raise UserError(f"Unknown method {key!r}; known: {known}.")
