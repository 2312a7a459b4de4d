"""What only a paper needs, out of the way of what everybody runs: each behind a flag of its own.

Importing this registers all of it, with the registries of `polydraft.draft`.
"""

from polydraft.papers import branches, decision, flat_blocks, target_init

__all__ = ["branches", "decision", "flat_blocks", "target_init"]
