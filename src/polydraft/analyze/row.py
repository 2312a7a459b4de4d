"""One line of the table: a scheme at a number of drafts and a temperature."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a scheme accepts, and what could be accepted of its drafts."""

    scheme: str
    drafts: int
    temperature: float
    acceptance: float
    """α: mean chance that one of the drafts is accepted."""
    standard_error: float | None
    """Of the acceptance, over prompts; None with a single prompt."""
    optimum: float | None
    """α*: the most that any exact verifier could accept of drafts drawn like that; None where the drawing is not known."""
    gap: float | None
    """α* − α."""
    gap_standard_error: float | None
    """Of the gap, position by position, so that what both have in common does not count."""
    drawing: str | None
    """How the drafts are drawn."""
    paper_bound: float | None = None
    """What the paper prints for α*, which for distinct drafts belongs to another drawing."""

    def as_dict(self, *, paper_bound: bool) -> dict[str, Any]:
        """Return the fields by name, the paper's bound only if asked for."""
        fields = asdict(self)
        if not paper_bound:
            del fields["paper_bound"]
        return fields
