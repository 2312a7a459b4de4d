"""Stop strings end beams: Hugging Face's texts and scores, the same distribution and the same texts with and without drafts."""

import random
from dataclasses import replace

import pytest
import torch

from covering import keeping
from exactness.small_texts import PROMPT as SMALL_PROMPT
from exactness.small_texts import Listed, small_decoder
from families import FAMILIES
from polydraft.beam import BeamDecoder
from polydraft.beam._node import Node, Stops
from polydraft.beam._run import BeamRun
from polydraft.beam._sample import RandomChance, SampleRun
from polydraft.beam._search import CoupledRun, SearchRun
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, StopReason
from polydraft.engine.text import TextAssembler
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

from .enumeration import enumerate_outcomes, total_variation
from .reference import beam_sampling_distribution, table_rows
from .spelling import BREAK, spelled, spelling, token_of
from .test_hugging_face import SETTINGS, assert_same, hugging_face, models
from .test_runs import FALSE_ALARM, PROMPT, finish, pair, parts, sampled_p_value

# Few texts end, many do, or so many that fewer beams than asked for go on, or none.
STRINGS = [["cab", "éb", "ddd"], ["ab", "é", "ccd", "da"], ["a", "éb", "bc"]]


def decoder(name, ends, with_draft):
    target, draft = models(name)
    drafter = TreeDrafter(draft, parse_tree("1")) if with_draft else None
    return BeamDecoder(Decoder(target, drafter, eos_token_ids=ends, tokenizer=spelling()))


def prompt(seed):
    """Some tokens and one that no stop string holds: Hugging Face's criterion looks at the prompt's end too."""
    return [*(random.Random(seed).randrange(3, 96) for _ in range(6)), token_of(BREAK)]


def cut(text, strings):
    return text[: min((text.find(string) for string in strings if string in text), default=None)]


# Every setting and all strings by default, in families that beams without stop strings are not tested with by default.
@pytest.mark.parametrize("name", keeping(list(FAMILIES), *list(FAMILIES)[4:8]))
def test_search_is_hugging_faces_in_every_family(name):
    number = list(FAMILIES).index(name)
    setting, strings = dict(SETTINGS[number % len(SETTINGS)]), STRINGS[number % len(STRINGS)]
    ends = setting.pop("ends")
    expected = hugging_face(name, prompt(number), ends, 12, 3, stop_strings=strings, tokenizer=spelling(), **setting)
    for with_draft in (False, True):
        got = decoder(name, ends, with_draft).search(
            prompt(number), beams=3, draft_depth=2, max_new_tokens=12, num_return_sequences=3, stop=strings, **setting
        )
        assert_same(got, *expected)
        for text in got.texts:
            before_end = text.token_ids[:-1]
            shown = before_end if text.stop_reason == StopReason.EOS else text.token_ids
            assert text.text == cut(spelled(shown), strings)
            assert cut(spelled(before_end), strings) == spelled(before_end), "it went on"
            assert text.stop_reason != StopReason.STOP or text.text != spelled(text.token_ids)


def test_search_is_hugging_faces_where_few_beams_go_on(monkeypatch):
    """Its candidates are enough for ends by a token; stop strings may leave fewer beams than asked for, and none at all."""
    going_on = []
    finish_step = BeamRun._finish_step

    def noted(run, running, ended):
        if run.length + 1 < run.ends.longest:
            going_on.append(len(running))
        finish_step(run, running, ended)

    monkeypatch.setattr(BeamRun, "_finish_step", noted)
    options = dict(length_penalty=1.0, early_stopping="never")
    for seed in (5, 6, 7):
        expected = hugging_face("qwen3", prompt(seed), (96,), 10, 3, stop_strings=STRINGS[2], tokenizer=spelling(), **options)
        for with_draft in (False, True):
            got = decoder("qwen3", (), with_draft).search(
                prompt(seed), beams=3, max_new_tokens=10, num_return_sequences=3, stop=STRINGS[2], **options
            )
            assert_same(got, *expected)
    assert 0 in going_on and {1, 2} & set(going_on) and 3 in going_on


@pytest.mark.parametrize("string", keeping(["{0}", "{1}", "{2}", "no such string"], "{0}", "no such string"))
def test_one_beam_ends_and_streams_as_a_single_text(string):
    engine = decoder("phi", (), True)
    alone = Decoder(engine.decoder.target, tokenizer=spelling())
    options = dict(max_new_tokens=24, sampling=SamplingParams(temperature=0))
    text = alone.generate(prompt(3), **options).text
    # Some letters from the middle: such a string begins inside a token, spans several, and ends inside one.
    stop = string.format(text[14:20], text[31:38], text[1])
    beams, single = engine.stream(prompt(3), beams=1, stop=stop, **options), alone.stream(prompt(3), stop=stop, **options)
    seen = [[(event.token_id, event.text, event.stop_reason) for event in stream] for stream in (beams, single)]
    got, expected = beams.result().best, single.results()[0]
    assert "\ufffd" not in stop
    assert got.stop_reason == expected.stop_reason == (StopReason.LENGTH if " " in stop else StopReason.STOP)
    assert (got.text, got.token_ids) == (expected.text, expected.token_ids)
    # Settled late, perhaps, but never more of a stop string than there.
    assert "".join(piece for _, piece, _ in seen[0]) == "".join(piece for _, piece, _ in seen[1]) == got.text
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", ["search", "sample"])
def test_what_streams_is_the_text_without_its_stop_string(mode):
    reasons = set()
    for seed in range(4):
        options = dict(mode=mode, beams=3, seed=seed, stop=STRINGS[1], max_new_tokens=16)
        stream = decoder("qwen2", (), True).stream(prompt(seed), **options)
        pieces = []
        for event in stream:
            pieces.append(event.text)
            reasons.add(event.stop_reason)
            assert cut("".join(pieces), STRINGS[1]) == "".join(pieces)
        assert "".join(pieces) == stream.result().best.text
    assert StopReason.STOP in reasons


class Words:
    """A tokenizer whose tokens are words of a list."""

    def __init__(self, *words):
        self._words = words
        self.longest = self.decodings = 0

    def decode(self, tokens, skip_special_tokens):
        self.longest, self.decodings = max(self.longest, len(tokens)), self.decodings + 1
        return "".join(self._words[token] for token in tokens)

    def stops(self, *strings):
        return Stops(TextAssembler(self, strings))


def test_forests_decode_few_texts_where_strings_end_nearly_all(monkeypatch):
    """Every look is a decoding: of a large vocabulary only so many as places ask for, whatever ends."""
    target, draft = pair(64, seed=3)

    def decodings():
        words = Words(*("z" if token % 16 else "a" for token in range(64)))
        for seed in range(8):
            kept = replace(parts(target, draft, 6, beams=4, draft_width=8, draft_depth=2), stops=words.stops("z"))
            finish(CoupledRun(kept, torch.Generator().manual_seed(seed)))
        return words.decodings

    few = decodings()
    monkeypatch.setattr("polydraft.beam._search._EXAMINED", 10**6)
    assert 0 < few < decodings() / 2


EXACT = {
    "one beam, two layers": (("a", "b"), ("a",), dict(steps=3, beams=1, draft_width=2, draft_depth=2)),
    "a string of two tokens": (("a", "ba"), ("ab",), dict(steps=3, beams=1, draft_width=2, draft_depth=1)),
    "two beams": (("a", "b"), ("b",), dict(steps=2, beams=2, draft_width=3, draft_depth=1)),
    "no draft": (("a", "b", "ba"), ("ab", "bb"), dict(steps=2, beams=2)),
}


def enumerated(case, draws):
    words, strings, options = EXACT[case]
    steps, width = options["steps"], options["beams"]
    target, draft = pair(len(words))
    options = {name: value for name, value in options.items() if name != "steps"} | {"draws": draws, "verification": "layers"}
    kept = parts(target, draft if "draft_depth" in options else None, steps, **options)
    tokenizer = Words(*words)
    got = enumerate_outcomes(lambda chance: finish(SampleRun(replace(kept, stops=tokenizer.stops(*strings)), chance)))

    def stops(text):
        return any(string in "".join(words[token] for token in text) for string in strings)

    return got, beam_sampling_distribution(table_rows(target, PROMPT), width=width, steps=steps, draws=draws, stops=stops)


DRAFTED = [case for case in EXACT if case != "no draft"]
RUNS = [(case, draws) for case in DRAFTED for draws in ("iid", "distinct")]


# Those that take long run without stop strings in test_runs.
LONG = [("two beams", "iid"), ("one beam, two layers", "iid"), ("no draft", "distinct")]
EVERY_RUN = [*RUNS, ("a string of two tokens", "hf"), ("no draft", "distinct")]


@pytest.mark.parametrize(("case", "draws"), keeping(EVERY_RUN, *(run for run in EVERY_RUN if run not in LONG)))
def test_the_distribution_of_whole_runs_by_enumeration(case, draws):
    got, expected = enumerated(case, draws)
    assert sum(got.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(got, expected) < 1e-6


WORDS = ("a", "b", "ab", "ba", "aab", "c", "ca", "bc", "d", "da", "cd", "dd")


def new_run(kind, seed, kept):
    generator = torch.Generator().manual_seed(seed)
    if kind is SearchRun:
        return kind(replace(kept, prompt=[*PROMPT, seed]))
    return kind(kept, generator if kind is CoupledRun else RandomChance(generator))


def both_runs(kind, seed, draws="distinct"):
    """Run with and without a draft."""
    target, draft = pair(len(WORDS), seed=3)
    runs, layers = [], []
    for with_draft in (True, False):
        options = dict(draws=draws, beams=3, draft_width=6, draft_depth=3)
        kept = parts(target, draft if with_draft else None, 9, (11,), **options)
        run = new_run(kind, seed, replace(kept, stops=Words(*WORDS).stops("aba", "cd", "bb")))
        grow = run._grow
        run._grow = lambda depth, grow=grow: layers.append(grow(depth)) or layers[-1]
        finish(run)
        runs.append(run)
    return *runs, [layer for grown in layers for layer in grown]


DRAWN = [(SearchRun, "distinct"), (CoupledRun, "distinct"), (CoupledRun, "hf")]


@pytest.mark.parametrize(("kind", "draws"), keeping(DRAWN, (SearchRun, "distinct"), (CoupledRun, "hf")))
def test_a_draft_changes_no_text(kind, draws):
    reasons, passes, wide = set(), [0, 0], []
    for seed in range(6):
        drafted, plain, layers = both_runs(kind, seed, draws)
        assert [(one.node.tokens(), one.reason) for one in drafted.results()] == [
            (one.node.tokens(), one.reason) for one in plain.results()
        ]
        reasons |= {one.reason for one in plain.results()}
        passes = [passes[0] + drafted.stats.passes, passes[1] + plain.stats.passes]
        assert not any(drafted.ends.at(node) for node in drafted.target.tree.bank.rows), "a text that ended was passed"
        assert not any(drafted.ends.at(beam.node) for layer in layers for beam in layer.beams), "a place for a text that ended"
        wide += [len(layer.beams) == 6 for layer in layers]
    assert StopReason.STOP in reasons and len(reasons) > 1
    assert passes[0] < passes[1] and sum(wide) > 0.8 * len(wide), "others take those places"


ALIKE = {
    "search": (SearchRun, {}),
    "coupled": (CoupledRun, {}),
    "coupled as Hugging Face": (CoupledRun, {"draws": "hf"}),
    "layers": (SampleRun, {"verification": "layers"}),
    "independent": (SampleRun, {"draws": "iid"}),
    "dynamic width": (SampleRun, {"width_threshold": 0.6}),
    "independent, dynamic width": (SampleRun, {"draws": "iid", "width_threshold": 0.6, "min_width": 2}),
    "one cache": (SampleRun, {"one_cache": True}),
}


# One of each kind of run.
@pytest.mark.parametrize("case", keeping(ALIKE, "search", "coupled", "independent, dynamic width"))
def test_a_string_that_is_one_token_ends_texts_as_that_token_does(case):
    """Whatever holds of texts that end by a token holds of stop strings: nothing else depends on the end."""
    kind, options = ALIKE[case]
    target, draft = pair(12, seed=3, share=0.8)
    reasons = set()
    for seed in range(4):
        found = []
        for ends, strings in (((5,), ()), ((), ("f",))):
            kept = parts(target, draft, 9, ends, **{"beams": 3, "draft_width": 6, "draft_depth": 3, **options})
            run = new_run(kind, seed, replace(kept, stops=Words(*"abcdefghijkl").stops(*strings)))
            finish(run)
            reasons |= {one.reason for one in run.results()}
            found.append(
                ([(one.node.tokens(), one.score) for one in run.results()], run.pass_of_step, run.target.tree.passed_tokens)
            )
        assert found[0] == found[1]
    assert {StopReason.EOS, StopReason.STOP} <= reasons


@pytest.mark.slow
def test_many_coupled_runs():
    target, draft = pair(5, seed=5)
    words, strings = ("a", "b", "ba", "c", "d"), ("ab", "d")
    kept = parts(target, draft, 2, draws="distinct", beams=2, draft_width=4, draft_depth=2)
    expected = beam_sampling_distribution(
        table_rows(target, PROMPT),
        width=2,
        steps=2,
        draws="distinct",
        stops=lambda text: any(string in "".join(words[token] for token in text) for string in strings),
    )

    def make_run(generator):
        return CoupledRun(replace(kept, stops=Words(*words).stops(*strings)), generator)

    assert sampled_p_value(make_run, expected, 4000) > FALSE_ALARM


def test_texts_of_nodes_are_decoded_once_and_by_their_last_tokens():
    tokenizer = Words("a", "b", "-")
    stops, root = tokenizer.stops("ab"), Node(7)
    node = root
    for _ in range(200):
        node = node.child(2)
        assert not stops.found(node)
    assert tokenizer.longest < 40
    counts = []
    for again in range(3):
        assert stops.found(node.child(0).child(1)) and stops.text(node.child(0).child(1)) == "-" * 200
        assert not stops.found(node.child(1)) and not stops.found(node.child(0)), "texts that part do not meet again"
        counts.append(tokenizer.decodings)
        if again:
            stops.keep([node])
    assert counts[0] == counts[1] < counts[2] < counts[1] + 20


def test_a_stop_string_that_tokens_tear():
    stops, root = Stops(TextAssembler(spelling(), ["éb"])), Node(7)
    torn = [root.child(token_of("aÃ"))]
    for word in ("©b", "©Ã©", "b"):
        torn.append(torn[-1].child(token_of(word)) if word != "©Ã©" else torn[0].child(token_of(word)))
    assert [stops.found(node) for node in torn] == [False, True, False, True]
    assert [stops.text(node) for node in torn] == ["a\ufffd", "a", "aéé", "aé"]


@pytest.mark.parametrize("mode", ["search", "sample"])
@pytest.mark.parametrize("twins", [False, True], ids=["draft", "twins"])
def test_a_processor_need_not_know_what_only_drafts_become(mode, twins):
    # Beams that end alike lend each other distributions, so forests hold texts that the list has not.
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        texts = torch.randint(2, (12, 4), generator=generator).repeat(1, 4).tolist()
        lengths = torch.randint(6, 15, (12,), generator=generator).tolist()
        listed = Listed(tuple({(*text[:length], 2) for text, length in zip(texts, lengths, strict=True)}))
        sampling = SamplingParams(temperature=float(mode == "sample"), processors=(listed,))
        options = {"beams": 4, "max_new_tokens": 18, "seed": 1, "sampling": sampling}
        found = getattr(BeamDecoder(small_decoder("model", eos_token_ids=[2])), mode)(SMALL_PROMPT, **options, twins=twins)
        assert {tuple(text.token_ids) for text in found.texts} <= {*listed.texts}
        if mode == "search":
            plain = BeamDecoder(small_decoder("none", eos_token_ids=[2])).search(SMALL_PROMPT, **options)
            assert [text.token_ids for text in found.texts] == [text.token_ids for text in plain.texts]
