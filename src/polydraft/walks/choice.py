"""Which walk verifies the trees of a scheme."""

from polydraft.errors import UsageError, unknown_name
from polydraft.schemes import SCHEMES, Scheme
from polydraft.walks.block import BlockWalk
from polydraft.walks.node import NodeWalk
from polydraft.walks.walk import WALKS, Walk

AUTO = "auto"

# Traversal accepts more than node by node too, but tries one node after the other: off the CPU, where it may not look whether
# it is done, that is twice as many steps as the tree has nodes.
_PREFERRED: tuple[type[Walk], ...] = (BlockWalk, NodeWalk)


def check_walk(name: str, scheme: str) -> None:
    """Refuse an unknown walk, or one that does not fit a scheme, both given by name."""
    if name != AUTO and name not in WALKS:
        raise unknown_name("walk", name, [AUTO, *WALKS])
    if scheme != AUTO:
        resolve_walk(name, SCHEMES.get(scheme)())


def resolve_walk(name: str, scheme: Scheme, *, insist: bool = True) -> Walk:
    """Return the walk of that name, or the best one for the scheme.

    Parameters
    ----------
    name : str
        A registered walk, or ``"auto"``: `block` where the scheme can pick a child before accepting it, else `node`.
    scheme : Scheme
        The one that trees are drawn by.
    insist : bool
        Whether a walk that does not fit the scheme is an error. If not, the best one that fits takes its place: for schemes
        that nobody asked for, as where drafts of temperature 0 are the likeliest tokens, whatever the scheme.
    """
    check_walk(name, AUTO)
    if name != AUTO and WALKS.get(name).fits(scheme):
        return WALKS.get(name)()
    if name != AUTO and insist:
        fitting = ", ".join(other for other in WALKS if WALKS.get(other).fits(scheme))
        raise UsageError(f"walk {name!r} cannot verify what scheme {scheme.name!r} draws; allowed: auto, {fitting}")
    return next(walk() for walk in _PREFERRED if walk.fits(scheme))
