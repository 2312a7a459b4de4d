"""Hugging Face `generate` in its ways, for comparison."""

from collections.abc import Callable
from typing import Any

import torch

from polydraft.bench.method import METHODS, Bench, Method, MethodSpec, Token, Tokens
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel


@METHODS.register("hf")
def plain(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face `generate`."""
    spec.take_nothing()
    return hugging_face(spec, bench, dict, one_token_a_pass=True)


@METHODS.register("hf-assisted")
def assisted(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face assisted generation with the same draft; ``hf-assisted:5`` fixes the number of drafted tokens."""
    spec.take()
    count = spec.count(default=0)
    if bench.draft is None:
        raise UsageError(f"method {spec.text!r} needs a draft; pass --draft NAME, a folder, or early-exit:k")
    if not isinstance(bench.draft, HFModel):
        raise UsageError(f"method {spec.text!r} needs a draft that is a language model; {bench.draft.name!r} is a feature head")
    assistant = bench.draft.hf_model

    def options() -> dict[str, Any]:
        if count:
            assistant.generation_config.num_assistant_tokens = count
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
        return {"assistant_model": assistant}

    return hugging_face(spec, bench, options)


@METHODS.register("hf-lookup")
def lookup(spec: MethodSpec, bench: Bench) -> Method:
    """Hugging Face prompt lookup; ``hf-lookup:10`` drafts ten tokens."""
    spec.take()
    count = spec.count(default=10)
    return hugging_face(spec, bench, lambda: {"prompt_lookup_num_tokens": count})


def hugging_face(
    spec: MethodSpec,
    bench: Bench,
    options: Callable[[], dict[str, Any]],
    *,
    one_token_a_pass: bool = False,
    override: dict[str, Any] | None = None,
) -> Method:
    """Make a method of `generate` with some options.

    Parameters
    ----------
    spec : MethodSpec
    bench : Bench
    options : callable
        Gives the further arguments of `generate`, anew for each text.
    one_token_a_pass : bool
        Whether every token has a target pass of its own; `generate` does not tell.
    override : dict, optional
        In place of the settings of sampling.
    """
    model, params = bench.target.model.hf_model, bench.params
    settings: dict[str, Any] = {"do_sample": False}
    if params.temperature > 0:
        # top_k=0: `generate` would otherwise keep 50 tokens by default and sample from another law than we do.
        settings = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    settings = settings if override is None else override
    eos = list(bench.target.eos_token_ids)

    def generate(prompt: list[int], seed: int) -> Tokens:
        ids_1T = torch.tensor([prompt], device=model.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=bench.max_new_tokens,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else 0,
                **settings,
                **options(),
            )
        tokens = output[0, len(prompt) :].tolist()
        for index, token in enumerate(tokens[: bench.max_new_tokens]):
            yield Token(token, "target" if one_token_a_pass else "unknown", index if one_token_a_pass else None)
        return None

    return Method(name=spec.text, generate=generate)
