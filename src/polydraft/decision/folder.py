"""A decision model on disk: `config.json` and `model.safetensors`, with a mark of the draft it belongs to."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polydraft.decision.decision import DEFAULT_THRESHOLD, DecisionKind, DecisionModel, DecisionShape
from polydraft.decision.fingerprint import draft_fingerprint
from polydraft.errors import FailureError, UsageError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.weights_header import check_header, weightless

MODEL_TYPE = "polydraft_decision"
AUTO = "auto"
_DRAFTS = Path(__file__).parent.parent / "drafts"
SHIPPED_DECISIONS = {
    name: folder for name, folder in {"smollm2-head": _DRAFTS / "smollm2-decision"}.items() if (folder / "config.json").exists()
}
"""Decision models that come with this package, by the name of their draft."""


def save_decision(model: DecisionModel, draft: LanguageModel | FeatureHead, folder: Path, details: dict[str, Any]) -> None:
    """Write a decision model, and what is needed to load it, into an existing folder."""
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


def load_decision(name: str, draft: LanguageModel | FeatureHead, threshold: float = DEFAULT_THRESHOLD) -> DecisionModel:
    """Load the decision model of a draft.

    Parameters
    ----------
    name : str
        A folder, or ``"auto"`` for the one that ships with the draft.
    draft : LanguageModel or FeatureHead
        Refused if the model was trained for another.
    threshold : float
        β, see `DecisionModel`.
    """
    folder = Path(name)
    if name == AUTO:
        shipped = SHIPPED_DECISIONS.get(draft.name)
        if shipped is None:
            raise UsageError(f"no decision model ships for draft {draft.name!r}; make one with: polydraft train decision")
        folder = shipped
    try:
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] != MODEL_TYPE:
            raise ValueError(f"model_type is {config['model_type']!r}")
        kind = DecisionKind(config["kind"])
        shape = DecisionShape(kind=kind, inputs=int(config["inputs"]), width=int(config["width"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{name!r} is no decision model ({reason}); name a folder of polydraft train decision, or auto"
        ) from None
    if config.get("draft_fingerprint") != draft_fingerprint(draft):
        raise UsageError(
            f"decision model {name!r} was trained for another draft ({config.get('draft')}) than {draft.name!r}; train one for "
            "this draft with: polydraft train decision"
        )
    try:
        check_header(folder / "model.safetensors", weightless(DecisionModel, shape))  # before sizes that are wrong take memory
        model = DecisionModel(shape, threshold)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FailureError(f"cannot read the weights of decision model {name!r} ({reason}); train it again") from None
    return model.to(draft.device).requires_grad_(False).eval()
