"""Training of decision models from rounds of a target and its draft.

A decision model learns from traces: what the draft computed for each token, and whether the target accepted the token.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from polydraft.draft import Builder, DistributionSource, TreeDrafter
from polydraft.draft.stopping_builder import StoppingBuilder
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.models import Head, LanguageModel
from polydraft.models.loading import Loaded
from polydraft.output import cannot_write, check_empty
from polydraft.papers.decision import DecisionKind, DecisionModel, DecisionShape, distribution_inputs, save_decision
from polydraft.prompts import load_prompts
from polydraft.sampling import RowParams, SamplingParams
from polydraft.train.settings import DecisionSettings
from polydraft.trees import DraftTree, Topology
from polydraft.verify import Scheme, Verdict

TOP = 10
"""Number of largest probabilities kept of each distribution."""
_HELD_OUT = 0.1
_BATCH = 1024
_BINS = 10
Progress = Callable[[str, int, int], None]
"""`(phase, done, total)`."""


@dataclass(frozen=True, eq=False)
class Traces:
    """Drafted tokens that verification reached, one per row."""

    hidden_RF: Tensor
    """The draft's features from which the token was drawn."""
    distributions_RK: Tensor
    """The largest probabilities of its distribution, and the entropy."""
    ratios_R: Tensor
    """min(1, p/q) of the token."""
    accepted_R: Tensor
    """1 if it was accepted, 0 if rejected."""

    @classmethod
    def joined(cls, parts: Sequence["Traces"]) -> "Traces":
        """Concatenate traces."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


class _Tracing(TreeDrafter):
    """A drafter of chains that records traces."""

    def __init__(self, draft: LanguageModel | Head, chain: Topology, scheme: str, traces: list[Traces]) -> None:
        super().__init__(draft, chain, scheme)
        self._traces = traces

    def builder(self, params: RowParams, target: LanguageModel) -> Builder:
        """Return a builder that records traces."""
        assert isinstance(self.topology, Topology)
        return _TracingBuilder(self.source(len(params)), self.topology, params, target, self.scheme, self._traces)


class _TracingBuilder(StoppingBuilder):
    """A builder that never stops early, but records traces. It copies values to the host, so rounds cannot be captured."""

    elastic = False

    def __init__(
        self,
        source: DistributionSource,
        topology: Topology,
        params: RowParams,
        target: LanguageModel,
        scheme: str | Scheme,
        traces: list[Traces],
    ) -> None:
        super().__init__(source, topology, params, target.vocab_size, scheme=scheme)
        self._target, self._traces, self._temperature = target, traces, params.rows[0].temperature
        self._built: DraftTree | None = None
        self._inputs: list[tuple[Tensor, Tensor]] = []
        """By level of the tree: what a decision model would be shown."""

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Build a chain, keeping it and its inputs for `learn`."""
        self._inputs.clear()
        self._built = super().build(tail_B2, uniforms_BU)
        return self._built

    def stops(self, features_BGF: Tensor, logits_BGV: Tensor) -> bool:
        """Record the inputs and continue drafting."""
        self._inputs.append((features_BGF[:, 0].float(), distribution_inputs(logits_BGV[:, 0], TOP)))
        return False

    def learn(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Record a trace for each token of the chain up to and including the first rejected one."""
        tree, logits_BNV = self._built, self._target.head(features_BNF)
        assert tree is not None, "build() comes first"
        for depth, (hidden_BF, distribution_BK) in enumerate(self._inputs):
            token_B1 = tree.tokens_BN[:, depth + 1, None].clamp(min=0)
            node_B = torch.full_like(token_B1[:, 0], depth)
            if self._temperature == 0:
                ratio_B = (logits_BNV[:, depth].argmax(-1) == token_B1[:, 0]).float()
            else:
                target_B1 = torch.softmax(logits_BNV[:, depth].float() / self._temperature, dim=-1).gather(1, token_B1)
                ratio_B = (target_B1 / tree.draft_distribution(depth, node_B).gather(1, token_B1)).clamp(max=1)[:, 0]
            seen_B = (keep_B > 0) & (verdict.accepted_B >= depth)
            accepted_B = (verdict.accepted_B > depth).float()
            parts = (hidden_BF, distribution_BK, ratio_B, accepted_B)
            self._traces.append(Traces(*(part[seen_B].cpu() for part in parts)))


def collect(
    settings: DecisionSettings,
    target: LanguageModel,
    draft: LanguageModel | Head,
    prompts: Sequence[list[int]],
    *,
    eos_token_ids: Sequence[int] = (),
    advance: Callable[[int], None] = lambda done: None,
) -> Traces:
    """Decode prompts, alternately greedily and at temperature 1, until there are enough traces.

    Prompts are reused with other seeds as often as necessary. `advance` is called with the number of traces so far.
    """
    rows = settings.rows
    traces: list[Traces] = []
    batch = 0
    while (have := sum(len(part.ratios_R) for part in traces)) < settings.traces:
        advance(have)
        # Greedy texts do not depend on the seed, so each prompt is decoded greedily once and then only sampled.
        first = (batch // 2) * rows
        greedy = batch % 2 == 0 and first < len(prompts)
        scheme = "top" if greedy else "speculative"
        drafter = _Tracing(draft, Topology.fork(1, settings.depth), scheme, traces)
        decoder = Decoder(target, drafter, eos_token_ids=eos_token_ids, walk="node")
        texts = [prompts[(first + row) % len(prompts)] for row in range(min(rows, len(prompts)) if greedy else rows)]
        sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
        decoder.generate(texts, sampling=sampling, max_new_tokens=settings.max_new_tokens, seed=settings.seed + batch)
        batch += 1
    advance(settings.traces)
    return Traces.joined(traces)


@dataclass(frozen=True)
class Quality:
    """The quality of a decision model on held-out traces."""

    auc: float
    """Probability that an accepted token is rated above a rejected one."""
    calibration_error: float
    """Mean distance between predicted and observed acceptance over ten equal bins."""
    accepted: float
    """Share of accepted tokens."""
    count: int


def train_decision(
    settings: DecisionSettings, target: Loaded, draft: LanguageModel | Head, out: Path, progress: Progress
) -> Quality:
    """Collect traces, train and calibrate a decision model, measure it, and write it into a folder."""
    try:
        check_empty(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from None
    encoder = Decoder(target.model, tokenizer=target.tokenizer)
    prompts = [encoder.encode(prompt.content, chat=True) for prompt in load_prompts(settings.prompts, settings.limit)]
    longest = target.model.max_positions
    prompts = [prompt for prompt in prompts if longest is None or len(prompt) + settings.max_new_tokens <= longest]
    if not prompts:
        raise UsageError(
            f"no prompt of {settings.prompts} leaves room for {settings.max_new_tokens} new tokens in a context of {longest}; "
            "lower --max-new-tokens"
        )
    traces = collect(
        settings,
        target.model,
        draft,
        prompts,
        eos_token_ids=target.eos_token_ids,
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
    """Train on most traces, calibrate on a tenth of them, and measure on another tenth."""
    kind = DecisionKind(settings.kind)
    hidden = kind is DecisionKind.HIDDEN
    inputs_RF, labels_R = (traces.hidden_RF, traces.ratios_R) if hidden else (traces.distributions_RK, traces.accepted_R)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = DecisionModel(DecisionShape(kind=kind, inputs=inputs_RF.shape[1], width=settings.width))
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
    """Compare predicted acceptance with observed acceptance."""
    yes = int(accepted_R.sum())
    no = len(accepted_R) - yes
    # Mann-Whitney, with mean ranks for equal chances.
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


def _card(settings: DecisionSettings, draft: str, quality: Quality) -> str:
    what = (
        "the draft's hidden state (type 1; trained on min(1, p/q))"
        if settings.kind == "hidden"
        else f"the {TOP} largest probabilities and the entropy of the draft's distribution "
        "(type 2; trained on whether the token was accepted)"
    )
    return (
        f"# Decision model for draft {draft}\n\n"
        f"Estimates from {what} whether the target will accept the draft's next token; drafting stops where no path reaches "
        "the threshold. From improved-MCSD, §3.3. It works with this draft only.\n\n"
        f"Held-out traces: {quality.count}, of which {quality.accepted:.1%} accepted. AUC {quality.auc:.3f}, calibration error "
        f"{quality.calibration_error:.3f}.\n\n"
        f"Traces: {settings.traces} drafted tokens of real rounds on prompts {settings.prompts}, alternately "
        f"greedy and at temperature 1, chains of {settings.depth}; {settings.steps} steps, seed {settings.seed}.\n"
    )
