"""Generation for a whole file of prompts: `files` reads and writes, `runner` generates, `sharing` uses Ray."""
