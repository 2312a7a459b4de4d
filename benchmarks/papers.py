"""Write the pages in docs/papers anew, from the figures that are kept beside them.

A page is written by hand, except between `<!-- KEY -->` and `<!-- end -->`, where the comparison of that key goes.

python benchmarks/papers.py                   # tables and charts from docs/papers/results
python benchmarks/papers.py results/papers    # take over what `polydraft bench --reproduce all --out results/papers` measured

Runs that were measured again replace what was kept of them; others stay.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from polydraft.lab.estimate import Verdict
from polydraft.lab.papers import PAPERS, Paper, Results
from polydraft.lab.papers.pages import CLAIM_COLUMNS, charts, claims, read_kept, section, write_kept
from polydraft.lab.papers.paper import table

PAGES = Path(__file__).parents[1] / "docs" / "papers"
CLAIMS = "claims"
"""Mark of the table of what a paper says."""
END = "<!-- end -->"


def filled(page: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a page with these lines between its marks; ValueError if marks and sections do not match."""
    marks = re.findall(r"<!-- ([a-z0-9-]+) -->\n", page)
    marks = [mark for mark in marks if mark != "end"]
    if sorted(marks) != sorted(sections):
        raise ValueError(f"marks of the page: {sorted(marks)}; what belongs there: {sorted(sections)}")
    for key, lines in sections.items():
        start = page.index(f"<!-- {key} -->\n") + len(f"<!-- {key} -->\n")
        page = page[:start] + "\n".join(lines) + "\n" + page[page.index(END, start) :]
    return page


def page_sections(name: str, paper: Paper, results: Results, charts_in: str) -> dict[str, list[str]]:
    """Return what belongs between the marks of a paper's page."""
    sections = {
        one.key: [f"### {one.title}", "", *section(one, results, charts_in, name)] for one in paper.comparisons(results)
    }
    return sections | {CLAIMS: ["### Its claims, and whether they hold", "", *claims(paper, results)]}


def all_claims(papers: Mapping[str, tuple[Paper, Results]]) -> list[str]:
    """Count the claims of each paper by outcome, and list those that do not hold."""
    counts, failed = [], []
    for name, (paper, results) in papers.items():
        link, rows = f"[{name}]({name}.md)", paper.claim_rows(results)
        found = Counter(row[2] for row in rows)
        counts.append([link, str(len(rows)), *(str(found[kind]) for kind in Verdict)])
        failed += [[link, *row[:2], row[3]] for row in rows if row[2] == Verdict.NO]
    columns = ["paper", "claims", *(kind.value.strip("*") for kind in Verdict)]
    none = ["No claim is refuted by figures with intervals that do not overlap."]
    told = table(["paper", *CLAIM_COLUMNS[:2], "why"], failed) if failed else none
    return [*table(columns, counts), "", "Claims that do not hold here:", "", *told]


def contest(papers: Mapping[str, tuple[Paper, Results]]) -> list[str]:
    """Write the table of all papers' methods on the same prompts, machine and target."""
    rows, abouts, notes = [], set[str](), set[str]()
    for name, (paper, results) in papers.items():
        for label, run, method in paper.contest:
            if not results.figures(run, method):
                continue
            temperature = f"{results[run]['settings']['temperature']:g}"
            cells = [results.text(run, method, key) for key in ("tokens_per_pass", "tokens_per_second", "joules_per_token")]
            speedup = results.text(run, method, "speedup", "×")
            rows.append([f"[{name}]({name}.md)", label, temperature, f"`{method}`", *cells, speedup])
            abouts.add(f"{results.about(run)}.")
            notes |= {results.meaning(run), results.drift(run)}
    columns = ["paper", "method", "T", "as a benchmark method", "tokens per pass", "tokens/s", "J/token", "speed-up"]
    if not rows:
        return ["Not measured yet."]
    return [*sorted(abouts), *sorted(filter(None, notes)), "", *table(columns, rows)]


def rendered() -> dict[Path, str]:
    """Return every file that is made from figures, with what it should hold."""
    files, papers = {}, {}
    for name in list(PAPERS):
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
        for name in list(PAPERS):
            for found in (folder / f"{name}.json", folder / name / f"{name}.json"):
                if found.exists():
                    take_over(name, found, PAGES / "results" / f"{name}.json")
    for path, content in rendered().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
