"""Proof that speculation does not change what is generated, for everything in the registries."""
