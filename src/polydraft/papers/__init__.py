"""What only a paper needs, out of the way of the main path, each behind its own flag.

Importing this registers all of it in the registries of `polydraft.draft`.
"""

from polydraft.papers import branches, decision, flat_blocks, target_init

__all__ = ["branches", "decision", "flat_blocks", "target_init"]
