"""All forms of operations that Triton runs: importing them registers them; Triton itself is imported where one runs."""

from polydraft.backends.triton import (
    attention,
    compiling,
    draw_hybrid,
    follow,
    growth,
    head,
    layers,
    outcome,
    planting,
    slots,
    softened,
    verify_block,
)

__all__ = [
    "attention",
    "compiling",
    "draw_hybrid",
    "follow",
    "growth",
    "head",
    "layers",
    "outcome",
    "planting",
    "slots",
    "softened",
    "verify_block",
]
