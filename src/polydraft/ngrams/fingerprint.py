"""Which tokenizer an n-gram belongs to: token ids mean nothing without it."""

from polydraft.errors import UsageError
from polydraft.models.head_folder import tokenizer_fingerprint

__all__ = ["check_fingerprint", "tokenizer_fingerprint"]


def check_fingerprint(name: object, found: str, wanted: str | None) -> None:
    """Refuse a file made with another tokenizer; without a tokenizer (None) there is nothing to compare."""
    if wanted is not None and found != wanted:
        raise UsageError(
            f"corpus cache {str(name)!r} was made for another tokenizer (fingerprint {found}, the target's is {wanted}); "
            "make one with: polydraft train corpus-cache --tokenizer TARGET --text FILE --out FILE"
        )
