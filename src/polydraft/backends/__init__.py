"""Faster forms of operations whose reference is plain torch."""
