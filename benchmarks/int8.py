"""How far the bundled model in fewer bits is from itself in float32: KL divergence and agreement of the most likely token.

    python benchmarks/int8.py TEXT [--tokens 20000] [--length 500] [--dtypes int8] [--target smollm2] [--threads 2]

TEXT is a file of plain text, .gz or not. Stretches of LENGTH tokens, evenly spread over it, are read from their beginnings,
both models by native kernels. Per place: KL(float32 || dtype) in nats, and whether both have the same most likely token.
Figures so far go to stderr as it runs; a table and one JSON line at the end.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from polydraft.models.hf import HFModel
from polydraft.models.loading import load_model
from polydraft.models.placement import resolve_device
from polydraft.trees import causal_block

_PART = 64
"""Places whose distributions are compared at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--dtypes", nargs="*", default=["int8"])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    device = resolve_device("cpu")
    loaded = load_model(options.target, device, torch.float32)
    others = {name: load_model(options.target, device, getattr(torch, name)).model for name in options.dtypes}
    stretches = spread(read_text(options.text), loaded.tokenizer, options.tokens, options.length)
    found: dict[str, list[Tensor]] = {name: [] for name in others}
    with torch.inference_mode():
        for number, tokens in enumerate(stretches, start=1):
            features_TF = features(loaded.model, tokens)
            for name, other in others.items():
                found[name].append(distances(loaded.model, features_TF, other, features(other, tokens), tokens))
            progress = ", ".join(f"{name} {torch.cat(parts)[:, 0].mean():.4f}" for name, parts in found.items())
            print(f"{number * options.length} tokens: mean KL {progress}", file=sys.stderr)
    figures = {name: summary(torch.cat(parts)) for name, parts in found.items()}
    columns = list(next(iter(figures.values())))
    print(f"{'':>10}" + "".join(f"{column:>16}" for column in columns))
    for name, row in figures.items():
        print(f"{name:>10}" + "".join(f"{row[column]:>16.5g}" for column in columns))
    print(json.dumps({"text": options.text.name, "length": options.length, "figures": figures}))


def read_text(path: Path) -> str:
    """Return the words of a file, packed or not."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8", "replace")


def spread(text: str, tokenizer: object, tokens: int, length: int) -> list[list[int]]:
    """Return stretches of some tokens each, evenly spread over a text."""
    count, span = tokens // length, 12 * length  # characters: more than any stretch needs
    step = (len(text) - span) // max(count, 1)
    assert count > 0 and step > 0, "the text is too short"
    found = [tokenizer(text[place * step : place * step + span])["input_ids"][:length] for place in range(count)]
    assert all(len(stretch) == length for stretch in found), "a stretch is too short"
    return found


def features(model: HFModel, tokens: list[int]) -> Tensor:
    """Return the last hidden states of a text."""
    context = model.start(1, len(tokens))
    return context.extend(torch.tensor([tokens]), causal_block(1, len(tokens), model.device))[0]


def distances(model: HFModel, features_TF: Tensor, other: HFModel, other_features_TF: Tensor, tokens: list[int]) -> Tensor:
    """Return per place: KL, agreement, and what either model pays for the next token, in nats (not a number at the end)."""
    rows, following = [], [*tokens[1:], 0]
    for start in range(0, len(tokens), _PART):
        part = slice(start, start + _PART)
        ours_RV = model.head(features_TF[part]).double().log_softmax(-1)
        theirs_RV = other.head(other_features_TF[part]).double().log_softmax(-1)
        divergence_R = (ours_RV.exp() * (ours_RV - theirs_RV)).sum(-1)
        same_R = (ours_RV.argmax(-1) == theirs_RV.argmax(-1)).double()
        next_R1 = torch.tensor(following[part])[:, None]
        rows.append(
            torch.stack([divergence_R, same_R, -ours_RV.gather(1, next_R1)[:, 0], -theirs_RV.gather(1, next_R1)[:, 0]], 1)
        )
    found = torch.cat(rows)
    found[-1, 2:] = torch.nan
    return found


def summary(places_X4: Tensor) -> dict[str, float]:
    """Return the figures of all places."""
    divergence_X, same_X, ours_X, theirs_X = places_X4.T
    return {
        "tokens": float(len(places_X4)),
        "mean KL": float(divergence_X.mean()),
        "median KL": float(divergence_X.median()),
        "99 % below": float(divergence_X.quantile(0.99)),
        "largest": float(divergence_X.max()),
        "same token, %": 100 * float(same_X.mean()),
        "float32 nats": float(ours_X.nanmean()),
        "nats": float(theirs_X.nanmean()),
    }


if __name__ == "__main__":
    main()
