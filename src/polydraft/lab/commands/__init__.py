"""The laboratory's commands, `polydraft bench` and `polydraft analyze`; `polydraft.cli.main` finds them by name."""
