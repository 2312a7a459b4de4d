"""From traces to a decision model in a folder."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from polydraft.bench.prompts import load_prompts
from polydraft.decision import DecisionKind, DecisionModel, DecisionShape, save_decision
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.loading import Loaded
from polydraft.train.decision_traces import TOP, Traces, collect

_HELD_OUT = 0.1
_BATCH = 1024
_BINS = 10
Progress = Callable[[str, int, int], None]
"""`(phase, done, total)`."""


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """What a decision model is trained with."""

    kind: DecisionKind = DecisionKind.LAW
    prompts: str = "builtin"
    limit: int | None = None
    traces: int = 100_000
    depth: int = 5
    rows: int = 32
    new_tokens: int = 64
    width: int = 64
    steps: int = 2000
    learning_rate: float = 1e-3
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be trained."""
        for name in ("traces", "depth", "rows", "new_tokens", "width", "steps"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {getattr(self, name)} is out of range; allowed: whole numbers from 1")
        if not self.learning_rate > 0:
            raise UsageError(f"--learning-rate {self.learning_rate} is out of range; allowed: above 0")


@dataclass(frozen=True)
class Quality:
    """How good a decision model is on traces it has not seen."""

    auc: float
    """Chance that an accepted token is rated above a rejected one."""
    calibration_error: float
    """Mean distance between what is said and what happens, over ten equal bins."""
    accepted: float
    """Share of tokens that were accepted."""
    count: int


def train_decision(
    settings: DecisionSettings, target: Loaded, draft: LanguageModel | FeatureHead, out: Path, progress: Progress
) -> Quality:
    """Collect traces, train, calibrate, measure, and write a folder."""
    settings.check()
    try:
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"{out} is not empty; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}); choose another --out") from None
    encoder = Decoder(target.model, tokenizer=target.tokenizer)
    prompts = [encoder.encode(prompt.text, chat=True) for prompt in load_prompts(settings.prompts, settings.limit)]
    longest = target.model.max_positions
    prompts = [prompt for prompt in prompts if longest is None or len(prompt) + settings.new_tokens <= longest]
    if not prompts:
        raise UsageError(
            f"no prompt of {settings.prompts} leaves room for {settings.new_tokens} new tokens in a context of {longest}; "
            "lower --max-new-tokens"
        )
    traces = collect(
        target.model,
        draft,
        prompts,
        count=settings.traces,
        depth=settings.depth,
        rows=settings.rows,
        new_tokens=settings.new_tokens,
        eos_token_ids=target.eos_token_ids,
        seed=settings.seed,
        advance=lambda done: progress("traces", min(done, settings.traces), settings.traces),
    )
    model, quality = fit(settings, traces, draft.device, lambda done: progress("training", done, settings.steps))
    try:
        save_decision(model, draft, out, {"settings": asdict(settings), "held_out": asdict(quality)})
        (out / "README.md").write_text(_card(settings, draft.name, quality))
    except (OSError, SafetensorError) as error:
        raise FailureError(f"cannot write the decision model to {out} ({error}); free some space and run again") from None
    return quality


def fit(
    settings: DecisionSettings, traces: Traces, device: torch.device, advance: Callable[[int], None] = lambda done: None
) -> tuple[DecisionModel, Quality]:
    """Train on most of the traces; calibrate on a tenth of them and measure on another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        inputs_RF, labels_R = _examples(settings.kind, traces)
        model = DecisionModel(DecisionShape(kind=settings.kind, inputs=inputs_RF.shape[1], width=settings.width))
    generator = torch.Generator().manual_seed(settings.seed)
    order_R = torch.randperm(len(labels_R), generator=generator)
    held = max(int(_HELD_OUT * len(order_R)), 1)
    inputs_RF, labels_R, accepted_R = (values[order_R].to(device) for values in (inputs_RF, labels_R, traces.accepted_R))
    model = model.to(device)
    model.fit_inputs(inputs_RF[2 * held :])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for step in range(settings.steps):
        index_R = torch.randint(2 * held, len(labels_R), (_BATCH,), generator=generator).to(device)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model.scores(inputs_RF[index_R]), labels_R[index_R])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 99 or step + 1 == settings.steps:
            advance(step + 1)
    model.requires_grad_(False).eval()
    model.calibrate(inputs_RF[:held], labels_R[:held])
    return model, quality_of(model.chances(inputs_RF[held : 2 * held]), accepted_R[held : 2 * held])


def quality_of(chances_R: Tensor, accepted_R: Tensor) -> Quality:
    """Measure chances against what happened."""
    yes = int(accepted_R.sum())
    no = len(accepted_R) - yes
    # Mann-Whitney; equal chances share their ranks.
    _, place_R, sizes_X = chances_R.unique(sorted=True, return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    upto_X = sizes_X.cumsum(0).double()
    ranks_R = (upto_X - (sizes_X - 1) / 2)[place_R]
    auc = float((ranks_R[accepted_R > 0].sum() - yes * (yes + 1) / 2) / (yes * no)) if yes and no else float("nan")
    bins_R = (chances_R * _BINS).long().clamp(max=_BINS - 1)
    error = 0.0
    for number in range(_BINS):
        inside_R = bins_R == number
        if inside_R.any():
            gap = chances_R[inside_R].double().mean() - accepted_R[inside_R].double().mean()
            error += float(inside_R.double().mean() * gap.abs())
    return Quality(auc, error, yes / max(len(accepted_R), 1), len(accepted_R))


def _examples(kind: DecisionKind, traces: Traces) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a kind of model."""
    if kind is DecisionKind.HIDDEN:
        return traces.hidden_RF, traces.ratios_R
    return traces.laws_RK, traces.accepted_R


def _card(settings: DecisionSettings, draft: str, quality: Quality) -> str:
    what = (
        "the draft's hidden state (type 1; learnt min(1, p/q))"
        if settings.kind is DecisionKind.HIDDEN
        else f"the {TOP} largest probabilities of the draft's law and its entropy (type 2; learnt whether it was accepted)"
    )
    return (
        f"# Decision model for draft {draft}\n\n"
        f"Estimates from {what} whether the target accepts what the draft says next; drafting stops where no path reaches the "
        "threshold. Of improved-MCSD, §3.3. It serves this draft only.\n\n"
        f"Held-out traces: {quality.count}, of which {quality.accepted:.1%} accepted. AUC {quality.auc:.3f}, calibration error "
        f"{quality.calibration_error:.3f}.\n\n"
        f"Traces: {settings.traces} drafted tokens of real rounds on prompts {settings.prompts}, greedy and at "
        f"temperature 1 by turns, chains of {settings.depth}; {settings.steps} steps, seed {settings.seed}.\n"
    )
