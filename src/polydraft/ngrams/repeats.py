"""Texts that go round in circles, straightened."""

from collections.abc import Iterator, Sequence


def fresh_stretches(tokens: Sequence[int], order: int) -> Iterator[list[int]]:
    """Yield a text without what it repeats: every token that ends an n-gram of `order` tokens seen in it before is left out.

    Models, small ones above all, write the same sentence over and over now and then. Counted as it stands, a single such text
    would crowd out what a thousand others have in common.
    """
    seen: set[tuple[int, ...]] = set()
    stretch: list[int] = []
    for end, token in enumerate(tokens, start=1):
        gram = tuple(tokens[end - order : end]) if end >= order else ()
        if gram in seen:
            if stretch:
                yield stretch
            stretch = []
            continue
        if gram:
            seen.add(gram)
        stretch.append(token)
    if stretch:
        yield stretch
