"""Generation for a whole file of prompts: `rows` in, `runner` through one lane of the server, `results` out, in order."""
