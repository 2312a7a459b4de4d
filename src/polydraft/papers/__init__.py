"""Methods that only papers need, kept out of the main path, each behind its own flag.

Importing this package registers them in the registries of `polydraft.draft`.
"""

from polydraft.papers import branches, decision, flat_blocks, target_init

__all__ = ["branches", "decision", "flat_blocks", "target_init"]
