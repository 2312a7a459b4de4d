"""A server: continuous batching on the engine's one loop, behind the API that everybody speaks."""
