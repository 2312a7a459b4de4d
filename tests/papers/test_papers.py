"""What is said of each paper: every algorithm is where it says, and the page in docs says the same."""

import importlib
from functools import reduce
from pathlib import Path

import pytest

from polydraft.drafters import LOSSY_DRAFTERS
from polydraft.papers import PAPERS, TargetInit

PAGES = Path(__file__).parents[2] / "docs" / "papers"

each_paper = pytest.mark.parametrize("name", PAPERS.names())


def found(dotted: str) -> object:
    """Import what a dotted name means: a package, and names in it."""
    package, *names = dotted.removeprefix("polydraft.").split(".")
    module = importlib.import_module(f"polydraft.{package}")
    while hasattr(module, "__path__") and names and not hasattr(module, names[0]):
        module = importlib.import_module(f"{module.__name__}.{names.pop(0)}")
    return reduce(getattr, names, module)


@each_paper
def test_every_algorithm_is_where_it_says(name: str) -> None:
    for place in PAPERS.get(name).algorithms.values():
        found(place)


def test_a_wrong_place_is_noticed() -> None:
    with pytest.raises((AttributeError, ImportError)):
        found("polydraft.schemes.Nowhere")


@each_paper
def test_its_page_says_the_same(name: str) -> None:
    paper, page = PAPERS.get(name), (PAGES / f"{name}.md").read_text()
    words = " ".join(page.split())
    for said in (paper.title, paper.claim, paper.lossy, f"bench --reproduce {name}"):
        assert said in words
    for algorithm, place in paper.algorithms.items():
        assert f"| {algorithm} | `{place}` |" in page


def test_there_is_a_page_for_papers_only() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*PAPERS}


def test_the_lossy_drafter_is_found_by_name() -> None:
    assert TargetInit.name in LOSSY_DRAFTERS
