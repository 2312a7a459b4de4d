"""The kinds of heads that a folder may hold: how each is recognised, checked and loaded."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.models.heads.assistant_folder import check_assistant, is_assistant, load_assistant
from polydraft.models.heads.eagle import EAGLE
from polydraft.models.heads.eagle3 import EAGLE3, Format
from polydraft.models.heads.head import Head
from polydraft.models.heads.head_folder import Target, check_head, is_head, load_head
from polydraft.models.heads.mtp_folder import NAME, check_mtp, is_mtp, load_mtp
from polydraft.models.heads.parallel_folder import DFLASH, PEAGLE
from polydraft.models.hf import HFModel


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """One kind of head, in a folder with a config.json."""

    recognise: Callable[[Mapping[str, Any]], bool]
    """Whether a config.json is that of such a head."""
    check: Callable[[Path, Target, str], object]
    """`(folder, target, name)`: refuse an incomplete head, or one for another target. No weights are read; of the target, the
    config is enough."""
    load: Callable[[Path, HFModel, Any, str], Head]
    """`(folder, target, tokenizer, name)`: load it, and have the target provide the features it reads. The tokenizer may be
    None."""
    trains: str | None = None
    """Its name in messages, if `polydraft train head` can continue from it."""


def _foreign(form: Format, trains: str | None = None) -> HeadKind:
    return HeadKind(recognise=form.recognise, check=form.check, load=form.load, trains=trains)


HEAD_KINDS = {
    "polydraft": HeadKind(recognise=is_head, check=check_head, load=load_head, trains="a head of polydraft train head"),
    NAME: HeadKind(recognise=is_mtp, check=check_mtp, load=load_mtp),
    "peagle": _foreign(PEAGLE),
    "dflash": _foreign(DFLASH),
    "assistant": HeadKind(recognise=is_assistant, check=check_assistant, load=load_assistant),
    "eagle": _foreign(EAGLE),
    # Last, because it also recognises unknown kinds in speculators' format, to refuse them.
    "eagle3": _foreign(EAGLE3, trains="an EAGLE-3 head"),
}
"""The first kind that recognises a folder is used, so their order matters."""


def kind_of(folder: Path) -> HeadKind | None:
    """Return the kind of head that a folder holds; None if it holds none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    return next((kind for kind in HEAD_KINDS.values() if kind.recognise(config)), None)
