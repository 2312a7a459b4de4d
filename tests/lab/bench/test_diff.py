import json

import pytest
from sample_results import sample_results

from polydraft.errors import UsageError
from polydraft.lab.bench.diff import Verdict, compare, format_diff, load_results

METHOD = "mcsd:4x2x2x1x1"


@pytest.fixture
def pair():
    return sample_results(), sample_results()


def changed(before, after):
    return [(c.method, c.category, c.what, c.verdict) for c in compare(before, after) if c.counts]


def test_equal_results_have_no_changes(pair):
    changes = compare(*pair)
    assert not any(change.counts for change in changes)
    assert format_diff(changes).splitlines()[-1] == "nothing changed beyond noise"


@pytest.mark.parametrize("factor, verdict", [(1.2, Verdict.BETTER), (0.8, Verdict.WORSE)])
def test_speedups_change_when_intervals_do_not_overlap(pair, factor, verdict):
    for key in ("speedup", "speedup_low", "speedup_high"):
        pair[1]["methods"][METHOD][key] *= factor
    assert changed(*pair) == [(METHOD, "", "speed-up", verdict)]
    text = format_diff(compare(*pair))
    assert "1 change" in text.splitlines()[-1] and verdict.value in text


def test_overlapping_intervals_are_noise(pair):
    for key in ("speedup", "speedup_low", "speedup_high"):
        pair[1]["methods"][METHOD][key] *= 1.05
    assert changed(*pair) == []


def test_a_category_can_change_alone(pair):
    part = pair[1]["methods"][METHOD]["categories"]["coding"]
    part.update(speedup=3.0, speedup_low=2.9, speedup_high=3.1)
    assert changed(*pair) == [(METHOD, "coding", "speed-up", Verdict.BETTER)]
    assert "coding" in format_diff(compare(*pair))


@pytest.mark.parametrize("key, small, large, what", [
    ("tokens_per_pass", 2.66, 2.4, "tokens/pass"),
    ("acceptance_rate", 0.475, 0.44, "acceptance"),
])  # fmt: skip
def test_thresholds_of_figures_without_interval(pair, key, small, large, what):
    pair[1]["methods"][METHOD][key] = small
    assert changed(*pair) == []
    pair[1]["methods"][METHOD][key] = large
    assert changed(*pair) == [(METHOD, "", what, Verdict.WORSE)]


def test_a_figure_that_vanished_cannot_be_told(pair):
    pair[1]["methods"][METHOD].update(tokens_per_pass=None, speedup=None, speedup_low=None, speedup_high=None)
    verdicts = {c.what: c.verdict for c in compare(*pair) if c.method == METHOD and not c.category}
    assert verdicts["tokens/pass"] is verdicts["speed-up"] is Verdict.UNKNOWN
    assert not any("None" in change.before + change.after for change in compare(*pair))
    assert "None" not in format_diff(compare(*pair))


def test_methods_come_and_go(pair):
    pair[0]["methods"].pop("auto")
    pair[1]["methods"].pop("chain:4")
    assert changed(*pair) == [("chain:4", "", "method", Verdict.REMOVED), ("auto", "", "method", Verdict.ADDED)]
    assert format_diff(compare(*pair)).endswith("2 changes")


def test_identity_is_always_reported(pair):
    pair[1]["methods"]["auto"].update(identical=28, differences=2)
    assert changed(*pair) == [("auto", "", "identity", Verdict.WORSE)]
    both = (pair[1], pair[1])
    assert changed(*both) == []
    text = format_diff(compare(*both))
    assert "still differs" in text and text.endswith("nothing changed beyond noise; 1 method still differs from plain decoding")


def test_a_failure_is_a_change(pair):
    pair[1]["methods"]["auto"].update(status="failed", error="out of memory")
    assert ("auto", "", "status", Verdict.WORSE) in changed(*pair)


def test_other_settings_and_machines_are_warned_about(pair):
    pair[1]["settings"]["temperature"] = 1.0
    pair[1]["settings"]["prompts"]["count"] = 60
    pair[1]["machine"]["gpu"] = "NVIDIA H200"
    pair[1]["methods"]["ar"]["tokens_per_second"] *= 2
    text = format_diff(compare(*pair))
    assert "warning: settings.temperature differs: 0 -> 1" in text
    assert "warning: settings.prompts.count differs: 30 -> 60" in text
    assert "warning: machine.gpu differs: – -> NVIDIA H200" in text
    assert "tokens/s of the baseline ar differs: 23.4 -> 46.8" in text
    assert text.endswith("nothing changed beyond noise")


def test_noise_is_hidden(pair):
    changes = compare(*pair)
    brief = format_diff(changes)
    assert any(change.category == "writing" for change in changes)
    assert "more figures within noise" in brief and "writing" not in brief and METHOD in brief
    header, *rows = brief.splitlines()[:4]
    assert all(row[header.index("verdict") :] == "within noise" for row in rows)


def test_results_load_from_file_and_folder(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(sample_results()))
    assert load_results(file) == load_results(tmp_path) == sample_results()


@pytest.mark.parametrize("content, says", [
    (None, "cannot read"),
    (b"{", "is not JSON"),
    (b"\xff\xfe", "is not JSON"),
    (b"[]", "holds no benchmark results"),
    (b'{"schema": 1}', "holds no benchmark results"),
    (b'{"schema": 2, "methods": {}}', "has schema 2; this version reads 1"),
])  # fmt: skip
def test_wrong_files_are_refused_in_one_line(tmp_path, content, says):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        load_results(tmp_path)
    assert "\n" not in str(caught.value) and "results.json" in str(caught.value)
