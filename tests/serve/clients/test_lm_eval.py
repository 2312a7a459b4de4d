"""The evaluation harness: a server gives the scores and the texts of its own `hf` model."""

import json
import random

import pytest

from .conftest import needed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ITEMS = 20
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["{{{{first}}}}", "{{{{second}}}}"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITING = """
task: local_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{first}}}}"
generation_kwargs: {{until: ["\\n\\n", "e"], max_gen_toks: 24, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
WORDS = ("river", "mountain", "of", "the", "old", "green", "light", "under", "seven", "stones", "and", "a", "winter", "road")


@pytest.fixture
def tasks(tmp_path):
    chance, data = random.Random(8), tmp_path / "items.jsonl"

    def words(count: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(count))

    items = [
        {"question": f"{words(12)}:", "first": words(3), "second": words(4), "answer": number % 2} for number in range(ITEMS)
    ]
    data.write_text("\n".join(map(json.dumps, items)))
    for name, text in (("choice", CHOICE), ("writing", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    return tmp_path


def test_scores_and_texts_are_those_of_the_hf_model(shared, roomy, tasks, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    needed("datasets", "lm-eval[api]")
    lm_eval = needed("lm_eval", "lm-eval[api]")
    manager = needed("lm_eval.tasks", "lm-eval[api]").TaskManager(include_path=str(tasks), include_defaults=False)
    server = {
        "base_url": f"{shared.url}/v1/completions", "model": shared.service.model, "tokenizer": roomy, "max_length": 512,
        "tokenizer_backend": "huggingface",
    }  # fmt: skip
    own = {"pretrained": roomy, "dtype": "float32", "device": "cpu", "max_length": 512}
    options = {"tasks": ["local_choice", "local_writing"], "task_manager": manager, "bootstrap_iters": 0}
    theirs = lm_eval.simple_evaluate(model="hf", model_args=own, **options)
    ours = lm_eval.simple_evaluate(model="local-completions", model_args=server, **options)
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            assert ours["results"][task][name] == value, (task, name)
    answers = {name: result["samples"] for name, result in (("hf", theirs), ("server", ours))}
    pairs = list(zip(answers["hf"]["local_choice"], answers["server"]["local_choice"], strict=True))
    assert len(pairs) == ITEMS
    for one, other in pairs:
        for (expected,), (found,) in zip(one["resps"], other["resps"], strict=True):
            assert float(found[0]) == pytest.approx(float(expected[0]), abs=1e-3) and found[1] == expected[1]
    written = [[sample["resps"] for sample in one["local_writing"]] for one in answers.values()]
    assert len(written[0]) == ITEMS and written[0] == written[1]
