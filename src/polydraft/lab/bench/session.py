"""A whole benchmark: load models and prompts, measure, summarise, write the files."""

import dataclasses
import importlib.metadata
import platform
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import polydraft
from polydraft.beam import text_log_probs
from polydraft.certify.greedy_identity import Likeness, check_room, likeness_of
from polydraft.defaults import default_draft
from polydraft.devices import dtype_name
from polydraft.engine import Decoder
from polydraft.lab.bench import BASELINE
from polydraft.lab.bench._results import summarise, write_results
from polydraft.lab.bench._runner import EnergyBlock, Journal, Measurement, Runner
from polydraft.lab.bench.meters import git_revision, machine
from polydraft.lab.bench.method import Bench, build_methods
from polydraft.lab.bench.options import BenchOptions
from polydraft.lab.bench.shards import Shard
from polydraft.models import check_prompts
from polydraft.models.inflated import InflatedModel
from polydraft.models.loading import Loaded, load_draft, load_model
from polydraft.models.placement import check_device_map, resolve_device, resolve_dtype
from polydraft.options import AUTO
from polydraft.prompts import Prompt, load_prompts
from polydraft.sampling import SamplingParams

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Models:
    """Loads each pair of target and draft once for all benchmarks of a process."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[Any, ...], tuple[Loaded, Any]] = {}

    def load(self, options: BenchOptions, device: torch.device, draft: str) -> tuple[Loaded, Any]:
        """Return target and draft, loaded unless they already are."""
        key = (options.target, draft, str(device), options.dtype, options.device_map, options.native)
        if key not in self._pairs:
            dtype = resolve_dtype(options.dtype, device)
            target = load_model(options.target, device, dtype, options.device_map, options.native)
            self._pairs[key] = target, load_draft(draft, target)
        return self._pairs[key]


class BenchSession:
    """One benchmark: loads models (or shares those of other sessions) and prompts, then measures."""

    def __init__(self, options: BenchOptions, models: Models | None = None) -> None:
        self.options = options
        params = SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
        prompts = load_prompts(options.source, options.limit)
        if options.shard is not None:
            prompts = Shard.parse(options.shard).select(prompts)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        check_device_map(options.device_map, options.device)
        device = resolve_device(options.device)
        draft_name = default_draft(options.target, options.draft)
        self.loaded, draft = (models or Models()).load(options, device, draft_name)
        encoder = Decoder(self.loaded.model, tokenizer=self.loaded.tokenizer)
        encoded = [(prompt, encoder.encode(prompt.content, chat=not options.raw)) for prompt in prompts]
        check_prompts([ids for _, ids in encoded], self.loaded.model.max_positions, self.loaded.model.vocab_size)
        longest = max(len(ids) for _, ids in encoded)
        check_room(longest, options.max_new_tokens, self.loaded.model.max_positions)
        self.prompts: list[tuple[Prompt, list[int]]] = encoded
        self.bench = Bench(
            target=self.loaded,
            target_name=options.target,
            draft=draft,
            params=params,
            max_new_tokens=options.max_new_tokens,
            longest_prompt=longest,
            corpus=options.corpus,
        )
        self.methods = build_methods(list(options.methods), self.bench)
        self.runner = Runner(
            self.methods,
            encoded,
            options,
            device,
            likelihood=self._likelihood if options.log_likelihood else None,
            grade=self._grade,
        )
        self.draft_name = draft_name

    def run(
        self,
        out: Path,
        *,
        resume: bool,
        command: list[str],
        progress: Callable[[Measurement | None], None],
        begin: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Measure, and return the results; write `runs.jsonl` while measuring, `results.json` and `report.html` at the end.

        `begin` is called before the first measurement, `progress` after each.
        """
        journal = Journal(out, dataclasses.asdict(self.options), resume)
        begin()
        self.runner.run(journal, progress)
        return write_results(out, command, git_revision(), **self._results(list(journal), journal.blocks()))

    def _results(self, measurements: list[Measurement], energy: Sequence[EnergyBlock]) -> dict[str, Any]:
        """Return the contents of `results.json`, which docs/bench-results.md describes, but for what `write_results` adds."""
        options, model = self.options, self.loaded.model
        categories: dict[str, int] = {}
        for prompt, _ in self.prompts:
            categories[prompt.category] = categories.get(prompt.category, 0) + 1
        likeness = self._likeness(measurements)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return {
            "machine": machine(model.device),
            "versions": {"polydraft": polydraft.__version__, "python": platform.python_version(), **versions},
            "settings": {
                "target": options.target,
                **({"inflated": model.note} if isinstance(model, InflatedModel) else {}),
                "draft": self.draft_name,
                "dtype": dtype_name(model.dtype),
                "device": str(model.device),
                "temperature": options.temperature,
                **({"top_k": options.top_k} if options.top_k else {}),
                **({"top_p": options.top_p} if options.top_p < 1 else {}),
                "max_new_tokens": options.max_new_tokens,
                "repeat": options.repeat,
                **({"batch": options.batch} if options.batch > 1 else {}),
                "seed": options.seed,
                **({"corpus": Path(options.corpus).name} if options.corpus != AUTO else {}),
                "template": "raw" if options.raw else "chat",
                "prompts": {"source": options.source, "count": len(self.prompts), "categories": categories},
                **({"shard": options.shard} if options.shard is not None else {}),
            },
            "methods": summarise(measurements, [method.name for method in self.methods], likeness, energy),
            "differing": [
                {"method": method, "prompt": prompt, "likeness": kind}
                for (method, prompt), kind in (likeness or {}).items()
                if kind != Likeness.IDENTICAL
            ],
            "trees": {method.name: {"parents": list(method.parents)} for method in self.methods if method.parents},
            "samples": self._samples(measurements),
        }

    def _grade(self, prompt: Prompt, tokens: list[int]) -> bool | None:
        """Return whether a text is one of the prompt's answers; None if the prompt has none."""
        if not prompt.answers:
            return None
        return is_exact_match(self.loaded.tokenizer.decode(tokens, skip_special_tokens=True), prompt.answers)

    def _likelihood(self, prompt: list[int], tokens: list[int]) -> float:
        """Return the target's log-probability of a text."""
        return sum(text_log_probs(self.loaded.model, prompt, [tokens])[0])

    def _likeness(self, measurements: list[Measurement]) -> dict[tuple[str, str], str] | None:
        """At temperature 0, compare every text with the baseline's; return None above."""
        if self.options.temperature > 0:
            return None
        prompts = {prompt.id: ids for prompt, ids in self.prompts}
        comparable = {method.name for method in self.methods if method.comparable}
        first = {(one.method, one.prompt): one.token_ids for one in reversed(measurements) if not one.error}
        return {
            (method, prompt): likeness_of(self.loaded.model, prompts[prompt], first[BASELINE, prompt], tokens).value
            for (method, prompt), tokens in first.items()
            if method in comparable and (BASELINE, prompt) in first and prompt in prompts
        }

    def _samples(self, measurements: list[Measurement]) -> list[dict[str, Any]]:
        """Return each method's text for the first prompt of each category, token by token."""
        texts: dict[str, Prompt] = {}
        for prompt, _ in reversed(self.prompts):
            texts[prompt.category] = prompt
        chosen = {prompt.id: prompt for prompt in texts.values()}
        return [
            {
                "method": one.method,
                "category": one.category,
                "prompt": chosen[one.prompt].text,
                "tokens": self._sample_tokens(one),
            }
            for one in measurements
            if one.prompt in chosen and one.repeat == 0 and not one.error
        ]

    def _sample_tokens(self, one: Measurement) -> list[dict[str, Any]]:
        passes: Sequence[int | None] = one.passes if one.passes is not None else [None] * len(one.token_ids)
        return [
            {"text": self.loaded.tokenizer.decode([token]), "source": source, "pass": number}
            for token, source, number in zip(one.token_ids, one.sources, passes, strict=True)
        ]


def is_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text is one of the answers, by the rules of SQuAD, TriviaQA, Spider and GSM8K.

    If all answers are numbers, the last number of the text must be one of them, since GSM8K's solutions end with it. Otherwise
    the whole text must match, ignoring case, punctuation and articles, as in SQuAD's evaluation script.
    """
    if all(_NUMBER.fullmatch(answer) for answer in answers):
        found = _NUMBER.findall(text)
        return bool(found) and _value(found[-1]) in map(_value, answers)
    return _normalised(text) in map(_normalised, answers)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _normalised(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
