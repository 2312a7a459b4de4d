"""Generation for a whole file of prompts."""
