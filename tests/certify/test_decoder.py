"""Whole decoders: greedy identity with the target's own text, near-ties told from errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import polydraft
from polydraft.certify.greedy_identity import GreedyReference, Likeness, TextJudge, certify_decoder, next_logits
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import TabularModel
from polydraft.models.hf import HFModel
from polydraft.trees import DraftTree
from polydraft.verify import Verdict
from polydraft.verify.node import follow_tokens
from polydraft.verify.walk import TreeDistributions

PROMPT = [5, 6, 7]
TWIN = 255
SMALL = ["--limit", "3", "--max-new-tokens", "12"]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("hello\na tree\nwhy\n")
    return str(path)


@pytest.fixture(scope="module")
def reference(tiny: str) -> GreedyReference:
    decoder = polydraft.load(tiny, draft="none", dtype="float32")
    model = decoder.target.hf_model
    reference = GreedyReference(HFModel(model, "twins"), decoder.eos_token_ids)
    with torch.no_grad():  # whenever that token is the likeliest, so is its twin
        model.lm_head.weight[TWIN] = model.lm_head.weight[reference.continued(PROMPT, 5)[-1]]
    return reference


@pytest.mark.parametrize(
    "options",
    [
        ["--tree", "2x1"],
        ["--tree", "chain:3", "--scheme", "speculative", "--walk", "block", "--draft-temperature", "1"],
    ],
)
def test_a_decoder_is_certified(invoke, tiny: str, prompt_file: str, options: list[str]) -> None:
    arguments = ("certify", "decoder", "--target", tiny, "--draft", "early-exit:1", "--prompts", prompt_file, *SMALL, *options)
    code, out, _ = invoke(*arguments, "--json")
    result = json.loads(out)
    (check,) = result["checks"]
    assert code == 0 and result["certified"] and check["name"] == "greedy" and check["size"] == 3 and check["worst"] == 0
    assert check["detects"] == pytest.approx(1 - 0.01 ** (1 / 3)) and check["false_alarm"] == 0
    assert [entry["likeness"] for entry in check["details"]] == ["identical"] * 3
    scheme = "speculative, walk block" if "--draft-temperature" in options else "top, walk node"
    assert f"draft early-exit:1, tree {'1x1x1' if 'chain:3' in options else '2x1'}, scheme {scheme}" in check["note"]
    code, out, _ = invoke(*arguments)
    assert code == 0 and "3 identical, 0 but for near-ties" in out and "share of prompts" in out and "CERTIFIED" in out


def test_a_lossy_decoder_is_refused(invoke, tiny: str, prompt_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_child(draft: DraftTree, distributions: TreeDistributions) -> Verdict:
        return follow_tokens(draft, draft.all_children()[..., 0].clamp(min=0))

    monkeypatch.setattr("polydraft.verify.node.greedy_verdict", first_child)
    arguments = ("certify", "decoder", "--target", tiny, "--draft", "early-exit:1", "--tree", "2", "--prompts", prompt_file)
    code, out, err = invoke(*arguments, *SMALL)
    assert code == 1 and "NOT CERTIFIED" in out and "counter-example" in out and "gap of their logits" in out
    assert err.splitlines()[-1].startswith("polydraft: error: decoder of ")


def test_the_reference_is_what_transformers_generates(reference: GreedyReference) -> None:
    output = reference.target.hf_model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 3), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    assert reference.continued(PROMPT, 16) == output[0, 3:].tolist()


def with_twin(reference: GreedyReference, limit: int) -> list[int]:
    """Go the other way at every tie."""
    text: list[int] = []
    while len(text) < limit:
        token = reference.continued(PROMPT + text, 1)[0]
        logits_V = next_logits(reference.target, PROMPT + text)
        text.append(TWIN if logits_V[token] == logits_V[TWIN] else token)
    return text


def test_a_near_tie_is_followed_and_an_error_behind_it_found(reference: GreedyReference) -> None:
    plain, twin = reference.continued(PROMPT, 16), with_twin(reference, 16)
    assert TWIN in twin[:-2] and TWIN not in plain, "the setup: the twins come up"
    assert reference.judge(PROMPT, plain, 16).likeness is Likeness.IDENTICAL
    judgement = reference.judge(PROMPT, twin, 16)
    assert judgement.likeness is Likeness.NEAR_TIE and judgement.near_ties == twin.count(TWIN)
    wrong = [*twin[:-1], (twin[-1] + 100) % 256]
    judgement = reference.judge(PROMPT, wrong, 16)
    assert judgement.likeness is Likeness.DIFFERENT and judgement.details is not None
    assert judgement.details["new token number"] == 15 and judgement.details["token"] == wrong[-1]
    assert judgement.details["gap of their logits"] > 1e-3


def test_a_text_that_ends_early_differs(reference: GreedyReference) -> None:
    judgement = reference.judge(PROMPT, reference.continued(PROMPT, 16)[:9], 16)
    assert judgement.likeness is Likeness.DIFFERENT
    assert judgement.details is not None and judgement.details["new token number"] == 9 and judgement.details["token"] is None


def test_texts_that_do_not_fit_the_context_are_refused(invoke, tiny: str, prompt_file: str) -> None:
    for count, expected in (("127", "does not fit after the longest prompt"), ("0", "--max-new-tokens 0")):
        arguments = ("certify", "decoder", "--target", tiny, "--draft", "none", "--prompts", prompt_file)
        code, out, err = invoke(*arguments, "--max-new-tokens", count)
        assert (code, out) == (2, "") and expected in err and err.count("\n") == 1


def test_only_hugging_face_targets_have_a_text_of_their_own() -> None:
    with pytest.raises(UsageError, match="is not a Hugging Face model"):
        certify_decoder(Decoder(TabularModel.random(4, 1, seed=1)), [])


def test_near_ties_are_told_from_errors_by_text_alone(reference: GreedyReference, tiny: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    judge, twin = TextJudge(reference, tokenizer), with_twin(reference, 16)
    assert judge.judge(PROMPT, tokenizer.decode(reference.continued(PROMPT, 16)), 16).likeness is Likeness.IDENTICAL
    assert judge.judge(PROMPT, tokenizer.decode(twin), 16).likeness is Likeness.NEAR_TIE
    judgement = judge.judge(PROMPT, tokenizer.decode([*twin[:10], 60, 61, 62]), 16)
    assert judgement.likeness is Likeness.DIFFERENT and judgement.near_ties >= 1


def test_a_text_that_ends_at_a_near_tie_with_the_end_of_text_is_followed(reference: GreedyReference, tiny: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    plain = reference.continued(PROMPT, 16)
    ended = GreedyReference(reference.target, [TWIN])  # the twin is an end of text that ties with a letter
    judge, place = TextJudge(ended, tokenizer), 4
    assert judge.judge(PROMPT, tokenizer.decode(plain[:place]), 16).likeness is Likeness.NEAR_TIE
    assert judge.judge(PROMPT, tokenizer.decode(plain[: place - 2]), 16).likeness is Likeness.DIFFERENT
