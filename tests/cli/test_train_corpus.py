"""`polydraft train corpus-cache`, from files and from a model's own text."""

import gzip
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from polydraft.ngrams import CorpusCache, GramOptions, load_corpus, tokenizer_fingerprint

TEXT = "the cat sat on the mat; the cat sat on the hat. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def proposals(tiny: str, file: Path, words: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    memory = CorpusCache(GramOptions(corpus=file, fingerprint=tokenizer_fingerprint(tokenizer))).open()
    memory.read(tokenizer(words)["input_ids"])
    return [tokenizer.decode(tokens) for _, tokens in memory.matches(3, 6)]


def test_files_are_counted_and_found_again(invoke, tiny: str, text: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "more.txt.gz", tmp_path / "cache.grams"
    packed.write_bytes(gzip.compress(b"zebra stripes, zebra stripes"))
    code, said, _ = invoke("train", "corpus-cache", "--tokenizer", tiny, "--text", str(text), str(packed), "--out", str(out))
    assert code == 0 and str(out) in said and f"{len(TEXT) + 28:,} tokens" in said
    assert proposals(tiny, out, "the c")[0] == "at s"
    assert proposals(tiny, out, "zeb")[0] == "ra s"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.grams", "more.txt.gz", "text.txt"]


def test_sizes_are_kept(invoke, tiny: str, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.grams"
    options = ["--gram", "2", "--max-prefix", "5", "--max-bytes", "900", "--min-count", "3"]
    assert invoke("train", "corpus-cache", "--tokenizer", tiny, "--text", str(text), "--out", str(out), *options)[0] == 0
    assert 800 < out.stat().st_size <= 900
    trie = load_corpus(out, None)
    assert (trie.max_prefix, trie.gram, len(trie.level_sizes)) == (5, 2, 7)


def test_the_model_writes_its_own_text(invoke, tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "own.grams"
    options = ["--generate", "400", "--length", "40", "--sampling-rows", "5", "--device", "cpu"]
    code, _, errors = invoke("train", "corpus-cache", "--tokenizer", tiny, *options, "--out", str(out))
    assert code == 0, errors
    assert 300 < load_corpus(out, None).corpus_tokens <= 400  # what a text repeats is left out
    again = tmp_path / "again.grams"
    assert invoke("train", "corpus-cache", "--tokenizer", tiny, *options, "--out", str(again))[0] == 0
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "{absent}"], "no such file"),
        ([], "no text to count"),
        (["--text", "{text}", "--out", "{folder}"], "is a folder"),
        (["--text", "{text}", "--out", "{folder}/no/file"], "no folder"),
        (["--text", "{text}", "--tokenizer", "{folder}/no"], "no such folder"),
        (["--text", "{text}", "--tokenizer", "{folder}"], "cannot load tokenizer"),
        (["--text", "{text}", "--tokenizer", ""], "empty tokenizer name"),
        (["--text", "{empty}"], "corpus is empty"),
        (["--text", "{cut}"], "as gzipped text"),
        (["--text", "{text}", "--gram", "0"], "out of range"),
        (["--text", "{text}", "--max-prefix", "20"], "out of range"),
        (["--text", "{text}", "--max-bytes", "0"], "out of range"),
        (["--text", "{text}", "--max-bytes", "50"], "no n-gram"),
        (["--generate", "-1"], "out of range"),
        (["--generate", "100", "--length", "3"], "out of range"),
        (["--generate", "100", "--length", "9999"], "longer than the target's context"),
        (["--text", "{text}", "--threads", "0"], "out of range"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(invoke, tiny: str, text: Path, tmp_path: Path, arguments, message) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(TEXT.encode())[:-9])
    names = {"text": text, "folder": tmp_path, "absent": tmp_path / "absent", "empty": tmp_path / "empty.txt"}
    filled = [argument.format(**names, cut=tmp_path / "cut.txt.gz") for argument in arguments]
    usual = ["train", "corpus-cache", "--tokenizer", tiny, "--out", str(tmp_path / "out.grams")]
    code, _, errors = invoke(*usual, *filled)
    last = errors.strip().splitlines()[-1]
    assert code == 2 and message in last and last.startswith("polydraft: error: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut.txt.gz", "empty.txt", "text.txt"]


def test_a_foreign_cache_is_refused(invoke, tiny: str, other_vocabulary: str, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache.grams"
    assert invoke("train", "corpus-cache", "--tokenizer", tiny, "--text", str(text), "--out", str(out))[0] == 0
    arguments = ["generate", "x", "--target", other_vocabulary, "--drafter", "corpus", "--corpus", str(out)]
    code, _, errors = invoke(*arguments, "--max-new-tokens", "2")
    assert code == 2 and "another tokenizer" in errors
