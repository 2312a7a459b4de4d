"""`model.generate(custom_generate=Speculate(...))` gives what `model.generate(...)` gives."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    WatermarkingConfig,
    set_seed,
)
from transformers.generation import GenerateDecoderOnlyOutput

from covering import covering, keeping
from polydraft.errors import UsageError
from polydraft.hf_generate import Speculate
from polydraft.models.generation_defaults import sampling_params
from polydraft.models.hf import HFModel

from .setups import PROMPTS, assert_same, batch, both, draft, single, speculate, target

BOTH = {"single": single, "batch": batch}
every_batch = pytest.mark.parametrize("inputs", [single, batch], ids=["single", "batch"])


@every_batch
def test_greedy_text_is_that_of_generate(inputs):
    assert_same(inputs)
    assert 0 < speculate().stats[0].acceptance_rate < 1


def test_plain_decoding_without_a_draft():
    plain = target().generate(**batch, do_sample=False, max_new_tokens=9, pad_token_id=0)
    for custom in (Speculate(None), Speculate(draft=draft(), tree="none"), Speculate(draft=HFModel(draft()), tree="chain:2")):
        got = target().generate(**batch, do_sample=False, max_new_tokens=9, pad_token_id=0, custom_generate=custom)
        assert torch.equal(got, plain)


@pytest.mark.parametrize("copied", [True, False])
def test_without_a_draft_it_does_what_load_does(copied, caplog, monkeypatch):
    """Its own weights in int8 draft, or n-grams where these cannot be copied; a tree by name is for a draft by name."""
    caplog.set_level("INFO", logger="polydraft")
    if not copied:
        monkeypatch.setattr("polydraft.automatic.copy_obstacle", lambda target: "it is somebody else's")
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    plain = target().generate(**batch, **settings)
    custom = Speculate()
    for _ in range(2):
        assert torch.equal(target().generate(**batch, **settings, custom_generate=custom), plain)
    (line,) = [one.message for one in caplog.records if "no draft" in one.message]
    assert ("its own weights in int8 draft" if copied else "somebody else's, so n-grams of the text draft") in line
    assert torch.equal(target().generate(**batch, **settings, custom_generate=Speculate(tree="3x2x1")), plain)
    assert torch.equal(target().generate(**batch, **settings, custom_generate=Speculate(ngrams="lookup")), plain)
    assert len([one for one in caplog.records if "no draft" in one.message]) == 1


def test_several_texts_of_one_prompt():
    fast = target().generate(
        **single, do_sample=True, num_return_sequences=4, max_new_tokens=6, pad_token_id=0, custom_generate=speculate()
    )
    assert fast.shape == (4, 13)
    assert len({tuple(row) for row in fast.tolist()}) > 1, "rows have random numbers of their own"


@pytest.mark.parametrize("count", keeping(range(1, 6), 1, 3, 4))
def test_lengths_are_exact(count):
    assert assert_same(batch, max_new_tokens=count).shape[1] == 7 + count
    assert assert_same(single, max_new_tokens=None, max_length=7 + count).shape[1] == 7 + count


@pytest.mark.parametrize("offset", keeping(range(6), 0, 2, 5))
def test_an_end_of_text_inside_a_block(offset):
    """Whatever token comes at some place, made the end of text, ends the row there and pads the others' rest."""
    plain = target().generate(**batch, do_sample=False, max_new_tokens=12, pad_token_id=0)
    eos = [int(plain[0, 7 + offset]), int(plain[2, 7 + (offset * 2) % 7])]
    result = assert_same(batch, eos_token_id=eos)
    assert result[0, -1] in (0, *eos)


class StopAtMultiple(StoppingCriteria):
    def __init__(self, number):
        self.number, self.widths = number, []

    def __call__(self, input_ids, scores, **kwargs):
        self.widths.append(input_ids.shape[1])
        return input_ids[:, -1] % self.number == 0


@pytest.mark.parametrize(("inputs", "eos", "number"), covering(["single", "batch"], [None, 95], [3, 5, 7], strength=2))
def test_a_criterion_ends_texts_where_it_would(inputs, number, eos):
    """Without an end-of-text token, `generate` lets rows go on until all are done; with one, it pads them."""
    criteria = []

    def make():
        criteria.append(StopAtMultiple(number))
        return [criteria[-1]]

    assert_same(BOTH[inputs], stopping_criteria=make, eos_token_id=eos)
    assert criteria[0].widths == criteria[1].widths, "it is asked once a token, in order"


class StopWhenAnyRow(StoppingCriteria):
    """Looks at the whole batch: all rows end with the first that shows a small token."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 8:] < 20).any().expand(len(input_ids))


def test_a_criterion_that_looks_at_all_rows():
    assert_same(batch, stopping_criteria=lambda: [StopWhenAnyRow()], eos_token_id=95)


def test_a_time_limit():
    assert_same(single, max_time=1000.0)
    limited = both(single, stopping_criteria=lambda: [MaxTimeCriteria(0.0)])
    assert torch.equal(*limited) and limited[1].shape[1] == 8, "out of time after the first token"


LETTERS = [chr(0x4E00 + token) for token in range(96)]


class LetterStop(StopStringCriteria):
    """`StopStringCriteria` without a tokenizer: every token reads as one letter."""

    def __init__(self, strings):
        self.stop_strings = tuple(strings)
        self.embedding_vec, self.max_valid_positions, self.max_valid_end_lens = self._stop_string_create_embedding_vec(
            LETTERS, list(range(96)), self.stop_strings
        )
        self.maximum_token_len = max(map(len, strings))
        self.num_stop_strings = len(strings)
        self.target_lens = torch.tensor([len(string) for string in strings], dtype=torch.int32)


@pytest.mark.parametrize("start", keeping(range(4), 0, 3))
def test_stop_strings(start):
    plain = target().generate(**single, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, 7:].tolist()
    string = "".join(LETTERS[token] for token in plain[start : start + 3])
    result = assert_same(single, stopping_criteria=lambda: [LetterStop([string, LETTERS[1] * 2])])
    assert result.shape[1] <= 7 + start + 3, "it did stop"
    assert_same(batch, stopping_criteria=lambda: [LetterStop([string])], eos_token_id=95)


class GraphCache:
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


@every_batch
@pytest.mark.parametrize("eos", [None, 12])
def test_a_streamer_gets_the_same_tokens(inputs, eos):
    caches = []

    def make():
        caches.append(GraphCache())
        return caches[-1]

    assert_same(inputs, streamer=make, eos_token_id=eos)
    assert caches[0].pieces == caches[1].pieces and caches[1].ended == 1
    assert caches[1].pieces[0] == inputs["input_ids"].tolist(), "the prompt first"


class Fussy(LogitsProcessor):
    """Depends on length, padding and row number, as processors may."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, (input_ids.shape[1] * 7 + row * 5 + int(input_ids[row, 0])) % 96] += 4.0
        return scores


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.7},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bias": {"sequence_bias": [[[12], 3.0], [[40, 41], 5.0]], "repetition_penalty": 1.3},
    "bad words": {"bad_words_ids": [[12], [40, 41]]},
    "least length": {"min_new_tokens": 9, "eos_token_id": 12},
    "least total length": {"min_length": 12, "eos_token_id": 12},
    "suppressed": {"suppress_tokens": [8, 9], "begin_suppress_tokens": [12, 13]},
    "forced end": {"forced_eos_token_id": 50, "eos_token_id": 51},
    "longer costs": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 12},
    "prompt penalty": {"encoder_repetition_penalty": 1.5},
    "allowed": {"prefix_allowed_tokens_fn": lambda: lambda row, ids: range(row, 96, 2 + row)},
    "watermark": {"watermarking_config": lambda: WatermarkingConfig(bias=3.0)},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "fussy": {"logits_processor": lambda: [Fussy()]},
    "odd order": {"logits_processor": lambda: [TopKLogitsWarper(3), TemperatureLogitsWarper(0.5), Fussy()]},
}


@pytest.mark.parametrize(("name", "inputs"), covering(PROCESSORS, ["single", "batch"]))
def test_logits_processors_do_what_they_do(name, inputs):
    assert_same(BOTH[inputs], **PROCESSORS[name])


ENTRIES = [[40, 41, 95], [40, 95], [12, 13, 14, 15, 95], [60, 61, 62, 63, 95], [12, 13, 95]]
LISTED_ENDS = {
    "end of text": (ENTRIES, {"eos_token_id": 95}),
    "two ends of text": ([*ENTRIES, [60, 94]], {"eos_token_id": [94, 95]}),
    "length": ([[5, 6, 7], [5, 7, 6], [80, 81, 82]], {"max_new_tokens": 3}),
    "stop string": (ENTRIES, {"stopping_criteria": lambda: [LetterStop([LETTERS[95], LETTERS[63] + LETTERS[95]])]}),
}
LISTING = {
    "chain": lambda: Speculate(draft=draft(), tree="chain:5"),
    "tree": lambda: Speculate(draft=draft()),
    "lookup": lambda: Speculate(ngrams="lookup"),
}


@pytest.mark.parametrize("name", LISTED_ENDS)
@pytest.mark.parametrize("way", LISTING)
def test_a_list_of_texts_is_not_asked_what_follows_its_ends(name, way):
    (entries, ends), custom = LISTED_ENDS[name], LISTING[way]()

    def listed(row, ids):
        new = ids[single["input_ids"].shape[1] :].tolist()
        allowed = {entry[len(new)] for entry in entries if entry[: len(new)] == new and len(entry) > len(new)}
        assert allowed, f"{new} is no beginning of an entry"
        return sorted(allowed)

    asked = {"prefix_allowed_tokens_fn": listed, "pad_token_id": 0, "max_new_tokens": 9}
    for sample in (False, True):
        made = {key: value() if callable(value) else value for key, value in ends.items()}
        settings = {**asked, **made, "do_sample": sample}
        found = target().generate(**single, **settings, custom_generate=custom)[0, 7:].tolist()
        assert found in entries
        assert sample or found == target().generate(**single, **settings)[0, 7:].tolist()


def test_a_configuration_object():
    config = GenerationConfig(repetition_penalty=1.4, max_new_tokens=15, do_sample=False, pad_token_id=0)
    plain = target().generate(**batch, generation_config=config)
    assert torch.equal(target().generate(**batch, generation_config=config, custom_generate=speculate()), plain)


def test_a_dictionary_where_asked_for():
    plain, fast = both(batch, return_dict_in_generate=True)
    assert isinstance(fast, GenerateDecoderOnlyOutput)
    assert torch.equal(plain.sequences, fast.sequences) and fast.scores is None


def test_known_processors_become_parameters():
    processors = target()._get_logits_processor(
        GenerationConfig(
            do_sample=True, repetition_penalty=1.2, temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, min_length=None, num_beams=1
        ),
        input_ids_seq_length=3,
    )
    params, others = sampling_params(processors, sample=True, padded=False)
    assert params == {"repetition_penalty": 1.2, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1} and not others
    params, others = sampling_params(processors, sample=True, padded=True)
    assert "repetition_penalty" not in params and others == processors[:1]
    backwards = processors[::-1]
    assert sampling_params(backwards, sample=True, padded=False) == ({"temperature": 1.0}, backwards)
    assert sampling_params(backwards, sample=False, padded=False) == ({"temperature": 0.0}, backwards)


@pytest.mark.parametrize("inputs", [single, batch], ids=["single", "batch"])
def test_a_seed_makes_samples_reproducible(inputs):
    options = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, "custom_generate": speculate()}
    results = []
    for seed in (7, 7, 8):
        set_seed(seed)
        results.append(target().generate(**inputs, **options))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert not torch.equal(target().generate(**inputs, **options), results[2]), "a second call goes on, not back"


class Same(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def exact_distribution(prompt, top_k, temperature):
    """Probabilities of the next two tokens, from plain forward passes."""

    @torch.inference_mode()
    def distribution(texts):
        logits = target()(input_ids=torch.tensor(texts)).logits[:, -1] / temperature
        lowest = logits.topk(top_k).values[:, -1:]
        return torch.softmax(logits.masked_fill(logits < lowest, -torch.inf).double(), -1)

    first = distribution([prompt])[0]
    tokens = first.nonzero()[:, 0].tolist()
    second = distribution([[*prompt, token] for token in tokens])
    return {
        (one, two): float(first[one] * row[two])
        for one, row in zip(tokens, second, strict=True)
        for two in row.nonzero()[:, 0].tolist()
    }


# The distribution of translated ones is in test_sampled_distribution, too.
@pytest.mark.parametrize("extra", keeping([False, True], True), ids=["translated", "as processors"])
def test_samples_follow_the_exact_distribution(extra):
    """False alarms: one in a million."""
    set_seed(0)
    count, rows, top_k = (150, 1, 2) if extra else (20, 100, 4)
    seen = Counter()
    for _ in range(count):
        result = target().generate(
            torch.tensor([PROMPTS[0]]),
            attention_mask=torch.ones(1, 7, dtype=torch.long),
            do_sample=True,
            temperature=1.5,
            top_k=top_k,
            max_new_tokens=2,
            num_return_sequences=rows,
            pad_token_id=0,
            logits_processor=[Same()] if extra else [],
            custom_generate=speculate(),
        )
        seen.update(map(tuple, result[:, 7:].tolist()))
    distribution = exact_distribution(PROMPTS[0], top_k, 1.5)
    assert set(seen) <= set(distribution), "nothing outside the support"
    common = [pair for pair in distribution if distribution[pair] * count * rows >= 5]
    observed = [seen[pair] for pair in common] + [count * rows - sum(seen[pair] for pair in common)]
    expected = [distribution[pair] * count * rows for pair in common]
    expected.append(count * rows - sum(expected))
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert chisquare(observed, expected).pvalue > 1e-6


@pytest.mark.parametrize(
    "options", [{"ngrams": "lookup"}, {"ngrams": "self-draft+suffix"}, {"ngrams": "lookup", "tree": "2x1"}]
)
def test_ngrams_change_nothing(options):
    custom = Speculate(draft() if "tree" in options else None, **options)
    settings = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    assert torch.equal(target().generate(**batch, **settings, custom_generate=custom), target().generate(**batch, **settings))
    assert custom.stats[0].new_tokens == 16 * len(PROMPTS)


@pytest.mark.parametrize(("ngrams", "message"), [("lookpu", "did you mean 'lookup'"), ("lookup+model", "proposes no n-grams")])
def test_wrong_ngrams_are_refused(ngrams, message):
    with pytest.raises(UsageError, match=message):
        Speculate(ngrams=ngrams)
