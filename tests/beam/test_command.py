"""`polydraft generate` with beams and with several samples; wrong usage is one line."""

import json
import threading
from typing import Any

import pytest
import torch

from polydraft.beam import BeamDecoder, BeamOptions
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.loading import load

USAGE = {
    "as many drafts as beams": (["--beams", "4", "--draft-width", "4"], "draft_width=4 must be above beams=4"),
    "fewer drafts than beams": (["--beams", "4", "--draft-width", "2"], "draft_width=2 must be above beams=4"),
    "least width above the drafts'": (
        ["--beams", "2", "--temperature", "1", "--draft-width", "4", "--width-threshold", "0.5", "--set", "min_width=5"],
        "min_width=5 is above draft_width=4",
    ),
    "least width without a threshold": (
        ["--beams", "2", "--temperature", "1", "--set", "min_width=2"],
        "pass width_threshold too",
    ),
    "threshold above one": (["--beams", "2", "--temperature", "1", "--width-threshold", "1.5"], "allowed: 0 to 1"),
    "threshold below nought": (["--beams", "2", "--temperature", "1", "--width-threshold", "-0.1"], "allowed: 0 to 1"),
    "threshold in a search": (["--beams", "2", "--width-threshold", "0.5"], "width_threshold is for beam sampling"),
    "one cache in a search": (["--beams", "2", "--set", "one_cache=yes"], "one_cache is for beam sampling"),
    "a scheme": (["--beams", "2", "--scheme", "rrs-wr"], "--scheme rrs-wr does not apply to beams"),
    "a walk": (["--beams", "2", "--walk", "block"], "--walk block does not apply to beams"),
    "a tree": (["--beams", "2", "--tree", "4x2"], "--tree 4x2 does not apply to beams"),
    "a draft temperature": (["--beams", "2", "--draft-temperature", "0.5"], "--draft-temperature 0.5 does not apply"),
    "more beams than memory": (["--beams", "100000"], "beams=100000 is out of range; allowed: whole numbers from 1 to 1024"),
    "drafts too wide": (["--beams", "2", "--draft-width", "99999"], "draft_width=99999 is out of range"),
    "penalty that is no number": (["--beams", "2", "--length-penalty", "nan"], "length_penalty=nan is out of range"),
    "endless penalty": (["--beams", "2", "--length-penalty", "inf"], "length_penalty=inf is out of range"),
    "no beams at all": (["--beams", "0"], "beams=0 is out of range"),
    "unknown mode": (["--beams", "2", "--set", "mode=serch"], "did you mean 'search'?"),
    "unknown draws": (["--beams", "2", "--set", "draws=all", "--temperature", "1"], "unknown way to draw beams 'all'"),
    "sampling at temperature 0": (["--beams", "2", "--set", "mode=sample"], "nothing to draw"),
    "search at a temperature": (["--beams", "2", "--set", "mode=search", "--temperature", "0.7"], "no meaning in beam search"),
    "search with top-k": (["--beams", "2", "--top-k", "5"], "top_k=5 has no meaning in beam search"),
    "more texts than beams": (["--beams", "2", "--num-return-sequences", "3"], "more than the 2 beams"),
    "no texts": (["--num-return-sequences", "0"], "--num-return-sequences 0"),
    "the same text many times": (
        ["--num-return-sequences", "3"],
        "at temperature 0 would repeat one text; raise --temperature",
    ),
    "a draft width without beams": (["--draft-width", "8"], "--draft-width works only with --beams"),
    "twins without beams": (["--twins"], "--twins works only with --beams"),
    "twins and a draft": (["--beams", "2", "--twins", "--draft", "early-exit:2"], "--twins needs no draft"),
    "the model alone without beams": (["--set", "model_only=yes"], "--set model_only works only with --beams"),
    "the model alone with twins": (["--beams", "2", "--twins", "--set", "model_only=yes"], "leave one of them out"),
    "the model alone without a model": (
        ["--beams", "2", "--draft", "none", "--set", "model_only=yes"],
        "model_only needs a draft",
    ),
    "draft beams without a draft": (
        ["--beams", "2", "--draft", "none", "--draft-width", "8"],
        "--draft-width 8 is for draft beams, and there is no draft",
    ),
    "dynamic widths without a draft": (
        ["--beams", "2", "--draft", "none", "--temperature", "1", "--width-threshold", "0.7"],
        "--width-threshold 0.7 is for draft beams, and there is no draft",
    ),
    "flat blocks": (["--beams", "2", "--lossy", "flat-blocks", "--drafter", "ngram"], "does not apply to beams"),
    "another kind of draft": (["--beams", "2", "--drafter", "self-draft"], "--drafter self-draft does not apply to beams"),
    "a decision model": (["--beams", "2", "--decision", "auto"], "--decision auto does not apply to beams"),
    "draws without beams": (["--set", "draws=iid"], "--set draws works only with --beams"),
    "coupled dynamic widths": (
        ["--beams", "2", "--temperature", "1", "--width-threshold", "0.5", "--set", "verification=coupled"],
        "'coupled' is for distinct beams of fixed width",
    ),
    "hf draws of dynamic width": (
        ["--beams", "2", "--temperature", "1", "--width-threshold", "0.5", "--set", "draws=hf"],
        "width_threshold does not work with draws 'hf'",
    ),
    "several samples compared": (
        ["--num-return-sequences", "2", "--temperature", "1", "--compare"],
        "--compare works with one text only",
    ),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(invoke, tiny, case):
    options, expected = USAGE[case]
    code, out, err = invoke("generate", "hello", "--target", tiny, *options)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1


def test_beams_as_json_hold_every_text_with_its_log_probabilities(invoke, tiny):
    arguments = ["--target", tiny, "--draft", "early-exit:2", "--raw", "--beams", "3", "--max-new-tokens", "6", "--json"]
    code, out, _ = invoke("generate", "hello", *arguments, "--num-return-sequences", "3")
    assert code == 0
    found = json.loads(out)
    assert len(found["texts"]) == 3
    for text in found["texts"]:
        assert text["log_prob"] == pytest.approx(sum(text["log_probs"]))
        assert text["score"] == pytest.approx(text["log_prob"] / len(text["token_ids"]), abs=1e-5)
    assert found["stats"]["new_tokens"] == len(found["texts"][0]["token_ids"])
    assert found["settings"]["mode"] == "search" and found["settings"]["draft"] == "early-exit:2"


@pytest.mark.parametrize("options", [[], ["--temperature", "1"], ["--temperature", "1", "--width-threshold", "0.5"]])
def test_beams_end_at_stop_strings(invoke, tiny, options):
    arguments = ["--target", tiny, "--draft", "early-exit:2", "--raw", "--beams", "3", "--max-new-tokens", "20", "--seed", "1"]
    arguments += [*options, "--num-return-sequences", "3", "--json"]
    letters = [argument for letter in "abcdefghij" for argument in ("--stop", letter)]
    code, out, _ = invoke("generate", "hello", *arguments, *letters)
    assert code == 0
    texts = json.loads(out)["texts"]
    assert "stop" in [text["stop_reason"] for text in texts]
    assert not set("abcdefghij") & set("".join(text["text"] for text in texts))


def test_samples_come_with_their_log_probabilities(invoke, tiny):
    arguments = ["--target", tiny, "--draft", "early-exit:1", "--raw", "--temperature", "1", "--max-new-tokens", "6", "--json"]
    code, out, _ = invoke("generate", "hello", *arguments, "--num-return-sequences", "4")
    assert code == 0
    texts = json.loads(out)["texts"]
    assert len(texts) == 4 and len({tuple(text["token_ids"]) for text in texts}) > 1
    assert [text["log_prob"] for text in texts] == sorted((text["log_prob"] for text in texts), reverse=True)


@pytest.mark.parametrize("options", [[], ["--num-return-sequences", "2"], ["--temperature", "1", "--width-threshold", "0.5"]])
def test_beams_are_printed_and_compared(invoke, tiny, options):
    arguments = ["--target", tiny, "--draft", "early-exit:2", "--beams", "2", "--max-new-tokens", "5", "--compare"]
    code, out, err = invoke("generate", "hello", *arguments, *options)
    assert code == 0
    assert "2 beams, no draft" in out and "tokens/pass" in out and "without drafts first" in err
    if not options:
        assert "identical, token by token" in out


def test_beams_draft_for_themselves(invoke, tiny):
    arguments = ["--target", tiny, "--beams", "2", "--max-new-tokens", "5", "--compare", "--twins"]
    code, out, _ = invoke("generate", "hello", *arguments)
    assert code == 0
    assert "2 beams, no draft" in out and "twins, 3 draft beams" in out and "identical, token by token" in out


def test_the_api_says_what_is_wrong(tiny):
    beams = BeamDecoder(load(tiny, "none"))
    with pytest.raises(UsageError, match="unsettled text"):
        beams.stream("hello", settled=False)
    with pytest.raises(UsageError, match="unknown option 'beam'; did you mean 'beams'"):
        beams.search("hello", beam=3)
    with pytest.raises(UsageError, match="top_k is a sampling parameter"):
        beams.sample("hello", top_k=3)
    with pytest.raises(UsageError, match="stop=3 is not text"):
        beams.search("hello", stop=3)
    with pytest.raises(UsageError, match="keep=True does not work with beams"):
        beams.search("hello", keep=True)
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        BeamDecoder(Decoder(beams.decoder.target)).search([5, 6], stop="x")
    with pytest.raises(UsageError, match="empty prompt"):
        beams.search("")
    with pytest.raises(UsageError, match="twins='no'; allowed: True, False"):
        BeamOptions(twins="no")
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(FailureError, match="cancelled before its first token"):
        _ = beams.search("hello", beams=2, cancel=cancelled).best
    with pytest.raises(UsageError, match="early_stopping='soon'"):
        BeamOptions(early_stopping="soon")
    with pytest.raises(UsageError, match="length_penalty='long' is not a number"):
        BeamOptions(length_penalty="long")
    assert len(beams.search(["hi", "hello"], beams=2, max_new_tokens=2)) == 2


def test_forests_are_as_large_as_the_device_likes_them() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    def forest(device: torch.device, **options: Any) -> tuple[int, int]:
        chosen = BeamOptions(**options).on(device)
        return chosen.width_of_drafts, chosen.depth_of_drafts

    assert forest(gpu) == (16, 4) and forest(cpu) == (6, 2) and forest(cpu, beams=1) == (2, 2)
    assert forest(gpu, beams=1024) == (2048, 4)
    assert forest(gpu, draft_width=9) == (9, 4) and forest(cpu, draft_depth=5) == (6, 5)
    # What a dynamic width or one cache decodes depends on the forest: it must not depend on the device.
    for heuristic in ({"width_threshold": 0.7}, {"one_cache": True}):
        options = {"mode": "sample", "beams": 3, **heuristic}
        assert forest(gpu, **options) == forest(cpu, **options) == (6, 3)
