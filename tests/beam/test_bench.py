"""Beams in benchmarks: methods, likelihood, energy, and the paper measured again."""

import json

import pytest
import torch

from polydraft.lab.bench.meters import EnergyMeter

CPU = torch.device("cpu")
METHODS = "ar beam:2 beam:2,draws=hf beam-search:2 beam-search:2,width=4,depth=2 dsbd:2,width=4,depth=2 " + (
    "dsbd:2,width=4,threshold=0.5,min=1 dsbd:2,width=4,threshold=0.5,one=cache dsbd:2,draws=distinct hf-beam:2 "
    "hf-beam-search:2 beam-search:2,draft=twins dsbd:2,draft=twins,width=4 dsbd:2,width=4,depth=2,draft=model"
)


def bench(invoke, tiny, out, *options):
    shared = ["--target", tiny, "--draft", "early-exit:2", "--limit", "1", "--max-new-tokens", "5", "--raw", "--out", str(out)]
    return invoke("bench", *shared, *options)


def test_all_methods_with_beams_are_measured(invoke, roomy, tmp_path):
    options = ["--temperature", "1", "--top-k", "20", "--top-p", "0.9", "--log-likelihood"]
    code, _, err = bench(invoke, roomy, tmp_path, "--methods", METHODS, *options)
    assert code == 0, err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["top_k"] == 20 and results["machine"]["energy"]
    methods = results["methods"]
    assert list(methods) == METHODS.split()
    for figures in methods.values():
        assert figures["status"] == "ok" and figures["log_likelihood_per_token"] < 0
    # Beam search is what Hugging Face's is, and drafts leave its text alone.
    searched = [
        methods[name]
        for name in ("beam-search:2", "beam-search:2,width=4,depth=2", "hf-beam-search:2", "beam-search:2,draft=twins")
    ]
    assert [one["log_likelihood_per_token"] for one in searched] == pytest.approx([searched[0]["log_likelihood_per_token"]] * 4)
    assert searched[0]["log_likelihood_per_token"] >= methods["ar"]["log_likelihood_per_token"]


BAD = {
    "dsbd:4,width=4": "draft_width=4 must be above beams=4",
    "dsbd:4,width=8,threshold=2": "width_threshold=2.0 is out of range",
    "dsbd:4,width=x": "width='x' is not a number",
    "dsbd:4,one=beam": "allowed: one=cache",
    "dsbd:4,draft=help": "allowed: draft=twins or model",
    "beam:4,draft=model": "has no option 'draft'",
    "dsbd:4,scheme=rrs-wr": "has no option 'scheme'",
    "beam:0": "whole numbers from 1",
    "beam-search:2,threshold=0.5": "has no option 'threshold'",
}


@pytest.mark.parametrize("method", BAD)
def test_wrong_methods_are_one_line(invoke, tiny, tmp_path, method):
    code, _, err = bench(invoke, tiny, tmp_path / "out", "--methods", method, "--temperature", "1")
    assert code == 2 and BAD[method] in err and err.count("\n") == 1


def test_beam_sampling_at_temperature_0_is_refused(invoke, tiny, tmp_path):
    code, _, err = bench(invoke, tiny, tmp_path / "out", "--methods", "beam:2")
    assert code == 2 and "samples; pass --temperature above 0" in err


def test_the_paper_is_measured_again(invoke, roomy, tmp_path):
    code, _, err = bench(invoke, roomy, tmp_path, "--reproduce", "dsbd")
    assert code == 0, err
    text = (tmp_path / "reproduction.md").read_text()
    assert "Figures 4 and 5" in text and "Table 1" in text and "Table 2" in text
    assert "1.5 to 1.9 times" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 1.", "| DSBD, "))]
    claims = {row[0]: row[1:] for row in rows if row[0].startswith("| 1.")}
    for width in (2, 3, 4):  # those that are not reached are rows, too
        (row,) = (row for claim, row in claims.items() if f"times as fast as beam sampling of width {width}" in claim)
        assert row[1] == "no interval", "of one prompt"
    methods = [row for row in rows if row[0].startswith("| DSBD, W_S=")]
    assert len(methods) == 14 and sum(row[0].endswith(" *") for row in methods) == 7, "with and without our additions"
    assert all("–" not in (row[1], row[6]) for row in methods), "likelihood and peak memory"
    assert (tmp_path / "figure-4.svg").read_text().count("<circle") >= 8 + 14
    kept = json.loads((tmp_path / "dsbd.json").read_text())["spec_bench-t1"]["methods"]
    assert all(len(figures["log_likelihood_by_prompt"]) == 1 for figures in kept.values())


class Counter:
    """An energy counter that counts readings."""

    def __init__(self):
        self.readings = 0

    def joules(self):
        """Return ten joules more with every reading."""
        self.readings += 1
        return 10.0 * self.readings


def test_energy_is_read_over_blocks_of_seconds(invoke, roomy, tmp_path, monkeypatch):
    monkeypatch.setattr("polydraft.lab.bench._runner.EnergyMeter", lambda device: Counter())
    options = ("--methods", "ar sd:2", "--energy-seconds", "0.01", "--limit", "2")
    code, _, err = bench(invoke, roomy, tmp_path, *options)
    assert code == 0, err
    blocks = [json.loads(line) for line in (tmp_path / "energy.jsonl").read_text().splitlines()]
    assert [(one["method"], one["block"]) for one in blocks] == [(name, block) for block in range(3) for name in ("ar", "sd:2")]
    assert all(one["seconds"] >= 0.01 and one["joules"] == 10 and one["tokens"] for one in blocks)
    figures = json.loads((tmp_path / "results.json").read_text())["methods"]["ar"]
    each = [10 / one["tokens"] for one in blocks if one["method"] == "ar"]
    assert figures["joules_per_token_low"] == min(each) and figures["joules_per_token_high"] == max(each)
    assert min(each) <= figures["joules_per_token"] <= max(each)
    before = (tmp_path / "energy.jsonl").read_text()
    code, _, err = bench(invoke, roomy, tmp_path, *options, "--resume")
    assert code == 0 and (tmp_path / "energy.jsonl").read_text() == before, err
    code, _, err = bench(invoke, roomy, tmp_path / "shard", *options, "--shard", "1/2")
    assert code == 2 and "--energy-seconds" in err


def test_energy_says_where_it_comes_from(tmp_path):
    nothing = EnergyMeter(CPU, tmp_path)
    assert nothing.joules() is None and nothing.source.startswith("not available")
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "energy_uj").write_text("3000000")
    (package / "max_energy_range_uj").write_text("9999999")
    meter = EnergyMeter(CPU, tmp_path)
    assert "RAPL" in meter.source and meter.joules() == pytest.approx(3.0)
    (package / "energy_uj").write_text("1000000")  # wrapped around
    assert meter.joules() == pytest.approx(11.0)


def test_gpus_without_the_drivers_library_say_so(monkeypatch):
    def missing(name):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    meter = EnergyMeter(torch.device("cuda"))
    assert meter.joules() is None and "libnvidia-ml" in meter.source
