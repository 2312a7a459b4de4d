"""Drafting that does not pay on a CPU is left, whoever drafts, unless its tree was asked for by name; what pays goes on."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from covering import all_slow, covering, keeping
from polydraft.draft import GramTreeOptions, costs
from polydraft.draft.model_source import ModelSource
from polydraft.engine import Decoder
from polydraft.hf_generate import Speculate
from polydraft.loading import load, resolved
from polydraft.options import LoadOptions
from polydraft.sampling import SamplingParams
from polydraft.trees import DraftTree

GREEDY = SamplingParams(temperature=0)
PROMPT = [7, 3, 9, 7, 3, 9, 7, 3]
LEVEL = 0.1
PERIOD = 12
DRAFTERS: dict[str, dict[str, Any]] = {
    "own draft": {"draft": "early-exit:1"},
    "own draft, its scheme": {"draft": "early-exit:1", "scheme": "rrs-wor"},
    "lookup": {"drafter": "lookup"},
    "suffix": {"drafter": "suffix"},
    "ngram": {"drafter": "ngram"},
    "self-draft": {"drafter": "self-draft"},
    "suffix beside a draft": {"draft": "early-exit:1", "drafter": "suffix+model"},
}
UNLIKE = ["own draft", "own draft, its scheme", "self-draft", "suffix beside a draft"]
"""One for each way to pause; the other n-grams pause as those of `self-draft` do."""
every_drafter = pytest.mark.parametrize("name", DRAFTERS)


class Meter:
    """What rounds cost on a machine of known costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(costs, "cache_root", lambda: folder)
        monkeypatch.setattr(costs, "_tables", {})
        self._patch, self.widths, self.levels = monkeypatch, list[int](), 0
        block = DraftTree.block

        def counted(tree: DraftTree) -> Any:
            self.widths.append(tree.tokens_BN.shape[1])
            return block(tree)

        monkeypatch.setattr(DraftTree, "block", counted)
        for part in ("root", "expand"):
            original = getattr(ModelSource, part)

            def passed(*inputs: Any, original: Any = original) -> Any:
                self.levels += 1
                return original(*inputs)

            monkeypatch.setattr(ModelSource, part, passed)

    def machine(self, per_token: float) -> None:
        """Let passes cost so much more for each further token."""
        sizes = (1, 4, 8, 16, 24, 32, 64)
        table = {
            "target": {str(size): 1 + per_token * (size - 1) for size in sizes},
            "level": {"tree": LEVEL},
            "draw": {"token": 1e-6},
            "host": {"root": 1e-6},
            "spread": 1.0,
        }
        self._patch.setattr(costs, "measure", lambda *_: dict(table))
        self.per_token = per_token

    @property
    def cost(self) -> float:
        return sum(1 + self.per_token * (width - 1) for width in self.widths) + LEVEL * self.levels


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Meter:
    return Meter(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def cycle(roomy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose greedy text goes round: its layers do nothing, so that its first ones are as good as all of them."""
    folder = tmp_path_factory.mktemp("cycle")
    shutil.copytree(roomy, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(roomy)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table_VH = torch.nn.functional.normalize(model.model.embed_tokens.weight)
        model.lm_head.weight.zero_()
        model.lm_head.weight[1 : PERIOD + 1] = table_VH[1 : PERIOD + 1].roll(1, 0)
    model.save_pretrained(folder)
    return str(folder)


def decoder_of(folder: str, **options: Any) -> Decoder:
    decoder = load(folder, device="cpu", dtype="float32", native=False, profile="none", **options)
    return decoder.replace(eos_token_ids=())


@pytest.fixture(scope="module")
def plain_text(cycle: str) -> list[int]:
    """What that model writes without a draft."""
    return decoder_of(cycle).generate(PROMPT, sampling=GREEDY, max_new_tokens=200).token_ids


@pytest.mark.parametrize(("name", "temperature"), [
    *covering(UNLIKE, [0.0, 1.0]),
    *all_slow([name for name in DRAFTERS if name not in UNLIKE], [0.0, 1.0]),
])  # fmt: skip
def test_drafting_that_does_not_pay_is_left(
    plain_text: list[int], meter: Meter, cycle: str, name: str, temperature: float
) -> None:
    meter.machine(per_token=1.0)  # a wide pass costs as much as its tokens do one by one
    decoder = decoder_of(cycle, **DRAFTERS[name])
    sampling = SamplingParams(temperature=temperature)
    result = decoder.generate(PROMPT, sampling=sampling, max_new_tokens=200, seed=1)
    # Trials of a static tree are as large as it is.
    least = 0.93 if "scheme" in name else 0.975
    assert len(result.token_ids) / meter.cost > least
    if temperature == 0:
        assert result.token_ids == plain_text


@pytest.mark.parametrize("name", keeping(["lookup", "suffix", "ngram"], "lookup"))  # one policy cuts the tries of all
def test_what_repeats_but_is_never_right_is_left(meter: Meter, roomy: str, name: str) -> None:
    meter.machine(per_token=0.25)  # where n-grams that hold would pay
    decoder = decoder_of(roomy, **DRAFTERS[name])
    # Every token has been seen before, and the next one hardly depends on it.
    prompt = [*range(200), *reversed(range(200))]
    result = decoder.generate(prompt, sampling=SamplingParams(), max_new_tokens=250, seed=3)
    assert any(width > 1 for width in meter.widths), "it tried"
    assert len(result.token_ids) / meter.cost > 0.96


@every_drafter
def test_drafting_that_pays_goes_on(meter: Meter, cycle: str, name: str) -> None:
    meter.machine(per_token=0.002)
    decoder = decoder_of(cycle, **DRAFTERS[name])
    # Greedy text of a tiny model repeats itself; in the prompt it has done so before.
    start = decoder.generate(PROMPT, sampling=GREEDY, max_new_tokens=150).token_ids
    del meter.widths[:]
    result = decoder.generate([*PROMPT, *start], sampling=GREEDY, max_new_tokens=100)
    assert sum(width > 1 for width in meter.widths) > 0.6 * len(meter.widths)
    assert result.stats.tokens_per_pass > 1.3


NAMED: dict[str, dict[str, Any]] = {
    "tree": {"draft": "early-exit:1", "tree": "2x1"},
    "sizes of n-grams": {"drafter": "suffix", "grams": GramTreeOptions(nodes=6)},
    "tree beside n-grams": {"draft": "early-exit:1", "drafter": "suffix+model", "tree": "2x1"},
}


@pytest.mark.parametrize("name", NAMED)
def test_what_was_named_is_kept_to(meter: Meter, cycle: str, name: str) -> None:
    meter.machine(per_token=1.0)
    decoder = decoder_of(cycle, **NAMED[name])
    decoder.generate(PROMPT, sampling=GREEDY, max_new_tokens=80)
    assert sum(width > 1 for width in meter.widths) > 0.6 * len(meter.widths)


@pytest.mark.parametrize(("ngrams", "per_token", "drafts"), covering([None, "suffix"], [(1.0, False), (0.002, True)]))
def test_speculate_has_the_same_default(meter: Meter, cycle: str, ngrams: str | None, per_token: float, drafts: bool) -> None:
    meter.machine(per_token)
    target = AutoModelForCausalLM.from_pretrained(cycle)
    speculate = Speculate(draft=target if ngrams is None else None, ngrams=ngrams)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 120, "pad_token_id": 0, "eos_token_id": None}
    inputs = torch.tensor([PROMPT])
    plain = target.generate(inputs, **options)
    assert torch.equal(target.generate(inputs, custom_generate=speculate, **options), plain)
    tokens = plain.shape[1] - inputs.shape[1]
    assert tokens / meter.cost > (1.3 if drafts else 0.97)


@pytest.mark.parametrize(("name", "busy"), covering(["own draft", "suffix"], [False, True]))
def test_rests_are_told_with_their_reason(
    meter: Meter, cycle: str, invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, busy: bool
) -> None:
    meter.machine(per_token=1.0)
    monkeypatch.setattr(costs, "_DISTURBED", 0.0 if busy else 2.0)
    flags = [text for option, value in DRAFTERS[name].items() for text in (f"--{option}", value)]
    shared = ["--target", cycle, "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "30", *flags]
    reason = "it would have taken more time than it was likely to save"
    code, _, err = invoke("generate", "abc", "--raw", *shared)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "rested" in line]
    assert line.startswith(f"drafting rested in 30 of 30 passes: {reason}") and busy == ("busy" in line)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nbcd\n")
    code, _, err = invoke("batch", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--raw", *shared)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "rested" in line]
    assert line.startswith(f"drafting rested in 60 of 60 passes: {reason}") and busy == ("busy" in line)
    stats = decoder_of(cycle, **DRAFTERS[name]).generate(PROMPT, sampling=GREEDY, max_new_tokens=20).stats
    assert stats.resting_passes == 20 and stats.rested_because is not None and stats.rested_because.startswith(reason)


def test_nobody_rests_who_does_not_draft_or_always_does(cycle: str) -> None:
    for options in ({"draft": "none"}, {"draft": "early-exit:1", "tree": "2x1"}):
        stats = decoder_of(cycle, **options).generate(PROMPT, sampling=GREEDY, max_new_tokens=20).stats
        assert stats.resting_passes == 0 and stats.rest_line is None


def test_a_draft_that_could_not_pay_is_not_begun_with(meter: Meter, cycle: str) -> None:
    meter.machine(per_token=1.0)
    options = {"sampling": GREEDY, "max_new_tokens": 80}
    stats = decoder_of(cycle, **DRAFTERS["own draft"]).generate(PROMPT, **options).stats
    assert meter.levels == 0 and stats.resting_passes == stats.rounds == 80
    # A tree that was asked for is tried now and then: its draft may be better than most.
    decoder_of(cycle, **DRAFTERS["own draft"], tree="dynamic:8").generate(PROMPT, **options)
    assert meter.levels > 0


def test_n_grams_that_find_nothing_say_so(roomy: str) -> None:
    decoder = decoder_of(roomy, drafter="suffix", grams=GramTreeOptions(nodes=6))
    line = decoder.generate([1, 2, 3], sampling=GREEDY, max_new_tokens=4).stats.rest_line
    assert line is not None and line.endswith("n-grams had nothing to propose that would pay")


def test_processes_that_share_a_model_time_nothing() -> None:
    shared = LoadOptions("org/model", "early-exit:1", device="cpu", dtype="float32", device_map="tp", profile="none")
    assert resolved(shared).tree == "chain:3"
    assert resolved(dataclasses.replace(shared, device_map=None)).tree == "dynamic:8"
