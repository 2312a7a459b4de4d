"""`polydraft tune`: decode the user's prompts with several trees, and keep the fastest."""
