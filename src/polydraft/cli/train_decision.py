"""`polydraft train decision`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from polydraft.cli.machine import DEVICE, THREADS, set_threads
from polydraft.cli.option_list import with_options
from polydraft.errors import UsageError

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--target", default="smollm2", show_default=True, help="smollm2 (bundled), a folder, or a hub name."),
    click.option("--draft", default="auto", show_default=True, help="Draft to decide for: a folder, a hub name, early-exit:k, or auto."),
    click.option("--kind", type=click.Choice(["hidden", "law"]), default="law", show_default=True, help="What it looks at: the draft's hidden states (type 1), or its law (type 2)."),
    click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the decision model."),
    click.option("--prompts", default="builtin", show_default=True, help="Prompts to decode for traces: builtin, or a file."),
    click.option("--limit", type=int, default=None, help="Use at most so many prompts."),
    click.option("--traces", type=int, default=100_000, show_default=True, help="Drafted tokens to learn from."),
    click.option("--depth", type=int, default=5, show_default=True, help="Tokens that are drafted a round."),
    click.option("--rows", type=int, default=32, show_default=True, help="Texts that are decoded side by side."),
    click.option("--max-new-tokens", "new_tokens", type=int, default=64, show_default=True, help="Most tokens of each text."),
    click.option("--width", type=int, default=64, show_default=True, help="Neurons of an inner layer."),
    click.option("--steps", type=int, default=2000, show_default=True, help="Training steps."),
    click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="Peak learning rate."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same model (on the same machine)."),
    DEVICE,
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16."),
    THREADS,
]  # fmt: skip


_with_options = with_options(_OPTIONS)


@click.command("decision")
@_with_options
def command(
    target: str, draft: str, kind: str, out: Path, device: str, dtype: str, threads: int | None, **options: Any
) -> None:
    """Train a model that says when to stop drafting, from real rounds of the pair.

    It is used with --decision FOLDER and serves the draft it was trained for only.
    """
    from polydraft.cli.options import arrange_messages
    from polydraft.cli.progress import PhaseProgress
    from polydraft.decision import DecisionKind
    from polydraft.loading import DEFAULT_PAIRS
    from polydraft.models.loading import load_draft, load_model
    from polydraft.models.placement import resolve_device, resolve_dtype
    from polydraft.train.decision_training import DecisionSettings, train_decision

    settings = DecisionSettings(kind=DecisionKind(kind), **options)
    settings.check()
    set_threads(threads)
    arrange_messages()
    usual, _ = DEFAULT_PAIRS.get(target, ("none", ""))
    name = usual if draft == "auto" else draft
    if name == "none":
        raise UsageError("a decision model needs a draft; pass --draft NAME, a folder, or early-exit:k")
    place = resolve_device(device)
    loaded = load_model(target, place, resolve_dtype(dtype, place))
    model = load_draft(name, loaded)
    assert model is not None
    with PhaseProgress() as progress:
        quality = train_decision(settings, loaded, model, out, lambda phase, done, total: progress(phase, done, total, ""))
    click.echo(
        f"decision model written to {out}: AUC {quality.auc:.3f}, calibration error {quality.calibration_error:.3f} on "
        f"{quality.count} held-out tokens, {quality.accepted:.0%} of them accepted; use it with: --decision {out}"
    )
