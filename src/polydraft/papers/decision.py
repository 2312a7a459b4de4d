"""Models that decide whether to continue drafting, by estimating whether the target will accept the draft's next token.

On disk a decision model is a folder with `config.json` and `model.safetensors`; it has a fingerprint of its draft.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, §3.3.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from polydraft.draft.stopping_builder import Decision
from polydraft.errors import FailureError, UsageError, first_line
from polydraft.models import Head, LanguageModel
from polydraft.models.heads.head_folder import check_header

DEFAULT_THRESHOLD = 0.4
"""β of [1]."""

MODEL_TYPE = "polydraft_decision"
AUTO = "auto"
_DRAFTS = Path(__file__).parent.parent / "drafts"
_SAMPLED = 64
"""Numbers of each weight tensor that go into a fingerprint."""


class DecisionKind(StrEnum):
    """The input of a decision model."""

    HIDDEN = "hidden"
    """Type 1 of [1]: the draft's hidden state; learns min(1, p/q) of the drafted token ([1] prints max)."""
    DISTRIBUTION = "distribution"
    """Type 2 of [1]: the draft's largest probabilities and its entropy; learns whether the token was accepted."""


_SHIPPED = {
    ("smollm2-head", DecisionKind.DISTRIBUTION): _DRAFTS / "smollm2-decision",
    ("smollm2-head", DecisionKind.HIDDEN): _DRAFTS / "smollm2-decision-hidden",
}


def shipped_decision(draft: str, name: str) -> Path | None:
    """Return the folder of the decision model that ships for a draft, by `DecisionKind` or ``auto``; None if none does."""
    kinds = [*DecisionKind][::-1] if name == AUTO else [DecisionKind(name)]
    folders = [_SHIPPED[draft, kind] for kind in kinds if (draft, kind) in _SHIPPED]
    return next((folder for folder in folders if (folder / "config.json").exists()), None)


def check_threshold(value: float) -> float:
    """Refuse a threshold that is not a probability."""
    if not 0 <= value <= 1:
        raise UsageError(f"decision threshold {value!r} (stop_below) is out of range; allowed: 0 (never stop) to 1")
    return value


def distribution_inputs(logits_RV: Tensor, top: int) -> Tensor:
    """Return the `top` largest probabilities and the entropy, in nats, of each row's distribution at temperature 1."""
    log_probs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    top_RK = log_probs_RV.topk(min(top, log_probs_RV.shape[-1]), dim=-1).values.exp()
    top_RK = nn.functional.pad(top_RK, (0, top - top_RK.shape[-1]))
    weighted_RV = torch.where(log_probs_RV > -torch.inf, log_probs_RV.exp() * log_probs_RV, 0.0)
    return torch.cat([top_RK, -weighted_RV.sum(-1, keepdim=True)], dim=-1)


@dataclass(frozen=True, kw_only=True)
class DecisionShape:
    """Sizes of a decision model."""

    kind: DecisionKind
    inputs: int
    """Number of inputs: the draft's features, or `top` probabilities and the entropy."""
    width: int = 64
    """Neurons of each inner layer."""

    @property
    def layers(self) -> int:
        """Number of linear layers: three for hidden states, two for distributions, as in [1]."""
        return 3 if self.kind is DecisionKind.HIDDEN else 2


class DecisionModel(nn.Module, Decision):
    """A multi-layer perceptron with calibrated output; a row stops drafting if none of its nodes reaches the threshold β."""

    mean_F: Tensor
    spread_F: Tensor
    calibration_2: Tensor

    def __init__(self, shape: DecisionShape, threshold: float = DEFAULT_THRESHOLD) -> None:
        super().__init__()
        self.shape, self.threshold = shape, check_threshold(threshold)
        sizes = [shape.inputs, *[shape.width] * (shape.layers - 1), 1]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.register_buffer("mean_F", torch.zeros(shape.inputs))
        self.register_buffer("spread_F", torch.ones(shape.inputs))
        self.register_buffer("calibration_2", torch.tensor([1.0, 0.0]))

    def inputs(self, features_RF: Tensor, logits_RV: Tensor) -> Tensor:
        """Return the model's inputs."""
        if self.shape.kind is DecisionKind.HIDDEN:
            return features_RF.float()
        return distribution_inputs(logits_RV, self.shape.inputs - 1)

    def scores(self, inputs_RF: Tensor) -> Tensor:
        """Return log-odds of acceptance, `[R]`, before calibration."""
        scores_R: Tensor = self.mlp((inputs_RF - self.mean_F) / self.spread_F)[..., 0]
        return scores_R

    def chances(self, inputs_RF: Tensor) -> Tensor:
        """Return calibrated probabilities of acceptance."""
        return torch.sigmoid(self.calibration_2[0] * self.scores(inputs_RF) + self.calibration_2[1])

    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        """Return which rows continue: those with a node whose probability reaches the threshold."""
        return (self.chances(self.inputs(features_BGF, logits_BGV)) >= self.threshold).any(-1)

    def fit_inputs(self, inputs_RF: Tensor) -> None:
        """Set the mean and spread that normalise inputs."""
        self.mean_F.copy_(inputs_RF.mean(0))
        self.spread_F.copy_(inputs_RF.std(0).clamp(min=1e-4))

    def calibrate(self, inputs_RF: Tensor, labels_R: Tensor) -> None:
        """Fit slope and shift of the log-odds to held-out labels (Platt scaling)."""
        with torch.no_grad():
            scores_R = self.scores(inputs_RF)
        line_2 = torch.tensor([1.0, 0.0], device=scores_R.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([line_2], max_iter=200)

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = nn.functional.binary_cross_entropy_with_logits(line_2[0] * scores_R + line_2[1], labels_R)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        if all(math.isfinite(value) for value in line_2.tolist()):
            self.calibration_2.copy_(line_2.detach())


def draft_fingerprint(draft: LanguageModel | Head) -> str:
    """Return a short fingerprint of a draft's weights, the same in every number format."""
    digest = hashlib.sha256()
    for name, weight in sorted(_weights(draft).items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(len(flat) // _SAMPLED, 1)][:_SAMPLED]
        # Round to bfloat16, the coarsest format that drafts are loaded in.
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(draft: LanguageModel | Head) -> dict[str, Tensor]:
    if isinstance(draft, Head):
        return dict(draft.state_dict())
    module = getattr(draft, "hf_model", None)
    if module is not None:
        layers = torch.tensor([float(getattr(draft, "num_layers", 0))])  # early exits share the weights of their target
        return {**module.state_dict(), "layers": layers}
    return {name: value for name, value in vars(draft).items() if isinstance(value, Tensor)}


def save_decision(model: DecisionModel, draft: LanguageModel | Head, folder: Path, details: dict[str, Any]) -> None:
    """Write a decision model and its configuration into an existing folder; `details` go into the latter."""
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": MODEL_TYPE,
        "draft": draft.name,
        "draft_fingerprint": draft_fingerprint(draft),
        **asdict(model.shape),
        **details,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_decision(name: str, draft: LanguageModel | Head, threshold: float = DEFAULT_THRESHOLD) -> DecisionModel:
    """Load a draft's decision model: a folder, or ``auto``, ``hidden`` or ``distribution`` for one that ships.

    A model that was trained for another draft is refused. The threshold is β, see `DecisionModel`.
    """
    folder = Path(name)
    if name in (AUTO, *DecisionKind):
        shipped = shipped_decision(draft.name, name)
        if shipped is None:
            of_kind = "" if name == AUTO else f" of kind {name!r}"
            raise UsageError(
                f"no decision model{of_kind} ships for draft {draft.name!r}; train one with: polydraft train decision"
            )
        folder = shipped
    try:
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] != MODEL_TYPE:
            raise ValueError(f"model_type is {config['model_type']!r}")
        kind = DecisionKind(config["kind"])
        shape = DecisionShape(kind=kind, inputs=int(config["inputs"]), width=int(config["width"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(
            f"{name!r} is not a decision model ({reason}); give a folder made by polydraft train decision, or auto"
        ) from None
    if config.get("draft_fingerprint") != draft_fingerprint(draft):
        raise UsageError(
            f"decision model {name!r} was trained for another draft ({config.get('draft')}) than {draft.name!r}; train one for "
            "this draft with: polydraft train decision"
        )
    try:
        check_header(folder / "model.safetensors", DecisionModel, shape)  # before wrong sizes take memory
        model = DecisionModel(shape, threshold)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise FailureError(
            f"cannot read the weights of decision model {name!r} ({first_line(error)}); train it again"
        ) from None
    return model.to(draft.device).requires_grad_(False).eval()
