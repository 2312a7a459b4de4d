"""From settings to a trained draft in a folder."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from polydraft.atomic import written_whole
from polydraft.errors import FailureError, UsageError
from polydraft.models.loading import Loaded
from polydraft.output import check_same, read_settings
from polydraft.sampling import PartialVocabulary
from polydraft.train.acceptance import Acceptance, acceptance_of
from polydraft.train.card import write_card
from polydraft.train.checkpoint import load_checkpoint, save_checkpoint
from polydraft.train.corpus import Corpus, make_corpus
from polydraft.train.draft_pupil import DraftPupil
from polydraft.train.head_pupil import HeadPupil
from polydraft.train.laws import TargetLaws
from polydraft.train.losses import loss_of
from polydraft.train.pupil import Pupil
from polydraft.train.settings import DraftSize, TrainSettings

logger = logging.getLogger(__name__)

_WARM_UP, _LAST_RATE, _CLIP = 0.05, 0.05, 1.0
_DEPTH_DISCOUNT = 0.8
"""Deeper levels are reached less often, so they weigh less."""
_TEST_POSITIONS = 2048
_FREE = {"steps", "save_every", "evaluate_every", "sampling_rows"}
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where training stands."""

    phase: str
    """``"sampling"`` or ``"training"``."""
    done: int
    total: int
    """Tokens or steps."""
    loss: float | None = None
    acceptance: tuple[Acceptance, ...] = ()
    """On held-out text, at each depth."""


Observer = Callable[[Report], None]


def train(settings: TrainSettings, target: Loaded, out: Path, *, resume: bool, command: str, observer: Observer) -> Path:
    """Train a draft for a target and write it into a folder.

    Parameters
    ----------
    settings : TrainSettings
    target : Loaded
        In the dtype it is to be imitated in.
    out : Path
        The draft goes here; what a resumed run needs is kept in its folder `training`.
    resume : bool
        Go on with what is in `out`, instead of refusing to touch it.
    command : str
        For the card.
    observer : callable
        Told of progress.

    Returns
    -------
    Path
        The folder, for ``polydraft.load(..., draft=folder)``.
    """
    settings.check()
    work = _open_folder(settings, out, resume)
    corpus = _corpus(settings, target, work, observer)
    pupil = _pupil(settings, target, corpus)
    pupil.prime(corpus.test())
    acceptance = _run(settings, pupil, corpus, work, observer)
    details = {"acceptance": [asdict(level) for level in acceptance], "steps": settings.steps, "trained_for": settings.target}
    try:
        pupil.export(out, details)
        write_card(out, settings, corpus, acceptance, pupil, command)
    except (OSError, SafetensorError) as error:
        raise FailureError(f"cannot write the draft to {out} ({error}); free some space and run again with --resume") from None
    return out


def _open_folder(settings: TrainSettings, out: Path, resume: bool) -> Path:
    work, fixed = out / "training", settings.as_dict()
    record = work / "settings.json"
    try:
        if out.exists() and any(out.iterdir()) and not resume:
            raise UsageError(f"{out} is not empty; pass --resume to go on with a training, or another --out")
        if resume and record.exists():
            check_same(read_settings(record), json.loads(json.dumps(fixed)), out, _FREE)
        work.mkdir(parents=True, exist_ok=True)
        with written_whole(record) as partial:
            partial.write_text(json.dumps(fixed, indent=1))
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}); choose another --out") from None
    return work


def _corpus(settings: TrainSettings, target: Loaded, work: Path, observer: Observer) -> Corpus:
    file = work / "corpus.safetensors"
    if file.exists():
        return Corpus.load(file)
    written = 0

    def advance(tokens: int) -> None:
        nonlocal written
        written += tokens
        observer(Report(phase="sampling", done=min(written, settings.tokens), total=settings.tokens))

    corpus = make_corpus(settings, target, advance)
    observer(Report(phase="sampling", done=settings.tokens, total=settings.tokens))
    corpus.save(file)
    return corpus


def _pupil(settings: TrainSettings, target: Loaded, corpus: Corpus) -> Pupil:
    vocabulary, size = None, target.model.vocab_size
    if 0 < settings.vocabulary < size:
        tokens_D = corpus.frequent_tokens(settings.vocabulary, size, target.eos_token_ids)
        vocabulary = PartialVocabulary(tokens_D.to(target.model.device), size)
    kind = DraftPupil if isinstance(settings.size, DraftSize) else HeadPupil
    return kind(settings, target, vocabulary)


def _run(settings: TrainSettings, pupil: Pupil, corpus: Corpus, work: Path, observer: Observer) -> tuple[Acceptance, ...]:
    device = pupil.teacher.target.device
    parameters = [parameter for parameter in pupil.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    restored = load_checkpoint(work, pupil.module, optimizer)
    step = restored["step"] if restored else 0
    acceptance = evaluate(pupil, corpus, settings)
    observer(Report(phase="training", done=step, total=settings.steps, acceptance=acceptance))
    while step < settings.steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(step / settings.steps)
        loss = _step(settings, pupil, corpus, step, optimizer, parameters)
        step += 1
        ends = step == settings.steps
        # Looking at the loss waits for the device, so only now and then.
        if step % settings.save_every == 0 or step % settings.evaluate_every == 0 or ends or step % 10 == 0:
            value = float(loss)
            if not math.isfinite(value):
                raise FailureError(
                    f"the loss is not a number at step {step}; the last good checkpoint is in {work}: go on from it with "
                    "--resume and a lower --learning-rate, in a copy of the folder"
                )
            if step % settings.evaluate_every == 0 or ends:
                acceptance = evaluate(pupil, corpus, settings)
            observer(Report(phase="training", done=step, total=settings.steps, loss=value, acceptance=acceptance))
        if step % settings.save_every == 0 or ends:
            save_checkpoint(work, pupil.module, optimizer, {"step": step})
    return acceptance


def _step(
    settings: TrainSettings,
    pupil: Pupil,
    corpus: Corpus,
    step: int,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
) -> torch.Tensor:
    """Take one step and return its loss; one whose gradient is not a number changes nothing and is not a number itself."""
    device = pupil.teacher.target.device
    with torch.autocast(device.type, torch.bfloat16, enabled=pupil.teacher.target.dtype == torch.bfloat16):
        laws, answers = pupil.lesson(corpus.batch(step, settings.batch_size, settings.seed), pupil.depths)
        loss = torch.zeros((), device=device)
        weights = [_DEPTH_DISCOUNT**depth for depth in range(len(answers))]
        for weight, (rows_R, logits_RD) in zip(weights, answers, strict=True):
            here = replace(laws, probs_RD=laws.probs_RD[rows_R], best_R=laws.best_R[rows_R])
            loss = loss + weight / sum(weights) * loss_of(settings.loss, here, logits_RD)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
    if not bool(norm.isfinite()):  # looked at on every device: a checkpoint must never hold what such a step leaves
        return torch.full_like(loss.detach(), torch.nan)
    optimizer.step()
    return loss.detach()


def _rate(share: float) -> float:
    """Return the learning rate's share of its peak: a short rise, then half a cosine."""
    if share < _WARM_UP:
        return (share + 0.002) / (_WARM_UP + 0.002)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))


@torch.no_grad()
def evaluate(pupil: Pupil, corpus: Corpus, settings: TrainSettings) -> tuple[Acceptance, ...]:
    """Measure acceptance on the held-out texts, at each depth of drafting."""
    test = corpus.test()
    rows = max(min(len(test.tokens_NL), _TEST_POSITIONS // settings.length + 1), 1)
    texts = replace(test, tokens_NL=test.tokens_NL[:rows], answer_NL=test.answer_NL[:rows])
    with torch.autocast(pupil.teacher.target.device.type, torch.bfloat16, enabled=pupil.teacher.target.dtype == torch.bfloat16):
        laws, answers = pupil.lesson(texts, pupil.depths)
    result = []
    for rows_R, logits_RD in answers:
        here = TargetLaws(laws.probs_RD[rows_R][:_TEST_POSITIONS], laws.best_R[rows_R][:_TEST_POSITIONS])
        result.append(acceptance_of(here, logits_RD[:_TEST_POSITIONS]))
    return tuple(result)
