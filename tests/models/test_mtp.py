"""MTP layers compute here what transformers computes, are found among a target's weights, and bad ones are refused early."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import polydraft
from covering import keeping
from models.mtp_cases import HIDDEN, MTP_CASES, TOKENS, MtpParts, build, write
from polydraft import loading
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import FailureError, PolydraftError, UsageError
from polydraft.models.finding import check_draft_name
from polydraft.models.heads.head_folder import TargetSizes
from polydraft.models.heads.known import known_draft, shipped_layers
from polydraft.models.heads.mtp import MtpHead
from polydraft.models.heads.mtp_folder import load_mtp
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import SamplingParams
from polydraft.trees import causal_block, parse_tree

CLOSE = {"rtol": 0.0, "atol": 1e-4}
TEXT, STEPS = 12, 4
"""Entries whose features are known, longer than any window; steps of a chain below them."""
TEXTS = list(product(MTP_CASES, ["4x2x1", "chain:4"]))
QUICK = [("deepseek_v3", "4x2x1"), ("qwen3_5", "chain:4")]
"""Latent attention with experts, and a recurrent target; glm4_moe also has captured rounds and many texts, elsewhere."""


@pytest.fixture(params=MTP_CASES)
def parts(request: pytest.FixtureRequest) -> MtpParts:
    return build(MTP_CASES[request.param])


def loaded(parts: MtpParts, folder: Path) -> tuple[HFModel, MtpHead]:
    target = HFModel(parts.model, "target", native=False, trusted=True)
    return target, load_mtp(write(parts, folder), target, None, "theirs")


def features_and_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TEXT, HIDDEN, generator=generator), torch.randint(TOKENS, (TEXT + STEPS,), generator=generator)


def chain(head: MtpHead, features_EH: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
    """Return the logits of each step of a chain below the last entry whose features are known."""
    context = head.start(1, TEXT + STEPS)
    fused, tokens, logits = features_EH[None], tokens_E[None, :TEXT], []
    with torch.no_grad():
        for place in range(TEXT, TEXT + STEPS + 1):
            outputs = context.read(tokens, context.fused(fused), causal_block(*tokens.shape, head.device))[:, -1:]
            context.rewind([place])
            logits.append(head.head(outputs)[0, 0])
            fused, tokens = outputs, tokens_E[None, place : place + 1]
    return torch.stack(logits)


def test_each_step_of_a_chain_has_the_logits_of_the_layer_alone(parts: MtpParts, tmp_path: Path) -> None:
    _, head = loaded(parts, tmp_path)
    features, tokens = features_and_tokens()
    expected = parts.chain(features, tokens)
    torch.testing.assert_close(chain(head, features, tokens), expected, **CLOSE)
    assert (expected[1:] - expected[:-1]).abs().max() > 0.1


def swapped(head: MtpHead) -> None:
    """Read features where the token should be."""
    head.pair.features_first = not head.pair.features_first


def shifted(head: MtpHead) -> None:
    """Pair each token with the features one place too early."""
    head.pair.register_forward_pre_hook(lambda pair, _: setattr(pair, "features_BTH", pair.features_BTH.roll(1, 1)))


def without_norm(head: MtpHead) -> None:
    """Go on from the layer's output as it is before its final norm, as vLLM does."""
    norm, output = head.model.hf_model.base_model.norm, head.model.hf_model.get_output_embeddings()
    head.model.hf_model.base_model.norm = torch.nn.Identity()
    head.head = lambda outputs: output(norm(outputs))  # type: ignore[method-assign]


def norms_swapped(head: MtpHead) -> None:
    head.pair.token_norm, head.pair.feature_norm = head.pair.feature_norm, head.pair.token_norm


def same_features(head: MtpHead) -> None:
    """Let a chain go on from the target's last features instead of the layer's own outputs."""
    known: list[torch.Tensor] = []

    def hold(pair: torch.nn.Module, _: object) -> None:
        assert isinstance(head.pair.features_BTH, torch.Tensor)
        known.append(head.pair.features_BTH[:, -1:])
        if len(known) > 1:
            head.pair.features_BTH = known[0]

    head.pair.register_forward_pre_hook(hold)


RULES: list[Callable[[MtpHead], None]] = [swapped, shifted, without_norm, norms_swapped, same_features]
FIRST_STEP = {without_norm, same_features}
"""Of these the first step is right: no chain has been gone on with yet."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", keeping(list(MTP_CASES), "glm4_moe", "mimo"))
def test_wrong_rules_planted_on_purpose_are_caught(case: str, rule: Callable[[MtpHead], None], tmp_path: Path) -> None:
    parts = build(MTP_CASES[case])
    _, head = loaded(parts, tmp_path)
    features, tokens = features_and_tokens()
    rule(head)
    found, expected = chain(head, features, tokens), parts.chain(features, tokens)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.allclose(found[0], expected[0], **CLOSE) == (rule in FIRST_STEP)


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_each_step_has_the_logits_that_transformers_has(case: str, tmp_path: Path) -> None:
    parts = build(MTP_CASES[case])
    _, head = loaded(parts, tmp_path)
    main = type(parts.model).from_pretrained(tmp_path)
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]  # by which it tells MTP layers of published sizes
    theirs, cache = MtpModel.from_pretrained(main).eval(), MtpCache(config=main.config.get_mtp_config())
    features, tokens = features_and_tokens()
    hidden, read, expected = features[None], tokens[None, :TEXT], []
    places = torch.arange(1, TEXT + STEPS + 2)[None]
    with torch.no_grad():
        for step in range(STEPS + 1):
            start, stop = (0, TEXT) if step == 0 else (TEXT + step - 1, TEXT + step)
            hidden = theirs.forward_layer(0, hidden, places[:, start:stop], cache, input_ids=read)[:, -1:]
            expected.append(theirs._project_to_logits(hidden)[0, 0])
            read = tokens[None, TEXT + step : TEXT + step + 1]
    torch.testing.assert_close(chain(head, features, tokens), torch.stack(expected), **CLOSE)


@pytest.mark.parametrize("case, tree", keeping(TEXTS, *QUICK))
def test_greedy_texts_are_plain_ones_in_a_ragged_batch(tmp_path: Path, case: str, tree: str) -> None:
    # Of so few tokens, an untrained layer guesses some.
    target, head = loaded(build(MTP_CASES[case], vocab_size=10), tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 0, "sampling": SamplingParams(temperature=0.0)}
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 6, 4, 4, 7, 2, 9]]
    decoder, plain = Decoder(target, TreeDrafter(head, parse_tree(tree))), Decoder(target).generate(prompts, **options)
    together = decoder.generate(prompts, **options)
    assert [one.token_ids for one in together] == [one.token_ids for one in plain]
    assert together[0].stats.acceptance_rate > 0
    alone = [decoder.generate([prompt], **options)[0] for prompt in prompts]
    assert [one.token_ids for one in alone] == [one.token_ids for one in plain]


def words(folder: Path) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"w{number}": number for number in range(TOKENS)}, unk_token="w0"))
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("case", keeping(["glm4_moe", "mimo"], "mimo"))
def test_it_is_found_by_itself(case: str, tmp_path: Path, invoke: Callable[..., tuple[int, str, str]]) -> None:
    folder = write(build(MTP_CASES[case]), tmp_path)
    words(folder)
    assert known_draft(str(folder)) == "mtp" and shipped_layers(str(folder)) == (True, "MTP layers: 1")
    for draft in ("auto", "mtp", str(folder)):
        decoder = polydraft.load(str(folder), draft)
        assert isinstance(decoder.drafter.model, MtpHead) if isinstance(decoder.drafter, TreeDrafter) else False
    code, said, _ = invoke("info", "--target", str(folder))
    assert code == 0 and "mtp; MTP layers: 1" in said and "draft mtp" in said and "its checkpoint ships them" in said


def test_of_several_layers_the_first_drafts_which_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = build(MTP_CASES["glm4_moe"])
    folder = write(parts, tmp_path)
    weights = load_file(folder / "model.safetensors")
    first = "model.layers.3."
    second = {
        name.replace(first, "model.layers.4."): weight.flip(0).contiguous() for name, weight in weights.items() if first in name
    }
    save_file({**weights, **second}, folder / "model.safetensors", {"format": "pt"})
    assert shipped_layers(str(folder)) == (True, "MTP layers: 2, of which the first drafts")
    caplog.set_level("INFO", logger="polydraft")
    head = load_mtp(folder, HFModel(parts.model, "target", native=False, trusted=True), None, "theirs")
    assert "theirs has 2 MTP layers, of which the first drafts, at every depth" in caplog.text
    features, tokens = features_and_tokens()
    torch.testing.assert_close(chain(head, features, tokens), parts.chain(features, tokens), **CLOSE)


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    parts = build(MTP_CASES["qwen3_5"])
    folder = write(parts, tmp_path)
    weights = load_file(folder / "model.safetensors")
    (own := tmp_path / "layers").mkdir()
    save_file({name: weight for name, weight in weights.items() if "mtp" in name}, own / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3_5MTP"]}))
    assert known_draft(str(folder)) == str(own)
    target = HFModel(parts.model, "target", native=False)
    features, tokens = features_and_tokens()
    head = load_draft(str(own), Loaded(target, None, ()))
    assert isinstance(head, MtpHead)
    torch.testing.assert_close(chain(head, features, tokens), parts.chain(features, tokens), **CLOSE)


def test_tables_of_its_own(tmp_path: Path) -> None:
    parts = build(MTP_CASES["deepseek_v3"])
    target, head = loaded(parts, tmp_path)
    assert head.pair.embedding is target.hf_model.get_input_embeddings()
    assert head.body.get_output_embeddings() is target.hf_model.get_output_embeddings()
    assert all(weight.requires_grad for weight in target.hf_model.parameters()), "the target is its owner's"
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(0)
    weights["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"].flip(0)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    flipped = load_mtp(tmp_path, target, None, "theirs")
    features, tokens = features_and_tokens()
    expected = chain(head, features, TOKENS - 1 - tokens).flip(-1)
    torch.testing.assert_close(chain(flipped, features, tokens), expected, **CLOSE)


Change = Callable[[Path], object]


def weighted(**changes: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        theirs = {f"model.layers.3.{name.replace('__', '.')}.weight": weight for name, weight in changes.items()}
        weights = {**load_file(folder / "model.safetensors"), **theirs}
        kept = {name: weight for name, weight in weights.items() if weight is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return change


def without_layers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith("model.layers.3.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


def indexed(folder: Path) -> None:
    names = {name: "lost.safetensors" for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


BAD: dict[str, tuple[Change, type[PolydraftError], str]] = {
    "another size": (
        weighted(eh_proj=torch.zeros(16, 32)),
        UsageError,
        "shape of eh_proj is [16, 32], not [32, 64]",
    ),
    "another vocabulary": (weighted(shared_head__head=torch.zeros(9, HIDDEN)), UsageError, "[9, 32], not [96, 32]"),
    "a part missing": (weighted(hnorm=None), FailureError, "lack hnorm or"),
    "a tensor missing": (weighted(self_attn__o_proj=None), FailureError, "lack model.layers.0.self_attn.o_proj.weight"),
    "a tensor of another shape": (weighted(self_attn__o_proj=torch.zeros(3, 3)), FailureError, "in another shape"),
    "a tensor too many": (
        weighted(self_attn__extra=torch.zeros(3)),
        FailureError,
        "hold model.layers.0.self_attn.extra.weight",
    ),
    "promised, not there": (without_layers, UsageError, "config.json promises 1 MTP layers, but the weights hold none"),
    "pickled": (pickled, UsageError, "are pickled (pytorch_model.bin)"),
    "torn": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), FailureError, "cannot read the MTP layers"),
    "quantised": (quantised, UsageError, "quantised by fp8"),
    "a shard lost": (indexed, FailureError, "cannot read the MTP layers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_layers_are_refused_in_one_line_before_the_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    change, kind, message = BAD[case]
    change(write(build(MTP_CASES["glm4_moe"]), tmp_path))
    capfd.readouterr()
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(kind) as caught:
        polydraft.load(str(tmp_path), "mtp")
    assert message in str(caught.value) and "\n" not in str(caught.value) and not any(capfd.readouterr())
    # What cannot draft does not stand in the way of a target that was asked for without a draft.
    assert known_draft(str(tmp_path)) is None


def test_layers_on_a_hub_are_judged_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(MTP_CASES["glm4_moe"])
    indexed(write(parts, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    sizes = TargetSizes(name="org/model", config=parts.model.config)
    for place in ("heads.known", "finding"):
        monkeypatch.setattr(f"polydraft.models.{place}.checkpoint_folder", lambda name: tmp_path)
        monkeypatch.setattr(f"polydraft.models.{place}.target_sizes", lambda name: sizes)
    assert known_draft("org/model") == "mtp"
    check_draft_name("mtp", "org/model")
    sizes.config.quantization_config = {"quant_method": "fp8"}
    assert known_draft("org/model") is None and "quantised by fp8" in shipped_layers("org/model")[1]
    with pytest.raises(UsageError, match="quantised by fp8"):
        check_draft_name("mtp", "org/model")


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_layers_that_nobody_asked_for_do_not_stand_in_the_way_of_a_spread_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device_map: str | None
) -> None:
    caplog.set_level("INFO", logger="polydraft")
    words(write(build(MTP_CASES["mimo"]), tmp_path))
    monkeypatch.setattr("polydraft.models.hf.spread_obstacle", lambda model: "its layers are on several devices")
    decoder = polydraft.load(str(tmp_path), device_map=device_map)
    assert decoder.drafter.name == ("none" if device_map else "suffix")
    assert "has a head that cannot draft: MTP layers read the tables" in caplog.text
    for asked in ({"draft": "mtp"}, {"tree": "3x2"}):
        with pytest.raises(UsageError, match="its layers are on several devices; use a draft model"):
            polydraft.load(str(tmp_path), device_map=device_map, **asked)


def test_a_target_without_any(tmp_path: Path) -> None:
    model = build(MTP_CASES["mimo"]).model
    model.save_pretrained(tmp_path)
    sizes = TargetSizes(name="target", config=model.config)
    assert sizes.hidden_size == HIDDEN and shipped_layers(str(tmp_path)) == (False, "no MTP layers")
    for target in (str(tmp_path), "smollm2"):
        with pytest.raises(UsageError, match=r"has no MTP layers|is not a checkpoint with safetensors"):
            polydraft.load(target, "mtp")
