"""The tokens a draft is trained on, and those it is tested on meanwhile."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polydraft.atomic import written_whole
from polydraft.errors import FailureError, UsageError
from polydraft.models.loading import Loaded
from polydraft.prompts import load_prompts
from polydraft.train.chat_form import chat_form
from polydraft.train.conversations import Texts, Writer
from polydraft.train.settings import TrainSettings

logger = logging.getLogger(__name__)

_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 64
Advance = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts of equal length, in random order; the first few rows are held out."""

    texts: Texts
    source: str
    """Where they came from, for the card."""

    @property
    def held_out(self) -> int:
        """Rows that are never trained on."""
        return min(max(int(len(self.texts.tokens_NL) * _HELD_OUT_SHARE), 1), _MOST_HELD_OUT)

    def test(self) -> Texts:
        """Return the held-out texts."""
        return Texts(self.texts.tokens_NL[: self.held_out], self.texts.answer_NL[: self.held_out])

    def batch(self, step: int, size: int, seed: int) -> Texts:
        """Return the batch of a step: each epoch goes through all texts in an order of its own."""
        rows = len(self.texts.tokens_NL) - self.held_out
        first = step * size
        index = [self._row(first + offset, rows, seed) for offset in range(size)]
        return Texts(self.texts.tokens_NL[index], self.texts.answer_NL[index])

    def _row(self, number: int, rows: int, seed: int) -> int:
        epoch, place = divmod(number, rows)
        if getattr(self, "_epoch", None) != epoch:
            order_N = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))
            object.__setattr__(self, "_order", order_N.tolist())
            object.__setattr__(self, "_epoch", epoch)
        return int(self._order[place]) + self.held_out  # type: ignore[attr-defined]

    def frequent_tokens(self, count: int, vocab_size: int, always: Sequence[int]) -> Tensor:
        """Return the commonest answer tokens, and some in any case, ascending."""
        counts_V = torch.bincount(self.texts.tokens_NL[self.texts.answer_NL].long(), minlength=vocab_size)
        for token in always:
            counts_V[token] = counts_V.max() + 1
        return counts_V.topk(count).indices.sort().values

    def save(self, file: Path) -> None:
        """Write all of it, whole or not at all."""
        tensors = {"tokens": self.texts.tokens_NL.contiguous(), "answer": self.texts.answer_NL.to(torch.uint8).contiguous()}
        try:
            with written_whole(file) as partial:
                save_file(tensors, partial, metadata={"source": self.source})
        except (OSError, SafetensorError) as error:
            raise FailureError(f"cannot write {file} ({error}); free some space and run again") from None

    @classmethod
    def load(cls, file: Path) -> "Corpus":
        """Read it back."""
        try:
            with safe_open(file, "pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
                source = (opened.metadata() or {}).get("source", "unknown")
            texts = Texts(tensors["tokens"], tensors["answer"].bool())
        except (OSError, SafetensorError, KeyError) as error:
            raise FailureError(f"cannot read {file} ({error}); remove it to sample the texts again") from None
        return cls(texts, source)


def make_corpus(settings: TrainSettings, target: Loaded, advance: Advance) -> Corpus:
    """Sample or read the texts that the settings ask for."""
    limit = target.model.max_positions
    if limit is not None and settings.length > limit:
        raise UsageError(f"--length {settings.length} is longer than the target's context; allowed: 16 to {limit}")
    if settings.texts:
        return Corpus(_from_files(settings, target.tokenizer), f"the text files {', '.join(settings.texts)}")
    form = chat_form(target.tokenizer)
    writer = Writer(target.model, form, target.eos_token_ids)
    generator = torch.Generator(target.model.device).manual_seed(settings.seed)
    rows = max(-(-settings.tokens // settings.length), 8)
    if rows > settings.sampling_rows:  # a last few rows by themselves would take as long as many
        rows = -(-rows // settings.sampling_rows) * settings.sampling_rows
    if settings.prompts:
        starts = _prompts(settings, target, form is not None)
        starts = (starts * -(-rows // len(starts)))[:rows]
        source = f"answers of the target to the prompts of {settings.prompts}"
    elif form is not None:
        starts, source = [form.opening] * rows, "conversations that the target made up, both sides of them"
    else:
        logger.info("the target has no chat template: sampling plain text instead")
        starts, source = [_plain_start(target)] * rows, "plain text that the target made up (it has no chat template)"
    parts = []
    for first in range(0, rows, settings.sampling_rows):
        part = starts[first : first + settings.sampling_rows]
        parts.append(writer.write(part, settings.length, bool(settings.prompts), generator, advance))
    texts = Texts(torch.cat([part.tokens_NL for part in parts]), torch.cat([part.answer_NL for part in parts]))
    corpus = Corpus(texts, source)
    if not corpus.test().answer_NL[:, 2:].any():
        raise UsageError(f"texts of {settings.length} tokens are too short to hold an answer of this target; raise --length")
    return corpus


def _plain_start(target: Loaded) -> list[int]:
    start = target.tokenizer.bos_token_id
    start = target.tokenizer.eos_token_id if start is None else start
    return [0 if start is None else int(start)]


def _prompts(settings: TrainSettings, target: Loaded, chat: bool) -> list[list[int]]:
    assert settings.prompts is not None
    texts = [prompt.text for prompt in load_prompts(settings.prompts, settings.prompt_limit)]
    tokenizer = target.tokenizer
    starts = []
    for text in texts:
        if chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer(text, add_special_tokens=not chat)["input_ids"])
        if 0 < len(ids) <= settings.length // 2:
            starts.append(ids)
    if not starts:
        raise UsageError(
            f"no prompt of {settings.prompts} is short enough for texts of {settings.length} tokens; raise --length"
        )
    return starts


def _from_files(settings: TrainSettings, tokenizer: Any) -> Texts:
    ids: list[int] = []
    for name in settings.texts:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {name!r} as UTF-8 text ({error})") from None
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
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
