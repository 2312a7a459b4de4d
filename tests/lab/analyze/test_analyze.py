"""The command from prompts to figures."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covering import covering
from polydraft.engine import Decoder
from polydraft.models.hf import early_exit
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_seed
from polydraft.train.corpus import Texts
from polydraft.train.head_pupil import HeadPupil
from polydraft.train.pupils import Teacher
from polydraft.verify import SCHEMES, RejectionWithReplacement
from polydraft.verify.weights import normalised

from .conftest import DRAFTS, NEW_TOKENS, TEXTS

FIELDS = {"scheme", "drafts", "temperature", "acceptance", "standard_error", "optimum", "gap"}


def test_json_is_one_object_with_a_row_for_whatever_fits(analyze) -> None:
    code, out, err = analyze("--json", "--temperature", "0.6,1.0", "--drafts", "1,3", "--positions", "12")
    assert code == 0, err
    report = json.loads(out)
    rows = report["rows"]
    assert all(set(row) >= FIELDS for row in rows)
    expected = {
        (name, count, temperature)
        for name in SCHEMES
        for count in (1, 3)
        for temperature in (0.6, 1.0)
        if count <= (SCHEMES.get(name).max_children or count)
    }
    assert {(row["scheme"], row["drafts"], row["temperature"]) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert 0 <= row["acceptance"] <= 1 and 0 <= row["standard_error"] < 0.5
        assert row["optimum"] is not None, "every scheme of ours says how it draws"
        assert row["gap"] == pytest.approx(row["optimum"] - row["acceptance"], abs=1e-12)
        assert row["gap"] >= -4 * row["gap_standard_error"] - 1e-9
    assert [size["positions"] for size in report["samples"]] == [12, 12]
    assert report["settings"]["draft"] == "early-exit:2"


def test_optimal_schemes_attain_their_optimum_and_more_drafts_accept_more(analyze) -> None:
    names = "race,hybrid,greedy,spechub,top,rrs-wor"
    code, out, err = analyze("--json", "--temperature", "0.6", "--drafts", "1,2,4", "--schemes", names)
    assert code == 0, err
    rows = {(row["scheme"], row["drafts"]): row for row in json.loads(out)["rows"]}
    for name in ("race", "hybrid", "greedy", "top"):
        assert all(abs(rows[name, count]["gap"]) < 1e-4 for count in (1, 2, 4))
        assert rows[name, 1]["acceptance"] < rows[name, 2]["acceptance"] < rows[name, 4]["acceptance"]
    assert rows["spechub", 2]["acceptance"] == pytest.approx(rows["greedy", 2]["acceptance"], abs=1e-9)
    assert rows["rrs-wor", 4]["gap"] > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(("kind", "temperature", "draft_temperature"), covering(DRAFTS, [(0.6, None), (1.0, 0.5), (0.0, 1.0)]))
def test_speculative_acceptance_is_the_overlap_of_distributions_computed_otherwise(
    analyze,
    drafts: dict[str, str],
    loaded: Loaded,
    kind: str,
    temperature: float,
    draft_temperature: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYDRAFT_NATIVE", "0")  # with them heads are in int8; the code that trains them is not
    options = ["--json", "--schemes", "speculative", "--drafts", "1", "--temperature", str(temperature)]
    if draft_temperature is not None:
        options += ["--draft-temperature", str(draft_temperature)]
    code, out, err = analyze(*options, "--draft", drafts[kind], "--batch-size", "3")
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    overlaps = []
    for number, text in enumerate(TEXTS):
        decoder = Decoder(loaded.model, tokenizer=loaded.tokenizer, eos_token_ids=loaded.eos_token_ids)
        prompt = decoder.encode(text, chat=True)
        sampling, seed = SamplingParams(temperature=temperature), row_seed(0, number)
        answer = decoder.generate(prompt, sampling=sampling, max_new_tokens=NEW_TOKENS, seed=[seed]).token_ids
        tokens_1L = torch.tensor([[*prompt, *answer]])
        places = slice(len(prompt) - 1, -1)
        target_RV = distribution(loaded.model.hf_model(tokens_1L).logits[0, places], temperature)
        own = temperature if draft_temperature is None else draft_temperature
        draft_RV = reference_draft_distribution(kind, drafts[kind], loaded, tokens_1L, places, own)
        overlaps.append(torch.minimum(target_RV, draft_RV).sum(-1))
    assert json.loads(out)["samples"][0]["positions"] == sum(map(len, overlaps)), "few enough to take all of them"
    assert row["acceptance"] == pytest.approx(float(torch.cat(overlaps).mean()), abs=2e-5)
    assert row["gap"] == pytest.approx(0, abs=1e-12)


def distribution(logits_RV: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits_RV.argmax(-1), logits_RV.shape[-1]).double()
    return (logits_RV.double() / temperature).softmax(-1)


def reference_draft_distribution(
    kind: str, name: str, loaded: Loaded, tokens_1L: Tensor, places: slice, temperature: float
) -> Tensor:
    """The draft's distribution by transformers' own forward pass, or by the code that trains heads."""
    if kind == "early-exit":
        return distribution(early_exit(loaded.model, 2).hf_model(tokens_1L).logits[0, places], temperature)
    draft = load_draft(name, loaded)
    assert draft is not None and draft.vocabulary is not None
    if kind == "partial":
        logits_RD = draft.hf_model(tokens_1L).logits[0, places][:, draft.vocabulary.tokens_D]
    else:
        pupil = HeadPupil.__new__(HeadPupil)
        pupil.head, pupil.teacher = draft, Teacher(loaded.model, draft.vocabulary)
        answer_1L = torch.zeros(tokens_1L.shape, dtype=torch.bool)
        answer_1L[:, places.start + 1 :] = True
        logits_RD = pupil.logits(pupil.study(Texts(tokens_1L, answer_1L), 1).outputs[0][1])
    return draft.vocabulary.spread(distribution(logits_RD, temperature))


def test_a_scheme_of_ones_own_needs_no_optimum(analyze) -> None:
    class Mine(RejectionWithReplacement):
        """Draws in a way that nobody knows."""

        name = "mine"
        replacement = None

        def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
            return normalised(draft_probs_RV)

    with SCHEMES.holding("mine", Mine):
        code, out, err = analyze(
            "--json", "--temperature", "1", "--drafts", "2", "--schemes", "mine,rrs-wr", "--positions", "9"
        )
        table = analyze("--temperature", "1", "--drafts", "2", "--schemes", "mine,spechub", "--positions", "9")[1]
    assert code == 0, err
    mine, known = json.loads(out)["rows"]
    assert mine["optimum"] is mine["gap"] is mine["gap_standard_error"] is None
    assert abs(mine["acceptance"] - known["acceptance"]) < 0.1
    assert "other" in table and "mine" in table


def test_the_table_has_a_dash_where_a_scheme_takes_fewer(analyze) -> None:
    options = ("--temperature", "1", "--drafts", "2,4", "--schemes", "spechub,greedy,rrs-wor", "--positions", "6")
    code, out, err = analyze(*options, "--paper-bound")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    spechub = [line for line in lines if "spechub" in line]
    assert len(spechub) == 2 and spechub[0].count("-") == 0 and spechub[1].count("-") == 4
    assert "T=1" in out and "6 positions" in out and "paper's α*" in out and "paper's" not in analyze(*options)[1]
    distinct = next(line for line in lines if "rrs-wor" in line and "distinct" in line)
    assert 0 < float(distinct[-2]) < 1 and distinct[-1].startswith("±")


def test_paper_bound_is_a_field_only_if_asked_for(analyze) -> None:
    options = ("--json", "--temperature", "1", "--drafts", "2", "--schemes", "rrs-wor,race,top", "--positions", "6")
    plain = json.loads(analyze(*options)[1])["rows"]
    assert all("paper_bound" not in row for row in plain)
    rows = {row["scheme"]: row for row in json.loads(analyze(*options, "--paper-bound")[1])["rows"]}
    assert rows["race"]["paper_bound"] == rows["race"]["optimum"] and rows["top"]["paper_bound"] is None
    assert 0 < abs(rows["rrs-wor"]["paper_bound"] - rows["rrs-wor"]["optimum"]) < 0.1


def test_one_prompt_has_no_error_to_tell(analyze) -> None:
    code, out, err = analyze("--json", "--limit", "1", "--temperature", "1", "--drafts", "2", "--schemes", "race")
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    assert row["standard_error"] is None and row["gap_standard_error"] is None and row["acceptance"] > 0


def test_figures_do_not_depend_on_which_schemes_are_asked_for(analyze, tmp_path: Path) -> None:
    options = ("--json", "--temperature", "1", "--drafts", "3", "--positions", "8", "--out", str(tmp_path / "out"))
    alone = json.loads(analyze(*options, "--schemes", "rrs-wor")[1])["rows"]
    among = json.loads(analyze(*options, "--schemes", "kseq,hybrid,rrs-wor")[1])["rows"]
    assert alone[0] == among[2]
