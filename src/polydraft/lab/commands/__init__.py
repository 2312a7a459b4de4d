"""Commands of the laboratory, `polydraft bench` and `polydraft analyze`; `polydraft.cli.main` finds them by name."""
