"""Faster forms of operations against their references."""
