"""Proof that the walks over whole trees are exact, on all drawings of small trees."""
