"""The texts that a draft is trained on: conversations or answers written by the target, or text files."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polydraft.devices import captures
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.models.families import key_shape
from polydraft.models.loading import Loaded
from polydraft.output import written_whole
from polydraft.prompts import load_prompts
from polydraft.train.settings import LENGTHS, TrainSettings
from polydraft.train.writer import Advance, ChatForm, Texts, Writer, chat_form

logger = logging.getLogger(__name__)

_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 64
_PROMPT_SHARE = 0.75
"""Longest prompt as a share of its text, so that the rest has room for most of an answer."""
_CACHE_SHARE, _MOST_ROWS, _ROWS_ON_CPU = 0.5, 4096, 64
"""Share of free GPU memory for the caches of texts being written, and most texts in parallel on a GPU and on a CPU."""


OPENINGS = (
    "Write a Python function that",
    "Complete the following Python function.\n\ndef",
    "Here is some code. What does it do?\n\n```python\n",
    "Fix the bug in this program:\n\n```python\n",
    "Write a Python program which reads",
    "Implement a class in Python for",
    "Write a SQL query that",
    "How do I write a loop in JavaScript that",
    "Write a C++ function to",
    "Write an HTML page with",
    "Summarize the following article in a few sentences.\n\n",
    "Summarize:\n\n",
    "Read the passage and answer the question below.\n\nPassage:",
    "Translate this sentence from German into English:",
    "Translate into French:",
    "Solve this problem step by step. A farmer has",
    "A train leaves",
    "If a shop sells",
    "What is the sum of",
    "Find all solutions of the equation",
    "Explain in simple words why",
    "What is the difference between",
    "Who was the first",
    "What is the capital of",
    "When did",
    "List ten",
    "Give me advice on",
    "Write an email to",
    "Write a short story about",
    "Write a poem about",
    "Rewrite the following text to make it more formal:",
    "Extract all names and dates from the text:",
    "Pretend you are",
    "Compare",
    "Describe how",
    "Give three reasons why",
)
"""First words of requests, for a model to complete when it makes up conversations. They stop mid-sentence so that the model
writes the rest itself."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts of one or several lengths, in random order; the first few of each length are held out."""

    groups: tuple[Texts, ...]
    """Texts by length, the shortest first."""
    source: str
    """Where they came from, for the model card."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all texts."""
        return sum(group.tokens_NL.numel() for group in self.groups)

    def test(self) -> Texts:
        """Return the held-out texts of the shortest length."""
        return self.groups[0].rows(slice(_held_out(self.groups[0])))

    def batch(self, step: int, size: int, seed: int) -> Texts:
        """Return the batch of a step, all of one length: `size` of the shortest texts, or as many tokens in fewer longer ones.

        Every epoch has its own order of batches and, for each length, of texts.
        """
        shortest = self.groups[0].tokens_NL.shape[1]
        sizes = [max(size * shortest // group.tokens_NL.shape[1], 1) for group in self.groups]
        rows = [len(group.tokens_NL) - _held_out(group) for group in self.groups]
        counts = [max(total // some, 1) for total, some in zip(rows, sizes, strict=True)]
        epoch, place = divmod(step, sum(counts))
        number = _order(sum(counts), seed + epoch)[place]
        for group, count, total, some in zip(self.groups, counts, rows, sizes, strict=True):
            if number < count:
                order, first = _order(total, seed + epoch), number * some
                return group.rows([order[(first + more) % total] + _held_out(group) for more in range(some)])
            number -= count
        raise AssertionError("more batches than were counted")

    def frequent_tokens(self, count: int, vocab_size: int, always: Sequence[int]) -> Tensor:
        """Return the `count` most frequent tokens in answers, including those in `always`, in ascending order."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for group in self.groups:
            counts_V += torch.bincount(group.tokens_NL[group.answer_NL].long(), minlength=vocab_size)
        for token in always:
            counts_V[token] = counts_V.max() + 1
        return counts_V.topk(count).indices.sort().values

    def save(self, file: Path) -> None:
        """Write the corpus to a file, completely or not at all."""
        tensors = {}
        for number, group in enumerate(self.groups):
            tensors[f"tokens.{number}"] = group.tokens_NL.contiguous()
            tensors[f"answer.{number}"] = group.answer_NL.to(torch.uint8).contiguous()
        try:
            with written_whole(file) as partial:
                save_file(tensors, partial, metadata={"source": self.source})
        except (OSError, SafetensorError) as error:
            raise FailureError(f"cannot write {file} ({error}); free some space and run again") from None

    @classmethod
    def load(cls, file: Path) -> "Corpus":
        """Read a corpus from a file."""
        try:
            with safe_open(file, "pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
                source = (opened.metadata() or {}).get("source", "unknown")
            numbers = range(max(len(tensors) // 2, 1))
            groups = tuple(Texts(tensors[f"tokens.{number}"], tensors[f"answer.{number}"].bool()) for number in numbers)
        except (OSError, SafetensorError, KeyError) as error:
            raise FailureError(f"cannot read {file} ({error}); remove it to sample the texts again") from None
        return cls(groups, source)


def _held_out(group: Texts) -> int:
    """Return how many texts of a group are held out."""
    return min(max(int(len(group.tokens_NL) * _HELD_OUT_SHARE), 1), _MOST_HELD_OUT)


@lru_cache(maxsize=8)
def _order(rows: int, seed: int) -> list[int]:
    """Return a random order."""
    order: list[int] = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def make_corpus(settings: TrainSettings, target: Loaded, progress: Callable[[int, int], None] = lambda *_: None) -> Corpus:
    """Write or read the texts that the settings ask for; `progress` is called with the tokens so far and in total."""
    check_length(settings.length, target)
    written = 0
    progress(written, settings.tokens)

    def advance(tokens: int) -> None:
        nonlocal written
        written += tokens
        progress(min(written, settings.tokens), settings.tokens)

    if settings.texts:
        corpus = Corpus((_from_files(settings, target.tokenizer),), f"the text files {', '.join(settings.texts)}")
    else:
        corpus = _written(settings, target, advance)
    progress(settings.tokens, settings.tokens)
    return corpus


def _written(settings: TrainSettings, target: Loaded, advance: Advance) -> Corpus:
    """Let the target answer prompts, make up conversations, or do both."""
    form = chat_form(target.tokenizer)
    writer = Writer(target.model, form, target.eos_token_ids)
    generator = torch.Generator(target.model.device).manual_seed(settings.seed)
    prompts, parts = _prompts(settings, target, form is not None), []
    made_up = settings.tokens if not prompts else int(settings.tokens * settings.made_up)
    per_round = sum(length * len(starts) for length, starts in prompts.items())
    for length, starts in prompts.items():
        share = length * len(starts) / per_round
        rows, wide = _sizes((settings.tokens - made_up) * share, length, settings, target)
        cycled = [starts[row % len(starts)] for row in range(rows)]
        parts.append(writer.write_all(cycled, length, wide, generator, advance, answering=True))
    source = [f"answers of the target to the prompts of {settings.prompts}"] if prompts else []
    if made_up:
        rows, wide = _sizes(made_up, settings.length, settings, target)
        starts = _made_up_starts(rows, form, settings.length, target)
        parts.append(writer.write_all(starts, settings.length, wide, generator, advance))
        kind = "conversations that the target made up, both sides of them" if form else "plain text that the target made up"
        source.append(kind)
    if form is None:
        logger.info("the target has no chat template: sampling plain text instead")
    corpus = Corpus(_grouped(parts, settings.seed), "; ".join(source) + ("" if form else " (it has no chat template)"))
    if not corpus.test().answer_NL[:, 2:].any():
        raise UsageError(f"texts of {settings.length} tokens are too short to hold an answer of this target; raise --length")
    return corpus


def _grouped(parts: list[Texts], seed: int) -> tuple[Texts, ...]:
    """Group texts by length, each group in random order."""
    groups = []
    for length in sorted({part.tokens_NL.shape[1] for part in parts}):
        same = [part for part in parts if part.tokens_NL.shape[1] == length]
        joined = Texts.joined(same)
        order_N = torch.randperm(len(joined.tokens_NL), generator=torch.Generator().manual_seed(seed))
        groups.append(joined.rows(order_N))
    return tuple(groups)


def check_length(length: int, target: Loaded) -> None:
    """Refuse a length beyond the target's context."""
    limit = target.model.max_positions
    if limit is not None and length > limit:
        raise UsageError(f"--length {length} is longer than the target's context; allowed: 16 to {limit}")


def _sizes(tokens: float, length: int, settings: TrainSettings, target: Loaded) -> tuple[int, int]:
    """Return how many texts to write and how many at a time. All batches are full, because a small one takes as long."""
    wide = rows_at_a_time(length, settings, target)
    rows = max(-(-int(tokens) // length), 8)
    return (rows, rows) if rows <= wide else (-(-rows // wide) * wide, wide)


def rows_at_a_time(length: int, settings: TrainSettings, target: Loaded) -> int:
    """Return how many texts to write at a time: as the settings say, or as many as fit into memory."""
    model = target.model
    if settings.sampling_rows:
        return max(settings.sampling_rows * settings.length // length, 1)
    if not captures(model.device):
        return _ROWS_ON_CPU
    heads, channels = key_shape(model.config)
    per_row = 2 * model.num_layers * heads * channels * length * model.dtype.itemsize + 16 * model.vocab_size
    free = int(torch.cuda.mem_get_info(model.device)[0])
    return int(max(min(_CACHE_SHARE * free // per_row, _MOST_ROWS), 1))


def _made_up_starts(rows: int, form: ChatForm | None, length: int, target: Loaded) -> list[list[int]]:
    """Return the first tokens of conversations: half of them with the first words of a request, half without."""
    if form is None:
        start = target.tokenizer.bos_token_id
        start = target.tokenizer.eos_token_id if start is None else start
        return [[0 if start is None else int(start)]] * rows
    begun = [form.opening + target.tokenizer(words, add_special_tokens=False)["input_ids"] for words in OPENINGS]
    begun = [start for start in begun if len(start) <= length // 2] or [form.opening]
    return [begun[row // 2 % len(begun)] if row % 2 else form.opening for row in range(rows)]


def _prompts(settings: TrainSettings, target: Loaded, chat: bool) -> dict[int, list[list[int]]]:
    """Return the prompts by the length of text that they fit into, without those that are too long for any."""
    if settings.prompts is None:
        return {}
    encoder = Decoder(target.model, tokenizer=target.tokenizer)
    found: dict[int, list[list[int]]] = {}
    limit = target.model.max_positions or settings.length * LENGTHS[-1]
    lengths = [settings.length * factor for factor in LENGTHS if settings.length * factor <= limit]
    for prompt in load_prompts(settings.prompts, settings.prompt_limit):
        ids = encoder.encode(prompt.content, chat=chat)
        length = next((length for length in lengths if 0 < len(ids) <= _PROMPT_SHARE * length), None)
        if length is not None:
            found.setdefault(length, []).append(ids)
    if not found:
        raise UsageError(f"no prompt of {settings.prompts} is short enough for texts of {lengths[-1]} tokens; raise --length")
    return dict(sorted(found.items()))


def _from_files(settings: TrainSettings, tokenizer: Any) -> Texts:
    ids: list[int] = []
    for name in settings.texts:
        ids += tokenizer(Path(name).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        if len(ids) >= settings.tokens:
            break
    rows = min(len(ids), settings.tokens) // settings.length
    if rows < 2:
        raise UsageError(
            f"the text files hold {len(ids)} tokens; at least {2 * settings.length} are needed, or a shorter --length"
        )
    tokens_NL = torch.tensor(ids[: rows * settings.length], dtype=torch.int32).view(rows, settings.length)
    order_N = torch.randperm(rows, generator=torch.Generator().manual_seed(settings.seed))
    return Texts(tokens_NL[order_N], torch.ones(rows, settings.length, dtype=torch.bool))
