"""Assistants of Gemma 4 draft what they draft in transformers, inside the engine; those that do not fit are refused early."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import polydraft
from covering import some_slow
from exactness.test_admission import open_engine, sequence
from models.assistant_cases import CASES, FULL, SLIDING, TOKENS, build, chain, write
from models.test_mtp import words
from polydraft import loading
from polydraft.beam import BeamDecoder
from polydraft.draft import TreeDrafter
from polydraft.draft.head_source import HeadSource
from polydraft.engine import Decoder
from polydraft.errors import FailureError, PolydraftError, UsageError
from polydraft.models.heads.assistant import AssistantHead
from polydraft.models.heads.assistant_folder import check_assistant, load_assistant
from polydraft.models.heads.head_folder import TargetSizes
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.heads.known import known_draft
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

CLOSE = {"rtol": 0.0, "atol": 1e-4}
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 6, 4, 4, 7, 2, 9]]
"""One of a single token, and one longer than the window."""
NEW_TOKENS = 8
Drafted = list[tuple[list[int], list[int], torch.Tensor]]
"""Texts, tokens drafted below them, and the logits after these."""


def loaded(name: str, folder: Path, tokens: int = TOKENS) -> tuple[HFModel, AssistantHead]:
    model, assistant = build(name, tokens)
    assert kind_of(write(assistant, folder)) is HEAD_KINDS.get("assistant")
    target = HFModel(model, "target", native=False, trusted=True)
    return target, load_assistant(folder, target, None, "theirs")


def drafted(target: HFModel, head: AssistantHead, monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Generate ragged texts with a tree and return the logits of all its nodes, in all rounds."""
    found: Drafted = []
    root, expand = HeadSource.root, HeadSource.expand
    paths: list[list[list[int]]] = []

    def record(source: HeadSource, outputs: torch.Tensor) -> torch.Tensor:
        for row, text in enumerate(source._texts):
            if 1 < len(text) < len(PROMPTS[row]) + NEW_TOKENS:  # there is something to read, and more to come
                logits = source.logits(outputs)[row]
                found.extend((list(text), path, logits[node]) for node, path in enumerate(paths[row]))
        return outputs

    def noted_root(source: HeadSource, tail: torch.Tensor) -> torch.Tensor:
        paths[:] = [[[]] for _ in source._texts]
        return record(source, root(source, tail))

    def noted_expand(source: HeadSource, tokens: torch.Tensor, parents: torch.Tensor, block: Any) -> torch.Tensor:
        by_row = parents.expand(len(tokens), -1).tolist()
        paths[:] = [
            [[*paths[row][parent], token] for parent, token in zip(by_row[row], tokens[row].tolist(), strict=True)]
            for row in range(len(tokens))
        ]
        return record(source, expand(source, tokens, parents, block))

    monkeypatch.setattr(HeadSource, "root", noted_root)
    monkeypatch.setattr(HeadSource, "expand", noted_expand)
    sampling = SamplingParams(temperature=1.0)
    Decoder(target, TreeDrafter(head, parse_tree("2x2x1"))).generate(
        PROMPTS, max_new_tokens=NEW_TOKENS, seed=0, sampling=sampling
    )
    return found


def compare(name: str, found: Drafted) -> int:
    """Assert that these are the logits of transformers, and return how many chains were compared."""
    model, assistant = build(name)
    for text, path, logits in found:
        torch.testing.assert_close(logits, chain(model, assistant, text, path)[-1], **CLOSE)
    return len(found)


@pytest.mark.parametrize("name", some_slow(CASES, ["31B", "one shape"]))
def test_every_node_of_every_round_has_the_logits_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = loaded(name, tmp_path)
    assert compare(name, drafted(target, head, monkeypatch)) > 60


def shifted_place(head: AssistantHead) -> None:
    outputs = head.outputs
    head.outputs = lambda tokens, features, positions, *rest: outputs(tokens, features, positions - 1, *rest)  # type: ignore[method-assign]


def place_by_depth(head: AssistantHead) -> None:
    """Let candidates stand behind each other, as in other drafts: all of a level but the root one further."""
    outputs = head.outputs
    head.outputs = lambda tokens, features, positions, *rest: outputs(  # type: ignore[method-assign]
        tokens, features, positions + (tokens.shape[1] > 1), *rest
    )


def narrower_window(head: AssistantHead) -> None:
    head.text.sliding_window -= 1


def an_earlier_layer(head: AssistantHead) -> None:
    head.layers = {**head.layers, FULL: 1}


def features_alone(head: AssistantHead) -> None:
    outputs = head.outputs
    head.outputs = lambda tokens, features, *rest: outputs(tokens, torch.zeros_like(features), *rest)  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [shifted_place, place_by_depth, narrower_window, an_earlier_layer, features_alone])
def test_errors_planted_on_purpose_are_caught(
    plant: Callable[[AssistantHead], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = loaded("31B", tmp_path)
    plant(head)
    found = drafted(target, head, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare("31B", found)


@pytest.mark.parametrize("name", some_slow(CASES, ["12B", "E2B"]))  # whose logits are compared above
def test_greedy_texts_are_plain_ones(name: str, tmp_path: Path) -> None:
    tokens = 24  # of so few, an untrained assistant guesses some
    target, head = loaded(name, tmp_path, tokens)
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 0, "sampling": SamplingParams(temperature=0.0)}
    decoder, plain = Decoder(target, TreeDrafter(head, parse_tree("4x2x1"))), Decoder(target).generate(PROMPTS, **options)
    together = decoder.generate(PROMPTS, **options)
    assert [one.token_ids for one in together] == [one.token_ids for one in plain]
    assert sum(one.stats.acceptance_rate for one in together) > 0
    alone = [decoder.generate([prompt], **options)[0] for prompt in PROMPTS]
    assert [one.token_ids for one in alone] == [one.token_ids for one in plain]


@pytest.mark.parametrize("name", some_slow(["one shape", "31B"], ["one shape"]))
def test_a_shared_beginning_costs_no_acceptance(name: str, tmp_path: Path) -> None:
    """What an assistant reads of a beginning, it reads where the target keeps it, in layers of one shape or of several."""
    target, head = loaded(name, tmp_path, 24)
    decoder = Decoder(target, TreeDrafter(head, parse_tree("2x2")))
    stem = [3 + 5 * place % 17 for place in range(70)]
    found = []
    for engine in (open_engine(decoder, slots=2, reuse=True), open_engine(decoder, slots=2)):
        texts = [sequence(decoder, row, [*stem, 4, 9 + row], SamplingParams(), limit=20, seed=row) for row in range(3)]
        for one in texts:
            engine.add(one)
            while not engine.done:
                engine.step()
        found.append([(one.cached, one.new_tokens, one.speculation) for one in texts])
    assert [cached for cached, *_ in found[0]] == [0, 71, 71]
    assert [rest for _, *rest in found[0]] == [rest for _, *rest in found[1]]


def folders(tmp_path: Path, beside: str = "model-assistant") -> tuple[Path, Path]:
    """Write a target with a tokenizer, and its assistant."""
    model, assistant = build("E2B")
    (tmp_path / "model").mkdir()
    model.save_pretrained(tmp_path / "model")
    words(tmp_path / "model")
    return tmp_path / "model", write(assistant, tmp_path / beside)


@pytest.mark.parametrize("beside", some_slow(["model-assistant", "model/assistant"], ["model/assistant"]))
def test_it_is_found_by_itself(beside: str, tmp_path: Path, invoke: Callable[..., tuple[int, str, str]]) -> None:
    target, own = folders(tmp_path, beside)
    assert known_draft(str(target)) == str(own)
    for draft in ("auto", str(own)):
        decoder = polydraft.load(str(target), draft)
        assert isinstance(decoder.drafter, TreeDrafter) and isinstance(decoder.drafter.model, AssistantHead)
    assert decoder.generate("w3 w4 w5", max_new_tokens=5, seed=0).token_ids
    with pytest.raises(UsageError, match="has no cache of its own, as beams need"):
        BeamDecoder(decoder)
    code, said, _ = invoke("info", "--target", str(target))
    assert code == 0 and own.name in said


def weighted(**changes: torch.Tensor | None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        weights = {**load_file(folder / "model.safetensors"), **{name.replace("__", "."): w for name, w in changes.items()}}
        save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors", {"format": "pt"})

    return change


def configured(layers: bool = False, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (config["text_config"] if layers else config).update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.bin").write_bytes(b"anything")


BAD: dict[str, tuple[Callable[[Path], object], type[PolydraftError], str]] = {
    "another hidden size": (configured(backbone_hidden_size=16), UsageError, "hidden size of 16 and 96 tokens, but target"),
    "another vocabulary": (configured(layers=True, vocab_size=48), UsageError, "hidden size of 32 and 48 tokens, but target"),
    "other keys": (
        configured(layers=True, num_key_value_heads=1),
        UsageError,
        "reads 1 heads of size 16 in layers of type full",
    ),
    "no config": (configured(text_config=3), UsageError, "has no usable config.json"),
    "a tensor missing": (weighted(pre_projection__weight=None), FailureError, "pre_projection.weight is missing"),
    "a tensor of another shape": (weighted(model__norm__weight=torch.zeros(3)), FailureError, "has the shape [3]"),
    "a tensor too many": (weighted(extra=torch.zeros(3)), FailureError, "extra is not part of it"),
    "pickled": (pickled, UsageError, "are pickled (model.bin)"),
    "torn": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), FailureError, "cannot read the weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ones_are_refused_in_one_line_before_the_target_is_loaded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, kind, message = BAD[case]
    target, own = folders(tmp_path)
    change(own)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(kind) as caught:
        polydraft.load(str(target), str(own))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert known_draft(str(target)) is None


def test_one_that_is_loaded_already_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="a Gemma 4 assistant given as an object; pass its folder"):
        polydraft.load(*build("31B"))


def test_other_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, own = folders(tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(UsageError, match="a Gemma 4, but target 'smollm2' is of type 'llama'"):
        polydraft.load("smollm2", str(own))
    config = AutoConfig.from_pretrained(target)
    config.layer_types = [FULL] * len(config.layer_types)
    with pytest.raises(UsageError, match=f"2 heads of size 8 in layers of type {SLIDING}, but target 'other' has none"):
        check_assistant(own, TargetSizes(name="other", config=config), "theirs")
