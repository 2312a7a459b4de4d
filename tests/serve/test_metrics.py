"""Metrics count what happened, and the dashboard shows metrics that exist."""

import json
import re
from pathlib import Path

import httpx

MESSAGES = [{"role": "user", "content": "Hello there"}]


def test_metrics_count_what_happened(serving):
    server = serving()
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    found = server.post("/v1/chat/completions", body).json()
    server.post("/v1/chat/completions", {"messages": 3})
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    speculation, usage = found["choices"][0]["speculation"], found["usage"]
    assert float(values["polydraft:generation_tokens_total"]) == usage["completion_tokens"]
    assert float(values["polydraft:prompt_tokens_total"]) == usage["prompt_tokens"]
    assert float(values["polydraft:spec_decode_num_drafts_total"]) == speculation["rounds"]
    assert float(values["polydraft:spec_decode_num_draft_tokens_total"]) == speculation["drafted_tokens"]
    accepted = sum(count * rounds for count, rounds in enumerate(speculation["acceptance_histogram"]))
    assert float(values["polydraft:spec_decode_num_accepted_tokens_total"]) == accepted
    assert float(values['polydraft:request_failure_total{status="400"}']) == 1
    assert float(values["polydraft:time_to_first_token_seconds_count"]) == 1
    assert float(values["polydraft:inter_token_latency_seconds_count"]) > 0
    assert float(values["polydraft:num_requests_running"]) == 0 == float(values["polydraft:num_requests_waiting"])


def test_the_dashboard_asks_for_figures_that_exist(shared):
    shared.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "temperature": 0})
    shared.post("/v1/chat/completions", {})
    known = httpx.get(f"{shared.url}/metrics").text
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        name for panel in dashboard["panels"] for one in panel["targets"] for name in re.findall(r"polydraft:\w+", one["expr"])
    }
    assert len(asked) > 10
    assert not [name for name in asked if f"# TYPE {name.removesuffix('_bucket')} " not in known]
