"""A server: continuous batching on the engine's loop, behind the OpenAI API.

The way of one request: `server` accepts the connection; `middleware` checks host, key and size, and logs; `app` routes it and
parses the body; `protocol` checks every parameter; `streaming` hands it to `service`, which tokenizes prompts and makes
sequences; `scheduler` queues them and steps `lane` by lane, each an engine with slots; events come back through `request` to
`streaming`, which sends what `responses` formats. Every refusal on this way is in `errors`.
"""
