"""Feature heads: drafts that read the target's features."""
