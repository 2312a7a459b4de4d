"""Unsupported parameters, and their values that are accepted because they do not change the answer."""

from typing import Any

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # For the provider's billing, caches and dashboards. This server stores nothing.
    "metadata": (dict,),
    "store": (bool,),
    "user": (str,),
    "safety_identifier": (str,),
    "prompt_cache_key": (str,),
    "prompt_cache_retention": (str,),
    "request_id": (str,),
    "cache_prompt": (bool,),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    # What the API does anyway.
    "reasoning_effort": ("medium",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    # Without tools there is nothing to choose or to run in parallel.
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (bool,),
    "functions": ([],),
    "function_call": ("none",),
    # Clients of vLLM and llama.cpp send every default.
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "typical_p": (1, 1.0),
    "top_a": (0, 0.0),
    "mirostat": (0,),
}
"""Values that change nothing, by parameter; a type stands for all of its values."""

KNOWN_ELSEWHERE = {
    *_NEUTRAL, "best_of", "audio", "web_search_options", "thinking", "prompt_logprobs", "truncate_prompt_tokens",
    "allowed_token_ids", "add_special_tokens", "chat_template", "logits_processors", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "structured_outputs",
}  # fmt: skip
"""Parameters of the API and of other servers that change the answer, unless they have a value above."""


def changes_nothing(name: str, value: Any, n: int) -> bool:
    """Whether the value of an unsupported parameter has no effect, in a request for `n` texts per prompt."""
    neutral = (n,) if name == "best_of" else _NEUTRAL.get(name, ())  # the best n of n texts are all of them
    # Types are compared, too, because 1 == True in Python.
    return any(type(value) is one or (type(value) is type(one) and value == one) for one in neutral)
