"""The model card of a trained draft."""

from collections.abc import Sequence
from pathlib import Path

from polydraft.train.acceptance import Acceptance
from polydraft.train.corpus import Corpus
from polydraft.train.pupil import Pupil
from polydraft.train.settings import TrainSettings


def write_card(
    out: Path, settings: TrainSettings, corpus: Corpus, acceptance: Sequence[Acceptance], pupil: Pupil, command: str
) -> None:
    """Write `README.md`: what the draft is, what it was trained on, how good it is, how to make it again."""
    parameters = sum(parameter.numel() for parameter in pupil.module.parameters())
    kind = "a small language model" if settings.kind == "draft" else "a feature head on the target's hidden states"
    vocabulary = f"{settings.vocabulary} frequent tokens" if settings.vocabulary else "all of the target's tokens"
    tokens = corpus.texts.tokens_NL.numel()
    rows = [
        f"| {depth} | {level.greedy_1:.3f} | {level.greedy_4:.3f} | {level.sampled_1:.3f} | {level.sampled_4:.3f} |"
        for depth, level in enumerate(acceptance, start=1)
    ]
    lines = [
        f"# A draft for {settings.target}",
        "",
        f"{kind.capitalize()}, {parameters / 1e6:.1f} M parameters, drafts {vocabulary}. It proposes tokens for",
        f"`{settings.target}`, which checks every one of them: the text stays the target's own. By itself it is of no use.",
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
        f"- Text: {corpus.source}; {tokens:,} tokens in texts of {settings.length}.",
        f"- {settings.steps} steps of {settings.batch_size} texts, loss `{settings.loss}` on the target's full law, "
        f"learning rate {settings.learning_rate:g}, seed {settings.seed}.",
        f"- Again: `{command}`",
        "",
        "## Acceptance on held-out text",
        "",
        "Chance that a candidate is accepted, by depth in the tree; four candidates are drawn without replacement.",
        "",
        "| depth | T=0, 1 candidate | T=0, 4 | T=1, 1 | T=1, 4 |",
        "|---|---|---|---|---|",
        *rows,
    ]
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
