"""Unusual models: they count positions themselves, have recurrent layers, or need a mask of their own."""
