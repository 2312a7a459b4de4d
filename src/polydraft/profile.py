"""Profiles: the best settings for a pair on a machine, which `polydraft tune` writes and `load` uses."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from polydraft.defaults import NONE
from polydraft.devices import captures, cpu_facts, cpu_name, dtype_name
from polydraft.errors import UsageError, first_line
from polydraft.models.fingerprint import digest_of, model_fingerprint, package_version
from polydraft.models.inflated import source_name
from polydraft.options import AUTO, LoadOptions
from polydraft.output import cache_root, written_whole

logger = logging.getLogger(__name__)

VARIABLE = "POLYDRAFT_PROFILE"
"""Environment variable that replaces ``profile="auto"``: none, or a file."""
_FORMAT = 2
_FAR_TEMPERATURE, _FAR_BATCH = 0.5, 4
"""A pick is used for temperatures at most this far away, and for batches at most this many times larger or smaller."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The best setting for one temperature and batch size."""

    temperature: float
    batch: int
    tree: str
    drafter: str = AUTO
    speedup: float
    """Measured against plain decoding at the same batch size."""

    @property
    def name(self) -> str:
        """The setting in words."""
        named = {"drafter": (self.drafter, AUTO), "tree": (self.tree, NONE)}
        return ", ".join(f"{kind} {name}" for kind, (name, usual) in named.items() if name != usual) or "plain decoding"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The best settings for one pair on one machine, and the figures that they were chosen by."""

    origin: Mapping[str, str]
    """What the profile is for: pair, files, machine, version."""
    picks: Sequence[Pick]
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, for people to read."""

    def pick(self, batch: int, temperature: float | None) -> Pick | None:
        """Return the setting for the nearest temperature and batch size, or None if these are too far away.

        An unknown temperature counts as that of the first pick.
        """
        wanted = self.picks[0].temperature if temperature is None else temperature
        nearest = min((one.temperature for one in self.picks), key=lambda other: abs(other - wanted))
        own = [one for one in self.picks if one.temperature == nearest]
        found = min(own, key=lambda one: abs(math.log(one.batch / batch)))
        near = abs(nearest - wanted) <= _FAR_TEMPERATURE and 1 / _FAR_BATCH <= found.batch / batch <= _FAR_BATCH
        return found if near else None

    def write(self, file: Path) -> None:
        """Write the file, completely or not at all."""
        content = {"format": _FORMAT, "origin": self.origin, "picks": [asdict(one) for one in self.picks], **self.figures}
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "Profile":
        """Read a profile from a file.

        Raises
        ------
        ValueError
            If the file holds no profile of this format.
        """
        content = json.loads(file.read_text(encoding="utf-8"))
        try:
            if content.pop("format") != _FORMAT:
                raise ValueError("another version of polydraft wrote it")
            known = {one.name for one in fields(Pick)}
            picks = [Pick(**{name: one[name] for name in known & one.keys()}) for one in content.pop("picks")]
            origin = {str(name): str(value) for name, value in content.pop("origin").items()}
            for one in picks:  # report a wrong tree here, not when it is used
                LoadOptions(tree=one.tree, drafter=one.drafter)
                assert one.batch >= 1 and one.temperature >= 0
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(f"it is not a profile: {error!r}") from None
        if not picks:
            raise ValueError("it holds no settings")
        return cls(origin=origin, picks=picks, figures=content)


def origin_of(options: LoadOptions, draft: str, place: torch.device, number_format: torch.dtype) -> dict[str, str]:
    """Return what a profile for these options applies to; `draft` is the resolved name, where theirs may be ``"auto"``."""
    if captures(place):
        machine = torch.cuda.get_device_name(place) + ("" if options.graphs else ", no graphs")
    else:
        kernels = "" if options.native else ", no native kernels"
        told = cpu_facts()
        mark = digest_of(told.get("flags") or told.get("Features"))[:6]  # identifies the instruction sets
        machine = f"{cpu_name()} ({mark}), {os.cpu_count()} cores, {torch.get_num_threads()} threads{kernels}"
    marks = [model_fingerprint(source_name(name)) if name != NONE else NONE for name in (options.target, draft)]
    return {
        "pair": f"{options.target} with {draft} in {dtype_name(number_format)}",
        "files": digest_of(marks)[:12],
        "machine": machine,
        "version": f"polydraft {package_version()}, torch {torch.__version__}",
    }


def profile_file(target: str, draft: str, place: torch.device, number_format: torch.dtype) -> Path:
    """Return the file for a pair's profile. Its name leaves out machine and version, so that changes of these are noticed."""
    words = (target, draft, dtype_name(number_format), place.type)
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
    """Return the setting that was tuned for these options, or None. The log says if a profile is ignored, and why."""
    named = options.profile
    if named == AUTO:
        named = os.environ.get(VARIABLE) or AUTO
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
    except ValueError as error:  # includes broken JSON
        logger.warning("profile %s is ignored (%s); run polydraft tune again", file, first_line(error))
        return None
    here = origin_of(options, draft, place, number_format)
    for name, value in here.items():
        if profile.origin.get(name) != value:
            what = (
                f"another {'state of the model files' if name == 'files' else name} ({profile.origin.get(name)}; here: {value})"
            )
            logger.warning("profile %s is ignored: it is for %s; run polydraft tune again", file, what)
            return None
    found = profile.pick(batch, temperature)
    if found is None:
        uses = ", ".join(f"T={one.temperature:g} with batch size {one.batch}" for one in profile.picks)
        asked = f"{'' if temperature is None else f'T={temperature:g} with '}batch size {batch}"
        logger.warning("profile %s is ignored: it was tuned for %s, not for %s", file, uses, asked)
    else:
        logger.info("%s, as tuned on this machine (--profile none turns this off)", found.name)
    return found
