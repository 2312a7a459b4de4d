"""The memory for all texts is known before the first request: lanes share it and hand it to each other, and it never grows."""

import gc
import threading
import time

import pytest

from covering import keeping
from polydraft.draft import TreeDrafter
from polydraft.errors import FailureError
from polydraft.lab.theory import Costs
from polydraft.loading import load
from polydraft.models import HeadShape, blocks
from polydraft.models.cache import SlotCache
from polydraft.models.heads.head_folder import new_head
from polydraft.models.language_model import Context
from polydraft.serve.options import ServeOptions
from polydraft.serve.service import Service
from polydraft.trees import parse_dynamic, parse_tree

COMPLETIONS = "/v1/completions"
WAYS = [
    {"regex": "[a-c]{3}-[0-9]{2}"},
    {"speculative": "off"},
    {"speculative": {"tree": "2x1"}},
    {"speculative": {"tree": "dynamic:128:16:fixed"}},
    {},
    {"speculative": {"tree": "fork:8x15"}},
    {"speculative": "off", "regex": "(ab){2,9}"},
    {"speculative": {"tree": "4x2x1"}, "regex": "[x-z]{1,30}"},
]


def storages():
    """Keys and values that are not of a pool."""
    gc.collect()
    caches = [one for one in gc.get_objects() if isinstance(one, SlotCache) and one.pool is None]
    return {stored.data_ptr() for cache in caches for stored in cache._all or ()}


@pytest.fixture
def pool_of():
    """Return a function that says how much of a server's pool is taken once its texts have ended; there is nothing else."""
    before = storages()

    def used(live):
        for _ in range(200):
            if live.idle():
                break
            time.sleep(0.05)
        assert storages() <= before
        return live.service.scheduler.pool.used

    return used


def asked(number):
    prompt = [3 + (7 * number + place) % 60 for place in range(1 + 37 * number)]
    return {"prompt": prompt, "max_tokens": 40, "seed": number, **WAYS[number % len(WAYS)]}


def reserved(live):
    lines = live.service.metrics.text().decode().splitlines()
    return float(next(line for line in lines if line.startswith("polydraft:cache_reserved_bytes")).split()[1])


@pytest.mark.slow
def test_memory_is_what_was_reserved_whoever_comes(serving, pool_of):
    live = serving()
    before, size = pool_of(live), reserved(live)
    assert 0 < before < size
    answers = {}

    def ask(number):
        answers[number] = live.post(COMPLETIONS, asked(number))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(WAYS) + 2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    assert {number: answer.status_code for number, answer in answers.items()} == dict.fromkeys(range(len(clients)), 200)
    assert pool_of(live) == before and reserved(live) == size == live.service.scheduler.pool.size
    for number in range(len(clients)):
        if number % 3 == 0:
            fresh = serving().post(COMPLETIONS, asked(number)).json()
            assert answers[number].json()["choices"][0]["text"] == fresh["choices"][0]["text"], asked(number)


@pytest.mark.parametrize("draft", keeping(["early-exit:1", "none"], "early-exit:1"))
def test_texts_take_what_they_need_and_no_more(roomy, serving, pool_of, draft):
    decoder = load(roomy, draft=draft, tree="3x2x1", dtype="float32")
    small = serving(decoder, slots=2, other_slots=1, own_trees=False)
    idle = pool_of(small)
    layers, config = decoder.target.num_layers, decoder.target.config
    token = 2 * 4 * config.num_key_value_heads * config.head_dim
    layers += draft != "none"
    assert 3 * 32 * layers * token <= idle <= 3 * 64 * layers * token, "a block or two for each slot"
    body, seen = {"prompt": "x", "max_tokens": 200, "min_tokens": 200, "speculative": "off"}, list[int]()
    with small.client.completions.create(model=small.service.model, stream=True, extra_body=body, prompt="x") as stream:
        for _ in stream:
            seen.append(small.service.scheduler.pool.used - idle)
    assert 32 * layers * token <= max(seen) <= (200 + 64) * layers * token
    refused = small.post(COMPLETIONS, {**body, "speculative": {"tree": "2x1"}})
    assert refused.status_code == 400 and "--no-own-trees" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "speculative"
    assert pool_of(small) == idle


def test_a_server_with_little_memory_lets_texts_wait_and_answers_all(roomy, serving, pool_of):
    decoder = load(roomy, draft="early-exit:1", tree="3x2x1", dtype="float32")
    live = serving(decoder, slots=4, other_slots=2, slot_tokens=200, cache_gb=0.01)
    pool = live.service.scheduler.pool
    before = pool_of(live)
    pool.size = pool.least + 100_000
    bodies = [
        {"prompt": [3 + number] * 20, "max_tokens": 160, "min_tokens": 140, "seed": number, "temperature": 0.8}
        | ({"speculative": "off"} if number % 3 == 2 else {})
        for number in range(7)
    ]
    answers = dict[int, str]()

    def ask(number):
        answers[number] = live.post(COMPLETIONS, bodies[number]).json()["choices"][0]["text"]

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    assert pool_of(live) == before and pool.evictions and len(answers) == len(bodies)
    put_back = next(line for line in live.service.metrics.text().decode().splitlines() if "num_preemptions{" in line)
    assert float(put_back.split()[1]) == pool.evictions
    for number in (1, 5):
        assert live.post(COMPLETIONS, bodies[number]).json()["choices"][0]["text"] == answers[number]


@pytest.mark.parametrize("tree", keeping(["3x2x1", "dynamic:16"], "dynamic:16"))
def test_a_heads_memory_is_handed_on_too(roomy, serving, pool_of, tree):
    decoder = load(roomy, draft="none", dtype="float32")
    shape = HeadShape(hidden_size=32, taps=(1, 2), num_heads=2, num_key_heads=1, head_size=8, mlp_size=16, window=8)
    head = new_head(shape, decoder.target, None, "test").requires_grad_(False)
    decoder.target.tap(shape.taps)
    drafter = TreeDrafter(
        head, parse_dynamic(tree) or parse_tree(tree), costs=Costs(draft_level=0.1, tree_pass=lambda nodes: 1.0)
    )
    live = serving(decoder.replace(drafter=drafter))
    before = pool_of(live)
    body = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 10, "temperature": 0}
    expected = live.post(COMPLETIONS, body).json()["choices"][0]["text"]
    for way in ("off", "dynamic:128:16:fixed", "off", "2x1", "auto"):
        own = {"speculative": {"tree": way} if way[0].isdigit() or ":" in way else way}
        assert live.post(COMPLETIONS, {**body, **own}).json()["choices"][0]["text"] == expected, way
        assert live.post(COMPLETIONS, {**body, **own, "regex": "[a-z]{4}"}).status_code == 200
    assert pool_of(live) == before


def test_a_short_text_beside_a_long_one_is_not_padded_past_the_reserve(serving, pool_of):
    live = serving(slots=3, slot_tokens=512, chunk_tokens=512)
    before = pool_of(live)
    long, added = [5] * 300, [7] * 190
    assert live.post(COMPLETIONS, {"prompt": [long, long], "max_tokens": 1}).status_code == 200
    # Two rows side by side read: one behind 300 tokens, one from its beginning.
    assert live.post(COMPLETIONS, {"prompt": [[*long, *added], [9] * 300], "max_tokens": 5}).status_code == 200
    assert pool_of(live) == before


def test_a_round_that_breaks_leaves_the_memory_to_those_who_come_next(serving, pool_of, monkeypatch):
    live = serving()
    before, body = pool_of(live), {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    expected = live.post(COMPLETIONS, body).json()["choices"][0]["text"]
    extend = Context.prefill
    broken = []

    def once(self, *arguments):
        if not broken:
            broken.append(self)
            raise MemoryError
        return extend(self, *arguments)

    monkeypatch.setattr(Context, "prefill", once)
    assert live.post(COMPLETIONS, {**body, "prompt": [9, 9, 9]}).status_code == 503
    assert live.post(COMPLETIONS, body).json()["choices"][0]["text"] == expected
    assert broken and pool_of(live) == before


def test_too_little_memory_is_found_before_anybody_asks(tiny_decoder, monkeypatch):
    too_little = r"60 \+ 60 slots of 512 tokens; use smaller --slots, --other-slots or --slot-tokens, or more --cache-gb"
    with pytest.raises(FailureError, match=too_little):
        Service(tiny_decoder, ServeOptions(slots=60, slot_tokens=512, cache_gb=0.001))

    def failing(nbytes):
        raise OSError("[Errno 12] Cannot allocate memory")

    monkeypatch.setattr(blocks, "_anonymous", failing)
    with pytest.raises(FailureError, match=too_little):
        Service(tiny_decoder, ServeOptions(slots=60, slot_tokens=512))
