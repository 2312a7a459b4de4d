"""Training a draft: corpus, optimizer steps, checkpoints, evaluation, and the finished folder with a model card."""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from polydraft.errors import FailureError, UsageError
from polydraft.models import FeatureHead
from polydraft.models.heads.known import remember_draft
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded
from polydraft.output import cannot_write, check_empty, check_folder, keep_settings, written_whole
from polydraft.sampling import PartialVocabulary
from polydraft.train.corpus import Corpus, make_corpus
from polydraft.train.head_pupil import HeadPupil
from polydraft.train.objective import loss_of
from polydraft.train.pupils import Acceptance, DraftPupil, Pupil, acceptance_of
from polydraft.train.settings import DraftSize, HeadSize, TrainSettings
from polydraft.train.start import load_start
from polydraft.train.writer import enough_memory

logger = logging.getLogger(__name__)

_WARM_UP, _LAST_RATE, _CLIP = 0.05, 0.05, 1.0
_LEAST_REACH = 0.05
"""Positions that drafting reaches with a lower probability than this are skipped."""
_LAST_PHASE = 0.6
"""Share of the steps after which the loss is about all candidates of a node; before, it is about one candidate."""
_TEST_POSITIONS, _TEST_TEXTS = 2048, 16
_FREE = {"steps", "save_every", "evaluate_every", "sampling_rows"}
"""Settings that may change when a run is resumed."""
_WORK, _SETTINGS, _CORPUS, _CHECKPOINT = "training", "settings.json", "corpus.safetensors", "checkpoint.safetensors"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The progress of training."""

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
    """Train a draft for a target, loaded in the dtype to imitate, and write it into the folder `out`, which is returned.

    The subfolder `training` keeps what a resumed run needs. Without `resume`, `out` must be empty. The command is quoted in the
    card; the observer is called with progress.
    """
    start = load_start(settings, target)
    work = _open_folder(settings, out, resume)
    if (texts := work / _CORPUS).exists():
        corpus = Corpus.load(texts)
    else:
        corpus = make_corpus(settings, target, lambda done, total: observer(Report(phase="sampling", done=done, total=total)))
        corpus.save(texts)
    pupil = make_pupil(settings, target, corpus, start)
    pupil.prime(corpus.test())
    acceptance = _run(settings, pupil, corpus, work, observer)
    details = {"acceptance": [asdict(level) for level in acceptance], "steps": settings.steps, "trained_for": settings.target}
    try:
        pupil.export(out, details)
        _write_card(out, settings, corpus, acceptance, pupil, command)
    except (OSError, SafetensorError) as error:
        raise FailureError(f"cannot write the draft to {out} ({error}); free some space and run again with --resume") from None
    remember_draft(settings.target, out)
    return out


def begun(out: Path) -> bool:
    """Whether a folder holds a training that can be resumed."""
    return (out / _WORK / _SETTINGS).exists()


def check_out(out: Path, *, resume: bool) -> None:
    """Refuse a folder that cannot be written to, or is not empty, unless it holds a training that is to be resumed."""
    if not begun(out):
        check_empty(out)
    elif resume:
        check_folder(out, resume=True)
    else:
        check_empty(out, remedy="pass --resume to continue training, or choose another --out")


def what_is_kept(out: Path) -> str:
    """Say what a training that was interrupted has kept, and how to continue."""
    if not begun(out):
        return "nothing was kept: the training had not begun"
    text = "" if (out / _WORK / _CORPUS).exists() else ", but not the text written so far"
    return f"{out} keeps what was done{text}: give the same command with --resume to continue"


def _open_folder(settings: TrainSettings, out: Path, resume: bool) -> Path:
    work = out / _WORK
    try:
        check_out(out, resume=resume)
        work.mkdir(parents=True, exist_ok=True)
        keep_settings(work / _SETTINGS, settings.as_dict(), out, resume=resume, free=_FREE)
    except OSError as error:
        raise cannot_write(out, error) from None
    return work


def make_pupil(settings: TrainSettings, target: Loaded, corpus: Corpus, start: HFModel | FeatureHead | None = None) -> Pupil:
    """Return the draft before its first step, new or from `load_start`. It knows the most frequent tokens of the corpus."""
    size = target.model.vocab_size
    rows = start.vocab_size if isinstance(start, HFModel) else size  # tables may be padded differently
    tokens_D = torch.arange(min(size, rows))
    if 0 < settings.vocabulary < size:
        tokens_D = corpus.frequent_tokens(settings.vocabulary, size, target.eos_token_ids)
        tokens_D = tokens_D[tokens_D < rows]
    whole = len(tokens_D) == size == rows
    vocabulary = None if whole else PartialVocabulary(tokens_D.to(target.model.device), size)
    if isinstance(settings.size, DraftSize):
        assert not isinstance(start, FeatureHead)
        return DraftPupil(settings, target, vocabulary, start)
    assert not isinstance(start, HFModel)
    return HeadPupil(settings, target, vocabulary, start)


def _run(settings: TrainSettings, pupil: Pupil, corpus: Corpus, work: Path, observer: Observer) -> tuple[Acceptance, ...]:
    parameters = [parameter for parameter in pupil.module.parameters() if parameter.requires_grad]
    optimizers = make_optimizers(settings, parameters)
    step = _load_checkpoint(work, pupil.module, optimizers)
    acceptance = evaluate(pupil, corpus)
    observer(Report(phase="training", done=step, total=settings.steps, acceptance=acceptance))
    while step < settings.steps:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = settings.learning_rate * _rate(step / settings.steps)
        loss = take_step(settings, pupil, corpus, step, optimizers, parameters)
        step += 1
        saves = step % settings.save_every == 0 or step == settings.steps
        evaluates = step % settings.evaluate_every == 0 or step == settings.steps
        if saves or evaluates or step % 10 == 0:  # not at every step: reading the loss is a sync
            value = float(loss)
            if not math.isfinite(value):
                raise FailureError(
                    f"the loss is not a number at step {step}; the last good checkpoint is in {work}: resume from it with "
                    "--resume and a lower --learning-rate, in a copy of the folder"
                )
            if evaluates:
                acceptance = evaluate(pupil, corpus)
            observer(Report(phase="training", done=step, total=settings.steps, loss=value, acceptance=acceptance))
        if saves:
            _save_checkpoint(work, pupil.module, optimizers, step)
    return acceptance


def make_optimizers(settings: TrainSettings, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for matrices and AdamW for the rest."""
    rate, on_gpu = settings.learning_rate, parameters[0].is_cuda
    muon = settings.optimizer == "muon" and hasattr(torch.optim, "Muon")
    if settings.optimizer == "muon" and not muon:
        logger.warning("this version of torch has no Muon (2.9 has): training with AdamW instead")
    matrices = [parameter for parameter in parameters if parameter.ndim == 2 and muon]
    others = [parameter for parameter in parameters if parameter.ndim != 2 or not muon]
    optimizers: list[torch.optim.Optimizer] = []
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=on_gpu))
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def take_step(
    settings: TrainSettings,
    pupil: Pupil,
    corpus: Corpus,
    step: int,
    optimizers: list[torch.optim.Optimizer],
    parameters: list[nn.Parameter],
) -> Tensor:
    """Take one step and return its loss. If the gradient is not finite, skip the update and return NaN."""
    with enough_memory(f"learn from {settings.batch_size} texts per step", "--batch-size"):
        with _autocast(pupil):
            loss = _loss(settings, pupil, corpus, step)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(parameters, _CLIP)
    if not bool(norm.isfinite()):  # checked at every step, so that no checkpoint holds such weights
        return torch.full_like(loss.detach(), torch.nan)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def _loss(settings: TrainSettings, pupil: Pupil, corpus: Corpus, step: int) -> Tensor:
    """Return the mean loss over positions and depths, weighted by the probability that drafting reaches them."""
    lesson = pupil.study(corpus.batch(step, settings.batch_size, settings.seed), pupil.depths)
    reach_R = torch.ones_like(lesson.distributions.probs_RD[:, 0])
    loss = weight = reach_R.new_zeros(())
    tree = settings.size.tree if isinstance(settings.size, HeadSize) else "1"
    counts = [int(part) for part in tree.split("x")] + [1] * len(lesson.outputs)
    last_phase = step >= _LAST_PHASE * settings.steps
    for depth, (count, (rows_R, outputs_RH)) in enumerate(zip(counts, lesson.outputs, strict=False)):
        reached_R = reach_R[rows_R] >= _LEAST_REACH
        if depth > 0:  # every other chain is enough, but each of them at all depths
            reached_R &= (rows_R + depth) % 2 == 0
        rows_R, logits_RD = rows_R[reached_R], pupil.logits(outputs_RH[reached_R])
        wanted = count if last_phase else 1
        part, found_R = loss_of(settings.loss, lesson.distributions.probs_RD[rows_R], logits_RD, reach_R[rows_R], wanted)
        loss, weight = loss + part, weight + reach_R[rows_R].sum()
        # While the loss is about one candidate, treat the others as independent of it.
        accepted_R = torch.zeros_like(reach_R).index_put_((rows_R,), 1 - (1 - found_R) ** (count - wanted + 1))
        reach_R = nn.functional.pad((reach_R * accepted_R)[:-1], (1, 0)) * lesson.follows_R
    return loss / weight


def _rate(share: float) -> float:
    """Return the learning rate relative to its peak: a short linear warm-up, then a cosine decay."""
    if share < _WARM_UP:
        return (share + 0.002) / (_WARM_UP + 0.002)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))


@torch.no_grad()
def evaluate(pupil: Pupil, corpus: Corpus) -> tuple[Acceptance, ...]:
    """Measure acceptance on held-out texts at each depth of drafting."""
    with _autocast(pupil):
        lesson = pupil.study(corpus.test().rows(slice(_TEST_TEXTS)), pupil.depths)
        some = slice(None, None, max(len(lesson.follows_R) // _TEST_POSITIONS, 1))
        return tuple(
            acceptance_of(lesson.distributions.rows(rows_R[some]), pupil.logits(outputs_RH[some]))
            for rows_R, outputs_RH in lesson.outputs
        )


def _autocast(pupil: Pupil) -> torch.autocast:
    target = pupil.teacher.target
    return torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16)


def _save_checkpoint(work: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Save weights, optimizer states and the step; if that fails or is killed, the last checkpoint remains."""
    tensors = {f"weights.{key}": value for key, value in module.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
    # Copy each tensor: safetensors refuses tied weights, which share storage.
    own = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
    try:
        with written_whole(work / _CHECKPOINT) as partial:
            save_file(own, partial, metadata={"step": str(step)})
    except (OSError, SafetensorError) as error:
        raise FailureError(
            f"cannot write {work / _CHECKPOINT} ({error}), but the last checkpoint is intact; free some space and run again "
            "with --resume"
        ) from None


def _load_checkpoint(work: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore the last checkpoint and return its step; 0 without one."""
    file = work / _CHECKPOINT
    if not file.exists():
        return 0
    try:
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
            step = int(opened.metadata()["step"])
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise FailureError(f"cannot read the checkpoint {file} ({error}); remove it to train from the start") from None
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    try:
        module.load_state_dict(weights)
    except RuntimeError:
        raise UsageError(
            f"the checkpoint in {work} is of a draft of another size; use the same sizes, or another --out"
        ) from None
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, number, index, name = key.split(".", 3)
            states[int(number)].setdefault(int(index), {})[name] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return step


def _write_card(
    out: Path, settings: TrainSettings, corpus: Corpus, acceptance: tuple[Acceptance, ...], pupil: Pupil, command: str
) -> None:
    """Write `README.md`: what the draft is, how it was trained, how good it is, and the command that made it."""
    parameters = sum(parameter.numel() for parameter in pupil.module.parameters())
    kind = "a small language model" if settings.kind == "draft" else "a feature head on the target's hidden states"
    known = pupil.teacher.vocabulary
    vocabulary = "all of the target's tokens" if known is None else f"{len(known.tokens_D)} frequent tokens"
    started = [] if settings.start is None else [f"- Start: `{settings.start}`."]
    lengths = " and ".join(str(group.tokens_NL.shape[1]) for group in corpus.groups)
    rows = [
        f"| {depth} | {level.greedy_1:.3f} | {level.greedy_4:.3f} | {level.sampled_1:.3f} | {level.sampled_4:.3f} |"
        for depth, level in enumerate(acceptance, start=1)
    ]
    lines = [
        f"# A draft for {settings.target}",
        "",
        f"{kind.capitalize()}, {parameters / 1e6:.1f} M parameters, drafts {vocabulary}. It proposes tokens to",
        f"`{settings.target}`, which checks every one of them, so the text stays the target's own. It is of no use by itself.",
        "",
        "## Use",
        "",
        "```python",
        "import polydraft",
        "",
        f'decoder = polydraft.load("{settings.target}", draft="PATH OF THIS FOLDER")',
        "```",
        "",
        "## Training",
        "",
        *started,
        f"- Text: {corpus.source}; {corpus.num_tokens:,} tokens in texts of {lengths}.",
        f"- {settings.steps} steps of {settings.batch_size} texts, loss `{settings.loss}` on the target's full distribution, "
        f"learning rate {settings.learning_rate:g}, seed {settings.seed}.",
        f"- Command: `{command}`",
        "",
        "## Acceptance on held-out text",
        "",
        "Probability that a candidate is accepted, by depth in the tree; four candidates are drawn without replacement.",
        "",
        "| depth | T=0, 1 candidate | T=0, 4 | T=1, 1 | T=1, 4 |",
        "|---|---|---|---|---|",
        *rows,
    ]
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
