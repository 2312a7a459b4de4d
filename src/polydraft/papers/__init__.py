"""The papers' own rules that change the distribution of the text, behind `--lossy`."""
