"""`polydraft bench serve`: figures of a server under load, from outside."""

import json

import pytest

from polydraft.errors import UsageError
from polydraft.lab.bench.serving import Sample, ServingLoad, summary


def test_two_arms_under_load(shared, invoke, tmp_path):
    out, prompts = tmp_path / "load.json", tmp_path / "prompts.txt"
    prompts.write_text("Hello\nWho are you?\nCount to three.\n")
    code, text, err = invoke(
        "bench",
        "serve",
        "--url",
        shared.url,
        "--prompts",
        str(prompts),
        "--requests",
        "12",
        "--concurrency",
        "4",
        "--max-tokens",
        "20",
        "--out",
        str(out),
    )
    assert code == 0, err
    assert text.count("tokens/s") == 2
    arms = json.loads(out.read_text())["arms"]
    assert [arm["arm"] for arm in arms] == ["auto", "off"]
    for arm in arms:
        assert arm["requests"] == 12 and arm["errors"] == 0 and arm["tokens_per_second"] > 0
        for name in ("first_token", "between_parts", "whole"):
            times = arm[f"{name}_seconds"]
            assert 0 < times["p50"] <= times["p95"] <= times["p99"]
        assert arm["first_token_seconds"]["p99"] <= arm["whole_seconds"]["p99"]


def test_arrivals_by_chance(shared, invoke):
    code, text, err = invoke(
        "bench", "serve", "--url", shared.url, "--requests", "6", "--rate", "200", "--max-tokens", "4", "--arms", "as-is"
    )
    assert code == 0 and text.startswith("as-is: "), err


def test_figures_of_known_times():
    options = ServingLoad(concurrency=1, first_limit=0.5, token_limit=0.1)
    samples = [Sample(first=0.1 * n, whole=0.1 * n + 0.9, tokens=10, gaps=[0.1]) for n in range(1, 11)]
    samples.append(Sample(error="HTTP 429"))
    found = summary(options, samples, 10.0)
    assert found["first_token_seconds"] == {"p50": 0.5, "p95": 1.0, "p99": 1.0}
    assert (found["tokens_per_second"], found["requests_per_second"], found["errors"]) == (10.0, 1.0, 1)
    assert summary(ServingLoad(concurrency=1, first_limit=0.5, token_limit=0.11), samples, 10.0)["goodput"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --rate .* or --concurrency"),
        ({"rate": 1.0, "concurrency": 2}, "--rate 1.0 and --concurrency 2 cannot be combined"),
        ({"rate": -1.0}, "--rate -1.0"),
        ({"rate": 1.0, "url": "ftp://x"}, "--url"),
        ({"rate": 1.0, "arms": "fast"}, "--arms"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        ServingLoad(**options)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("no-folder/load.json", "there is no folder"),
        (".", "it is a folder"),
        ("load.html", "is the name of the page; name the JSON file, such as load.json"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_a_server_is_asked(invoke, out, message):
    code, _, err = invoke("bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1", "--out", out)
    assert code == 2 and out in err and message in err and err.count("\n") == 1


def test_a_server_that_is_not_there_is_said_so(invoke):
    code, _, err = invoke("bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1")
    assert code == 1 and "cannot get the models of http://127.0.0.1:9" in err
