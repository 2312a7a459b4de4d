"""A server: continuous batching on the engine's loop, behind the OpenAI API."""
