"""Figures 1 and 2, and the tables behind them."""

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SMALL = ("--positions", "6", "--schemes", "race,rrs-wr,rrs-wor,greedy,spechub")


@pytest.mark.parametrize(
    ("sweep", "options", "pictures", "places"),
    [
        ("temperature", ("--temperature", "0.5,1.0", "--drafts", "2,3"), ["drafts-2", "drafts-3"], {0.5, 1.0}),
        ("drafts", ("--temperature", "0.7", "--drafts", "1,2,3"), ["temperature-0.7"], {1, 2, 3}),
    ],
)
def test_a_sweep_is_a_table_and_pictures(analyze, tmp_path: Path, sweep: str, options, pictures, places) -> None:
    code, out, err = analyze("--sweep", sweep, *options, *SMALL, "--out", str(tmp_path / "out"), "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"cache", f"sweep-{sweep}.csv", *(f"sweep-{sweep}-{name}.svg" for name in pictures)}
    with (tmp_path / "out" / f"sweep-{sweep}.csv").open() as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(rows) and {float(record[sweep]) for record in records} == places
    for record, row in zip(records, rows, strict=True):
        assert record["scheme"] == row["scheme"] and float(record["acceptance"]) == row["acceptance"]
    for name in pictures:
        content = (tmp_path / "out" / f"sweep-{sweep}-{name}.svg").read_text()
        words = "".join(ElementTree.fromstring(content).itertext())
        assert "rrs-wor" in words and "α* independent" in words and "acceptance rate" in words


def test_without_a_sweep_the_table_is_written_too(analyze, tmp_path: Path) -> None:
    code, out, err = analyze("--temperature", "1", "--drafts", "2", *SMALL, "--out", str(tmp_path))
    assert code == 0, err
    with (tmp_path / "table.csv").open() as file:
        assert [record["scheme"] for record in csv.DictReader(file)] == ["race", "rrs-wr", "rrs-wor", "greedy", "spechub"]
    assert f"{tmp_path / 'table.csv'} written" in out
