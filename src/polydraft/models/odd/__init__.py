"""Models that count positions themselves or carry state from token to token."""
