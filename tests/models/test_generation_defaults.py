"""Checkpoints with settings of their own: followed where the caller says nothing, as `generate` does, unless told not to."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from polydraft.beam import BeamDecoder
from polydraft.engine import Decoder
from polydraft.loading import load
from polydraft.models.generation_defaults import GenerationDefaults
from polydraft.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = [72, 101, 108, 72, 101, 108, 72]
CONFIGS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated n-grams": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.1},
    "banned words": {"bad_words_ids": [[30], [31], [32, 33], [108, 72]], "suppress_tokens": list(range(100, 140))},
    "first tokens": {"begin_suppress_tokens": list(range(0, 250)), "min_new_tokens": 5, "repetition_penalty": 1.2},
    "biases": {"sequence_bias": [[[40], 6.0], [[40, 41], 9.0]], "repetition_penalty": 1.5},
    "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2},
    "other warpers": {"do_sample": True, "typical_p": 0.8, "top_k": 12, "repetition_penalty": 1.3},
}


@pytest.fixture
def saved(roomy: str, tmp_path: Path):
    """Return the folder of a model with settings of its own."""

    def save(**settings: Any) -> str:
        folder = tmp_path / "model"
        shutil.copytree(roomy, folder, dirs_exist_ok=True)
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return str(folder)

    return save


def loaded(folder: str, **options: Any) -> Decoder:
    return load(folder, **{"draft": "early-exit:1", "tree": "2x1", "device": "cpu", "dtype": "float32", **options})


def of_generate(decoder: Decoder, tokens: int = 40, **options: Any) -> list[int]:
    """Return what Hugging Face generates from the same model."""
    inputs = torch.tensor([PROMPT])
    options = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0, **options}
    output = decoder.target.hf_model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    return output[0, len(PROMPT) :].tolist()


def of_ours(decoder: Decoder, **options: Any) -> list[int]:
    result = decoder.generate(PROMPT, **{"sampling": GREEDY, "max_new_tokens": 40, **options})
    return result.token_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_that_of_generate(saved, name: str) -> None:
    decoder = loaded(saved(**CONFIGS[name]))
    expected = of_generate(decoder)
    assert of_ours(decoder) == expected
    plain = loaded(saved(**CONFIGS[name]), generation_config=False)
    assert plain.defaults is None and of_ours(plain) != expected, "the settings change nothing: the test shows nothing"


def test_beam_search_is_that_of_generate(saved) -> None:
    decoder = loaded(saved(repetition_penalty=1.6, suppress_tokens=list(range(100, 140)), do_sample=True, temperature=0.5))
    found = BeamDecoder(decoder).search(PROMPT, beams=3, max_new_tokens=15)
    assert found.best.token_ids == of_generate(decoder, 15, num_beams=3, length_penalty=1.0)


def test_what_the_caller_says_comes_first(saved) -> None:
    decoder = loaded(saved(**CONFIGS["sampling"], top_h=None))

    def effective(**said: Any) -> tuple[float, ...]:
        params = decoder.with_defaults(SamplingParams(**said), PROMPT)
        return params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty

    assert effective() == (0.6, 20, 0.9, 0.0, 1.2)
    assert effective(temperature=1.0) == (1.0, 20, 0.9, 0.0, 1.2)
    assert effective(temperature=0.8, top_p=1.0, min_p=0.1) == (0.8, 20, 1.0, 0.1, 1.2)
    assert effective(repetition_penalty=1.0, top_k=0) == (0.6, 0, 0.9, 0.0, 1.0)
    assert effective(temperature=0)[0] == 0 and effective(temperature=0)[-1] == 1.2
    biased = decoder.with_defaults(SamplingParams(logit_bias={5: 2.0}, presence_penalty=0.5), PROMPT)
    assert biased.logit_bias == {5: 2.0} and biased.presence_penalty == 0.5


def test_a_temperature_counts_only_where_texts_are_drawn(saved) -> None:
    decoder = loaded(saved(temperature=0.6, top_p=0.8))
    assert decoder.with_defaults(SamplingParams(), PROMPT).temperature == 1.0
    drawn = decoder.with_defaults(SamplingParams(temperature=0.9), PROMPT)
    assert (drawn.temperature, drawn.top_p) == (0.9, 0.8), "as generate(do_sample=True, temperature=0.9)"


def test_bans_of_single_tokens_need_no_processor(saved) -> None:
    """Processors work on the host: they would keep rounds of a GPU from being recorded."""
    params = loaded(saved(bad_words_ids=[[30], [31]], suppress_tokens=[7])).with_defaults(GREEDY, PROMPT)
    assert params.processors == () and set(params.logit_bias) == {7, 30, 31}


def test_one_line_says_what_is_followed_and_one_what_is_not(saved, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decoder = loaded(saved(**CONFIGS["sampling"], num_beams=4, penalty_alpha=0.6))
    lines = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert len(lines) == 2 and not any("\n" in line for line in lines)
    assert "repetition_penalty=1.2" in lines[0] and "temperature=0.6" in lines[0] and "--no-generation-config" in lines[0]
    assert "num_beams=4" in lines[1] and "penalty_alpha=0.6" in lines[1]
    assert decoder.defaults is not None and decoder.defaults.followed["top_k"] == 20
    caplog.clear()
    loaded(saved(**CONFIGS["sampling"]), generation_config=False)
    assert "generation_config" not in caplog.text


def test_a_checkpoint_without_settings_says_nothing(roomy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decoder = loaded(roomy)
    assert isinstance(decoder.defaults, GenerationDefaults) and not decoder.defaults
    assert decoder.with_defaults(GREEDY, PROMPT) is GREEDY and "generation_config" not in caplog.text


@pytest.mark.parametrize("flags", [[], ["--no-generation-config"], ["--repetition-penalty", "1"]])
def test_the_command_follows_unless_told(saved, invoke, flags: list[str]) -> None:
    folder = saved(**CONFIGS["sampling"])
    code, out, _ = invoke("generate", "Hello", "--target", folder, "--raw", "--json", "--device", "cpu", *flags)
    settings = json.loads(out)["settings"]
    assert code == 0 and settings["seed"] == 0
    found = [settings[name] for name in ("temperature", "top_k", "repetition_penalty")]
    assert found == ([0.0, 0, 1.0] if flags == ["--no-generation-config"] else [0.6, 20, 1.0 if flags else 1.2])
