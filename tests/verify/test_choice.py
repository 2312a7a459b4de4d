"""Which walk a name means for a scheme."""

import pytest

from polydraft.errors import UsageError
from polydraft.verify import SCHEMES, WALKS, resolve_walk


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("walk", list(WALKS))
def test_a_named_walk_is_taken_or_refused(walk: str, scheme: str) -> None:
    if WALKS.get(walk).fits(SCHEMES.get(scheme)):
        assert resolve_walk(walk, SCHEMES.get(scheme)()).name == walk
        return
    with pytest.raises(UsageError, match=f"walk '{walk}' .* scheme '{scheme}' .* allowed: auto, .*node"):
        resolve_walk(walk, SCHEMES.get(scheme)())


@pytest.mark.parametrize("walk", list(WALKS))
def test_a_scheme_that_nobody_asked_for_gets_a_walk_that_fits(walk: str) -> None:
    assert resolve_walk(walk, SCHEMES.get("top")(), insist=False).name == "node"


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_auto_picks_a_walk_that_fits(scheme: str) -> None:
    walk = resolve_walk("auto", SCHEMES.get(scheme)())
    assert walk.fits(SCHEMES.get(scheme))
    assert (walk.name == "block") == (SCHEMES.get(scheme).select_uniforms is not None)


def test_an_unknown_walk_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="unknown walk 'blok'; did you mean 'block'"):
        resolve_walk("blok", SCHEMES.get("speculative")())
