"""Models that estimate whether the target will accept what a draft says next.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, §3.3.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch
from torch import Tensor, nn

from polydraft.errors import UsageError

DEFAULT_THRESHOLD = 0.4
"""β of [1]."""


class DecisionKind(StrEnum):
    """What a decision model looks at."""

    HIDDEN = "hidden"
    """Type 1 of [1]: the draft's hidden state; learns min(1, p/q) of the drafted token ([1] prints max)."""
    LAW = "law"
    """Type 2 of [1]: the likeliest probabilities of the draft's law and its entropy; learns whether the token was accepted."""


class Decision(ABC):
    """Whether rows go on drafting.

    Any rule is exact that looks at laws and tokens drawn so far and at nothing of what follows: children that are drawn
    afterwards have the law that verification assumes.
    """

    @abstractmethod
    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        """Say which rows go on, `[B]`, given the draft's features and logits at the G nodes whose children were drawn last."""


def check_threshold(value: float) -> float:
    """Refuse a threshold that is no probability."""
    if not 0 <= value <= 1:
        raise UsageError(f"decision threshold {value!r} is out of range; allowed: 0 (never stop) to 1")
    return value


def law_inputs(logits_RV: Tensor, top: int) -> Tensor:
    """Return the `top` largest probabilities and the entropy, in nats, of each row's law at temperature 1."""
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
    """Numbers it looks at: the draft's features, or `top` probabilities and the entropy."""
    width: int = 64
    """Neurons of each inner layer."""

    @property
    def layers(self) -> int:
        """Linear layers: three for hidden states, two for laws, as in [1]."""
        return 3 if self.kind is DecisionKind.HIDDEN else 2


class DecisionModel(nn.Module, Decision):
    """A multi-layer perceptron with a calibrated answer.

    Parameters
    ----------
    shape : DecisionShape
    threshold : float
        β: a row stops when none of its nodes has at least this chance of acceptance.
    """

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
        """Return what the model looks at."""
        if self.shape.kind is DecisionKind.HIDDEN:
            return features_RF.float()
        return law_inputs(logits_RV, self.shape.inputs - 1)

    def scores(self, inputs_RF: Tensor) -> Tensor:
        """Return log-odds of acceptance, `[R]`, before calibration."""
        scores_R: Tensor = self.mlp((inputs_RF - self.mean_F) / self.spread_F)[..., 0]
        return scores_R

    def chances(self, inputs_RF: Tensor) -> Tensor:
        """Return calibrated chances of acceptance."""
        return torch.sigmoid(self.calibration_2[0] * self.scores(inputs_RF) + self.calibration_2[1])

    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        """Go on where some node's chance reaches the threshold."""
        return (self.chances(self.inputs(features_BGF, logits_BGV)) >= self.threshold).any(-1)

    def fit_inputs(self, inputs_RF: Tensor) -> None:
        """Learn the inputs' mean and spread."""
        self.mean_F.copy_(inputs_RF.mean(0))
        self.spread_F.copy_(inputs_RF.std(0).clamp(min=1e-4))

    def calibrate(self, inputs_RF: Tensor, labels_R: Tensor, steps: int = 200) -> None:
        """Fit a slope and a shift of the log-odds to held-out labels (Platt scaling)."""
        with torch.no_grad():
            scores_R = self.scores(inputs_RF)
        line_2 = torch.tensor([1.0, 0.0], device=scores_R.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([line_2], max_iter=steps)

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = nn.functional.binary_cross_entropy_with_logits(line_2[0] * scores_R + line_2[1], labels_R)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        if all(math.isfinite(value) for value in line_2.tolist()):
            self.calibration_2.copy_(line_2.detach())
