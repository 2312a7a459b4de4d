"""What ``"auto"`` means: the table that `load` and `Speculate` use, `polydraft info` prints and docs/choosing.md shows."""

from dataclasses import dataclass
from enum import StrEnum

from polydraft.models.bundled import BUNDLED
from polydraft.models.heads.known import known_draft
from polydraft.models.inflated import source_name
from polydraft.models.int8_copy import NAME as INT8
from polydraft.options import AUTO, BY_LOAD

SHIPPED_DRAFT = "smollm2-head"
NONE = "none"
_COSTLY = ("float32", "int8")
"""Number formats whose passes on a CPU get more expensive with every token beyond a few."""
_FEWEST_CHILDREN = 4


class Asked(StrEnum):
    """How much the options specify besides models and machine: the less, the freer the choice of a tree."""

    NOTHING = "nothing"
    DRAFTER = "drafter"
    """`Speculate`, n-grams, or another drafter by name that can grow dynamic trees."""
    RULES = "rules"
    """A scheme, a walk, any other drafter or a lossy rule; on a CPU also every model that several processes share, since each
    would measure its own costs."""
    FEW_CHILDREN = "few children"
    """A scheme that allows fewer than four children per node."""


@dataclass(frozen=True, kw_only=True)
class Default:
    """A default tree, and the cases that it is for."""

    tree: str
    gpu: bool
    costly: bool | None = None
    """True: for float32 and int8 only; False: for all other number formats; None: for any."""
    asked: tuple[Asked, ...] = tuple(Asked)
    bundled_only: bool = False
    """Whether it is only for the bundled target, with any draft."""
    copy_only: bool = False
    """Whether it is only for an int8 copy of the target as the draft."""

    def fits(self, *, gpu: bool, dtype: str, asked: Asked, bundled: bool, copy: bool) -> bool:
        """Whether this default is for such a case."""
        right_format = self.costly in (None, dtype in _COSTLY)
        right_pair = (bundled or not self.bundled_only) and (copy or not self.copy_only)
        return gpu == self.gpu and right_format and asked in self.asked and right_pair


DEFAULTS = (
    # One level of the target's own copy takes more than half a pass, but is nearly always accepted: few levels pay.
    Default(gpu=True, asked=(Asked.NOTHING, Asked.DRAFTER), copy_only=True, tree=f"{BY_LOAD}2x1x1"),
    Default(gpu=False, costly=True, asked=(Asked.NOTHING, Asked.DRAFTER), copy_only=True, tree="chain:4"),
    Default(gpu=False, costly=False, asked=(Asked.NOTHING, Asked.DRAFTER), copy_only=True, tree="chain:3"),
    # On a GPU, a pass over 64 nodes takes little longer than one over a single token. The bundled model is so small that levels
    # of the draft are expensive beside it.
    Default(gpu=True, asked=(Asked.NOTHING,), bundled_only=True, tree=f"dynamic:32:6:fixed/{BY_LOAD}4x2x1x1x1"),
    Default(gpu=True, asked=(Asked.NOTHING,), tree=f"dynamic:64:7:fixed/{BY_LOAD}4x2x1x1x1"),
    Default(gpu=True, asked=(Asked.FEW_CHILDREN,), tree="chain:5"),
    Default(gpu=True, tree="4x2x2x1x1"),
    # On a CPU, dynamic trees weigh every node against its cost. In float32 and int8, wide trees hardly ever pay.
    Default(gpu=False, costly=False, asked=(Asked.NOTHING, Asked.DRAFTER), tree="dynamic:64"),
    Default(gpu=False, costly=True, asked=(Asked.NOTHING, Asked.DRAFTER), tree="dynamic:8"),
    Default(gpu=False, costly=False, asked=(Asked.RULES,), tree="4x2x1"),
    Default(gpu=False, tree="chain:3"),
)
"""Default trees; the first one that fits counts."""


def default_tree(
    *, gpu: bool, dtype: str, asked: Asked = Asked.NOTHING, target: str = "", shared: bool = False, copy: bool = False
) -> str:
    """Return the tree that ``"auto"`` means for a target in this number format.

    `shared` means that several processes compute one model: all must choose the same trees, so timings may not matter. `copy`
    means that the draft is an int8 copy of the target.
    """
    if shared and not gpu and asked != Asked.FEW_CHILDREN:
        asked = Asked.RULES
    bundled = target == BUNDLED
    found = next(one.tree for one in DEFAULTS if one.fits(gpu=gpu, dtype=dtype, asked=asked, bundled=bundled, copy=copy))
    return found.replace(BY_LOAD, "") if shared else found


def default_draft(target: str, given: str = AUTO) -> str:
    """Return the given draft; for ``"auto"``, the one that ships, a head beside the target, one trained for it, or none."""
    if given != AUTO:
        return given
    return SHIPPED_DRAFT if source_name(target) == BUNDLED else known_draft(target) or NONE


def asked_for(scheme: str, walk: str, drafter: str = AUTO, lossy: str | None = None) -> Asked:
    """Return how much these options of a decoder leave open."""
    from polydraft.draft.tree_drafter import split_drafter
    from polydraft.verify import SCHEMES

    if scheme == walk == AUTO and lossy is None:
        if drafter == AUTO:
            return Asked.NOTHING
        if split_drafter(drafter)[1] in (None, "model", "dynamic", "dynamic-head"):
            return Asked.DRAFTER
    most = None if scheme == AUTO else SCHEMES.get(scheme).max_children
    return Asked.FEW_CHILDREN if most is not None and most < _FEWEST_CHILDREN else Asked.RULES


@dataclass(frozen=True)
class Pair:
    """A target and its draft, as a line of the table of defaults."""

    name: str
    words: str
    target: str = "your target"
    draft: str = NONE
    drafter: str = AUTO


PAIRS = (
    Pair(BUNDLED, f"`{BUNDLED}` with the head that ships for it", BUNDLED, SHIPPED_DRAFT),
    Pair("your own pair", "your target with a head, a draft model or `early-exit:k`", draft="your draft"),
    Pair("n-grams too", "n-grams beside a draft (`--drafter lookup+model`)", draft="your draft", drafter="lookup+model"),
    Pair("n-grams alone", "n-grams alone (`--drafter lookup`)", drafter="lookup"),
    Pair("your model alone", "your target alone: its weights in int8 draft (`--draft int8`)", draft=INT8),
    Pair("int8 model alone", "your target alone, in int8: n-grams draft", drafter="suffix"),
)
