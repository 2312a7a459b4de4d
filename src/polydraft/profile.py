"""What `polydraft tune` found, kept for one machine, pair and version, and used by whatever loads that pair there."""

import json
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from polydraft.backends.native.build import cpu_features
from polydraft.errors import UsageError
from polydraft.models.fingerprint import digest_of, model_fingerprint
from polydraft.models.inflated import source_name
from polydraft.options import AUTO, LoadOptions
from polydraft.output import cache_root, written_whole

logger = logging.getLogger(__name__)

NONE = "none"
VARIABLE = "POLYDRAFT_PROFILE"
"""Environment variable that stands for ``profile="auto"``: none, or a file."""
_FORMAT = 1
_FAR = 0.5
"""Temperatures further apart than this accept too differently to stand for each other."""
_NAMES = {"pair": "pair", "files": "state of the model files", "machine": "machine", "version": "version"}


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The setting that was best for one use."""

    temperature: float
    batch: int
    tree: str
    drafter: str = AUTO
    expected: float
    """Speed-up over plain decoding at the same batch, as predicted."""
    measured: float | None = None
    """The same as measured, where the setting was run."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Settings of one pair on one machine, with the figures they were chosen by."""

    origin: Mapping[str, str]
    """What it holds for: pair, files, machine, version."""
    picks: Sequence[Pick]
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Costs, acceptance and the table, for people to read."""

    def pick(self, batch: int, temperature: float | None) -> Pick | None:
        """Return the setting for a use: of the nearest temperature, if that is near, and the nearest batch.

        Where the temperature is unknown, that of the first pick counts.
        """
        wanted = self.picks[0].temperature if temperature is None else temperature
        nearest = min((one.temperature for one in self.picks), key=lambda other: abs(other - wanted))
        if abs(nearest - wanted) > _FAR:
            return None
        own = [one for one in self.picks if one.temperature == nearest]
        return min(own, key=lambda one: abs(math.log(one.batch / batch)))

    def write(self, file: Path) -> None:
        """Keep it, whole or not at all."""
        content = {"format": _FORMAT, "origin": self.origin, "picks": [asdict(one) for one in self.picks], **self.figures}
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "Profile":
        """Read one back.

        Raises
        ------
        ValueError
            If the file holds no profile of this format.
        """
        content = json.loads(file.read_text(encoding="utf-8"))
        try:
            if content.pop("format") != _FORMAT:
                raise ValueError("it has another format")
            known = {one.name for one in fields(Pick)}
            picks = [Pick(**{name: one[name] for name in known & one.keys()}) for one in content.pop("picks")]
            origin = {str(name): str(value) for name, value in content.pop("origin").items()}
            for one in picks:  # a tree that somebody has mistyped is told here, not when it is drawn
                LoadOptions(tree=one.tree, drafter=one.drafter)
                assert one.batch >= 1 and one.temperature >= 0
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(f"it is no profile: {error!r}") from None
        if not picks:
            raise ValueError("it holds no setting")
        return cls(origin=origin, picks=picks, figures=content)


def origin_of(options: LoadOptions, draft: str, place: torch.device, number_format: torch.dtype) -> dict[str, str]:
    """Return all that the figures of a profile depend on; the options' own draft may still be ``"auto"``."""
    if place.type == "cuda":
        machine = torch.cuda.get_device_name(place) + ("" if options.graphs else ", no graphs")
    else:
        features = cpu_features()
        model = next((line.split(":", 1)[1].strip() for line in features.splitlines() if line.startswith("model name")), "")
        kernels = "" if options.native else ", no native kernels"
        name = f"{model or platform.processor() or platform.machine()} ({digest_of(features)[:6]})"
        machine = f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{kernels}"
    marks = [model_fingerprint(source_name(name)) if name != NONE else NONE for name in (options.target, draft)]
    return {
        "pair": f"{options.target} with {draft} in {str(number_format).removeprefix('torch.')}",
        "files": digest_of(marks)[:12],
        "machine": machine,
        "version": f"polydraft {_version()}, torch {torch.__version__}",
    }


def profile_file(target: str, draft: str, place: torch.device, number_format: torch.dtype) -> Path:
    """Return where the profile of a pair is kept: one file, so that one of another machine or version is noticed."""
    words = (target, draft, str(number_format).removeprefix("torch."), place.type)
    name = "_".join("".join(letter if letter.isalnum() else "-" for letter in word)[-60:] for word in words)
    return cache_root() / "profiles" / f"{name}.json"


def tuned(
    options: LoadOptions,
    draft: str,
    place: torch.device,
    number_format: torch.dtype,
    *,
    batch: int,
    temperature: float | None,
) -> Pick | None:
    """Return the setting that was tuned for what is being loaded; a profile of anything else is ignored with a line."""
    named = os.environ.get(VARIABLE) or AUTO if options.profile == AUTO else options.profile
    if named == NONE:
        return None
    file = profile_file(options.target, draft, place, number_format) if named == AUTO else Path(named)
    if named == AUTO and not file.exists():
        return None
    try:
        profile = Profile.read(file)
    except OSError as error:
        raise UsageError(
            f"cannot read profile {str(file)!r} ({error.strerror or error}); allowed: a file that polydraft tune wrote, "
            "none, or auto"
        ) from None
    except ValueError as error:  # broken JSON too
        logger.warning("profile %s is ignored (%s); make it again with: polydraft tune", file, str(error).splitlines()[0])
        return None
    here = origin_of(options, draft, place, number_format)
    for name, value in here.items():
        if profile.origin.get(name) != value:
            what = f"another {_NAMES[name]} ({profile.origin.get(name)}; here: {value})"
            logger.warning("profile %s is ignored: it is of %s; make one with: polydraft tune", file, what)
            return None
    found = profile.pick(batch, temperature)
    if found is None:
        tuned_at = ", ".join(f"{one:g}" for one in dict.fromkeys(one.temperature for one in profile.picks))
        logger.warning("profile %s is ignored: it was tuned for temperature %s, not %g", file, tuned_at, temperature)
    else:
        drafter = "" if found.drafter == AUTO else f"drafter {found.drafter}, "
        logger.info("%stree %s, as tuned here (--profile none leaves it out)", drafter, found.tree)
    return found


def _version() -> str:
    try:
        return metadata.version("polydraft")
    except metadata.PackageNotFoundError:  # run from its sources
        return "0"
