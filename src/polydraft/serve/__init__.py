"""A server: continuous batching on the engine's loop, behind the OpenAI API.

One request passes through these modules: `server` accepts the connection; `middleware` checks host, key and size, and logs;
`app` routes the request and parses its body; `protocol` checks every parameter; `streaming` hands it to `service`, which
tokenizes prompts and makes sequences; `scheduler` queues them and steps each `lane`, an engine with slots; events come back
through `request` to `streaming`, which sends what `responses` formats. All errors on this way are in `errors`.
"""
