"""Write the pages in docs/papers anew, from the figures that are kept beside them.

python benchmarks/papers.py                   # tables and charts from docs/papers/results
python benchmarks/papers.py results/papers    # take over what `polydraft bench --reproduce all --out results/papers` measured

Runs that were measured again replace what was kept of them; others stay.
"""

import sys
from pathlib import Path

from polydraft.lab.papers import PAPERS, Results
from polydraft.lab.papers.pages import CLAIMS, all_claims, charts, contest, filled, page_sections, read_kept, write_kept

PAGES = Path(__file__).parents[1] / "docs" / "papers"


def rendered() -> dict[Path, str]:
    """Return every file that is made from figures, with what it should hold."""
    files, papers = {}, {}
    for name in PAPERS.names():
        papers[name] = paper, results = PAPERS.get(name), read_kept(PAGES / "results" / f"{name}.json")
        page = PAGES / f"{name}.md"
        files[page] = filled(page.read_text(encoding="utf-8"), page_sections(name, paper, results, f"plots/{name}-"))
        for chart in charts(paper, results):
            files[PAGES / "plots" / f"{name}-{chart.file}"] = chart.content
    overview = PAGES / "README.md"
    files[overview] = filled(overview.read_text(encoding="utf-8"), {CLAIMS: all_claims(papers), "contest": contest(papers)})
    return files


def take_over(name: str, found: Path, place: Path) -> None:
    """Replace the runs of a paper that were measured again, and drop runs that it no longer has."""
    known = {**read_kept(place), **read_kept(found)}
    write_kept(Results({run.name: known[run.name] for run in PAPERS.get(name).runs if run.name in known}), place)


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        for name in PAPERS.names():
            for found in (folder / f"{name}.json", folder / name / f"{name}.json"):
                if found.exists():
                    take_over(name, found, PAGES / "results" / f"{name}.json")
    for path, content in rendered().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
