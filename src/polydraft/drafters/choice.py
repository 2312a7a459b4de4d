"""Which drafter a name and a draft call for."""

from polydraft.drafters.drafter import DRAFTERS, Drafter, Parts
from polydraft.drafters.grams import GRAM_DRAFTERS, check_node_walk, gram_tree
from polydraft.drafters.tree_drafter import Combination, TreeDrafter
from polydraft.errors import UsageError, unknown_name
from polydraft.models import FeatureHead

AUTO = "auto"
NONE = "none"


def split_drafter(name: str) -> tuple[list[str], str | None]:
    """Return the n-gram drafters that a name combines, and what draws a tree beside them, if anything does.

    Parameters
    ----------
    name : str
        A registered drafter, or several joined by ``+``, of which at most one draws from a draft's law.
    """
    names = list(dict.fromkeys(name.split("+")))
    for one in names:
        if one not in DRAFTERS:
            raise unknown_name("drafter", one, [AUTO, *DRAFTERS])
    grams = [one for one in names if one in GRAM_DRAFTERS]
    trees = [one for one in names if one not in GRAM_DRAFTERS]
    if len(names) > 1 and NONE in names:
        raise UsageError(f"drafter {name!r}: 'none' combines with nothing; leave it out")
    if len(trees) > 1:
        raise UsageError(
            f"drafter {name!r} has {len(trees)} that draw from a draft ({', '.join(trees)}); allowed: one, with any of "
            f"{', '.join(GRAM_DRAFTERS)}"
        )
    return grams, trees[0] if trees else None


def check_drafter(name: str, walk: str) -> None:
    """Refuse an unknown drafter, or a walk that cannot verify what it proposes."""
    if name != AUTO and split_drafter(name)[0]:
        check_node_walk(name, walk)


def needs_draft(name: str) -> bool:
    """Whether a drafter of that name proposes from a draft's law; refuses unknown names."""
    if name == AUTO:
        return True
    return split_drafter(name)[1] not in (None, NONE)


def make_drafter(parts: Parts, name: str = AUTO) -> Drafter:
    """Make a drafter by name; ``"auto"`` is what the draft calls for: a head, a model, or none.

    ``"model"`` stands for the draft's tree, whatever kind of draft there is.
    """
    if name == AUTO:
        missing = parts.draft is None or (parts.topology.depth == 0 and parts.dynamic is None)
        return DRAFTERS.get(NONE)(parts) if missing else _tree("model", parts)
    grams, tree = split_drafter(name)
    if tree is None:
        return gram_tree(grams, parts.grams)
    if grams and parts.grams.flat_blocks:
        raise UsageError(f"flat-blocks cannot verify drafter {name!r}; allowed: n-gram drafters alone, such as self-draft")
    if not grams:
        return _tree(tree, parts)
    drawn = _tree(tree, parts)
    assert isinstance(drawn, TreeDrafter), drawn
    return Combination(drawn, gram_tree(grams, parts.grams.beside_a_tree()))


def _tree(name: str, parts: Parts) -> Drafter:
    if name != "model":
        return DRAFTERS.get(name)(parts)
    kind = "head" if isinstance(parts.draft, FeatureHead) else "model"
    dynamic = {"head": "dynamic-head", "model": "dynamic"}
    return DRAFTERS.get(dynamic[kind] if parts.dynamic is not None else kind)(parts)
