"""Heads: drafts that read the target's features."""
