"""Metrics count what happened, and the dashboard shows metrics that exist."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tests.serve.test_safety import CHAT, LONG

MESSAGES = [{"role": "user", "content": "Hello there"}]


def test_metrics_count_what_happened(serving):
    server = serving()
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    found = server.post("/v1/chat/completions", body).json()
    server.post("/v1/chat/completions", {"messages": 3})
    text = httpx.get(f"{server.url}/metrics").text
    model = f'model_name="{server.service.model}"'
    ours = [line for line in text.splitlines() if line.startswith("polydraft:")]
    assert all(model in line for line in ours)
    values = dict(line.replace(f"{{{model}}}", "").replace(f"{model},", "").rsplit(" ", 1) for line in ours)
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


def test_prompts_that_are_only_read_count(serving):
    server = serving()
    body = {"prompt": "Hello there", "echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    found, text = server.post("/v1/completions", body).json(), server.service.metrics.text().decode()
    (count,) = re.findall(r"^polydraft:prompt_tokens_total{.*} (.*)$", text, re.MULTILINE)
    assert float(count) == 2 * found["usage"]["prompt_tokens"] > 0


def test_cache_in_use_and_the_process_are_shown(serving):
    server = serving()

    def value(name):
        text = server.service.metrics.text().decode()
        return float(re.search(rf"^{name}(?:{{.*}})? (.*)$", text, re.MULTILINE)[1])

    assert value("polydraft:kv_cache_usage_perc") == 0 < value("polydraft:cache_reserved_bytes")
    with ThreadPoolExecutor(1) as pool:
        asked, used = pool.submit(server.post, CHAT, {**LONG, "max_tokens": 150}), [0.0]
        while not asked.done():
            used.append(value("polydraft:kv_cache_usage_perc"))
            time.sleep(0.01)  # else the server waits for this thread
    assert 0 < max(used) <= 1 / 6  # one of three slots and three others
    assert value("process_cpu_seconds_total") > 0 and value("process_resident_memory_bytes") > 10**6
    assert value("python_info") == 1


def test_the_dashboard_asks_for_figures_that_exist(shared):
    shared.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "temperature": 0})
    shared.post("/v1/chat/completions", {})
    known = httpx.get(f"{shared.url}/metrics").text
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    queries = [one["expr"] for panel in dashboard["panels"] for one in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:polydraft:|process_)\w+", query)}
    assert all(query.count("polydraft:") == query.count('{model_name=~"$model"}') for query in queries)
    assert len(asked) > 10
    assert not [name for name in asked if f"# TYPE {name.removesuffix('_bucket')} " not in known]
