import io
import json

import pytest

SMALL = ["--max-new-tokens", "12", "--tree", "2x1", "--draft", "early-exit:1"]


def test_json_is_one_object_and_nothing_else(invoke, tiny: str) -> None:
    code, out, _ = invoke("generate", "hello", "--target", tiny, *SMALL, "--json", "--temperature", "1")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert set(result) >= {"text", "token_ids", "sources", "stats", "settings"}
    assert len(result["token_ids"]) == len(result["sources"]) == result["stats"]["new_tokens"]
    assert set(result["sources"]) <= {"target", "model"}
    wanted = {"new_tokens", "rounds", "tokens_per_pass", "acceptance_rate", "tokens_per_second", "seconds"}
    assert wanted <= set(result["stats"])
    assert set(result["stats"]["seconds"]) == {
        "prefill",
        "draft",
        "target",
        "verify",
        "commit",
        "graph",
        "total",
        "first_token",
    }
    assert result["settings"]["draft"] == "early-exit:1" and result["settings"]["scheme"] == "coupled"


def test_piped_output_is_the_text_alone(invoke, tiny: str) -> None:
    arguments = ("generate", "hello", "--target", tiny, *SMALL)
    _, expected, _ = invoke(*arguments, "--json")
    code, out, err = invoke(*arguments)
    assert code == 0
    assert out == json.loads(expected)["text"] + "\n"
    assert "tokens/s" in err and err.count("\n") == 1


def test_greedy_text_does_not_depend_on_tree_scheme_or_draft(invoke, tiny: str) -> None:
    base = ("generate", "hello", "--target", tiny, "--max-new-tokens", "16", "--json")
    texts = set()
    for options in (
        ["--draft", "none"],
        ["--draft", "early-exit:2", "--tree", "4x2x1"],
        ["--draft", "early-exit:1", "--tree", "chain:3", "--scheme", "speculative"],
        ["--draft", tiny, "--tree", "[[0],[1],[0,0]]", "--scheme", "naive", "--draft-temperature", "1"],
        ["--draft", "none", "--drafter", "self-draft+suffix", "--set", "branches=2"],
        ["--draft", "early-exit:1", "--drafter", "lookup+model", "--set", "ngram_nodes=8"],
    ):
        code, out, _ = invoke(*base, *options)
        assert code == 0
        texts.add(tuple(json.loads(out)["token_ids"]))
    assert len(texts) == 1


def test_same_seed_same_text_and_other_seed_other_text(invoke, tiny: str) -> None:
    def ids(seed: str) -> list[int]:
        arguments = ("generate", "hello", "--target", tiny, *SMALL, "--temperature", "1", "--seed", seed, "--json")
        return json.loads(invoke(*arguments)[1])["token_ids"]

    assert ids("1") == ids("1") != ids("2")


def test_compare_prints_a_table_and_states_identity(invoke, tiny: str) -> None:
    code, out, _ = invoke("generate", "hello", "--target", tiny, *SMALL, "--compare")
    assert code == 0
    for word in ("plain", "tokens/s", "speed-up", "tokens/pass", "identical"):
        assert word in out


def test_prompt_from_standard_input(invoke, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = invoke("generate", "hello", "--target", tiny, *SMALL)[1]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert invoke("generate", "-", "--target", tiny, *SMALL)[1] == expected


def test_stop_string_ends_the_text_before_it(invoke, tiny: str) -> None:
    arguments = ("generate", "hello", "--target", tiny, "--max-new-tokens", "30", "--tree", "2x1", "--draft", "early-exit:2")
    whole = json.loads(invoke(*arguments, "--json")[1])["text"]
    stop = whole[3:5]
    stopped = json.loads(invoke(*arguments, "--json", "--stop", stop)[1])
    assert stopped["text"] == whole[: whole.index(stop)]
    assert stopped["stop_reason"] == "stop"


def test_raw_leaves_the_chat_template_out(invoke, tiny: str) -> None:
    chatty = invoke("generate", "hello", "--target", tiny, *SMALL)[1]
    assert invoke("generate", "hello", "--target", tiny, *SMALL, "--raw")[1] != chatty


def test_ngrams_are_counted_by_source(invoke, tiny: str) -> None:
    arguments = ("generate", "ab ab ab ab ab", "--target", tiny, "--raw", "--drafter", "lookup", "--max-new-tokens", "8")
    # A logit bias is not at hand here, so penalties below 1 make the random model repeat its prompt.
    code, out, err = invoke(*arguments, "--repetition-penalty", "0.05")
    assert code == 0 and "; from lookup " in err
    code, out, _ = invoke(*arguments, "--repetition-penalty", "0.05", "--json")
    result = json.loads(out)
    assert result["stats"]["tokens_by_source"] == {"lookup": result["sources"].count("lookup")}
    assert result["settings"]["drafter"] == "lookup" and result["settings"]["walk"] == "node"


def test_a_text_follows_a_schema(roomy, invoke, tmp_path):
    file = tmp_path / "schema.json"
    properties = {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}}
    schema = {"type": "object", "properties": properties, "required": ["ok", "size"], "additionalProperties": False}
    file.write_text(json.dumps(schema))
    arguments = ["generate", "Hello", "--target", roomy, "--draft", "early-exit:1", "--tree", "2x1", "--temperature", "1"]
    code, out, err = invoke(*arguments, "--json", "--json-schema", str(file))
    assert code == 0, err
    assert sorted(json.loads(json.loads(out)["text"])) == ["ok", "size"]
    for text, message in (("[", "cannot read"), ("[]", "does not hold a JSON object"), ('{"type": "odd"}', "cannot be used")):
        file.write_text(text)
        code, _, err = invoke(*arguments, "--json-schema", str(file))
        assert code == 2 and message in err
    code, _, err = invoke(*arguments, "--json-schema", str(file), "--beams", "2")
    assert code == 2 and "for one text" in err


def test_a_prediction_changes_the_rounds_and_not_the_text(invoke, tiny: str, tmp_path) -> None:
    arguments = ("generate", "hello", "--target", tiny, "--draft", "none", "--max-new-tokens", "24", "--json")
    plain = json.loads(invoke(*arguments)[1])
    file = tmp_path / "expected.txt"
    file.write_text(plain["text"], encoding="utf-8")
    code, out, _ = invoke(*arguments, "--prediction", str(file))
    found = json.loads(out)
    assert code == 0 and found["text"] == plain["text"]
    assert "prediction" in found["sources"] and found["stats"]["rounds"] < plain["stats"]["rounds"]


def test_predictions_that_cannot_be_read_are_refused_in_a_line(invoke, tiny: str, tmp_path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name, said in (("missing", "No such file"), ("bytes", "invalid start byte")):
        code, _, err = invoke("generate", "hello", "--target", tiny, "--prediction", str(tmp_path / name))
        assert code == 2 and said in err and err.count("\n") == 1
    code, _, err = invoke("generate", "hello", "--target", tiny, "--prediction", str(tmp_path / "bytes"), "--beams", "2")
    assert code == 2 and "--prediction is for one text" in err
