import json

import pytest
import torch

from polydraft import operations
from polydraft.draft import DRAFTERS
from polydraft.models import FAMILIES
from polydraft.verify import SCHEMES


def test_info_lists_everything_that_can_be_chosen(invoke) -> None:
    code, out, _ = invoke("info")
    assert code == 0
    for name in [*SCHEMES, *DRAFTERS, *FAMILIES, "smollm2", "torch", "cpu"]:
        assert name in out


@pytest.mark.parametrize(
    ("place", "dtype", "bundled", "own", "with_ngrams", "copy"),
    [
        ("cpu", torch.float32, "dynamic:8", "dynamic:8", "dynamic:8", "chain:4"),
        ("cpu", torch.bfloat16, "dynamic:64", "dynamic:64", "dynamic:64", "chain:3"),
        (
            "cuda",
            torch.bfloat16,
            "dynamic:32:6:fixed/load:4x2x1x1x1",
            "dynamic:64:7:fixed/load:4x2x1x1x1",
            "4x2x2x1x1",
            "load:2x1x1",
        ),
    ],
)
def test_info_says_which_trees_are_used_here(
    invoke,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    dtype: torch.dtype,
    bundled: str,
    own: str,
    with_ngrams: str,
    copy: str,
) -> None:
    for module in ("polydraft.loading", "polydraft.models.placement"):
        monkeypatch.setattr(f"{module}.resolve_device", lambda asked: torch.device(place))
        monkeypatch.setattr(f"{module}.resolve_dtype", lambda asked, place: dtype)
    code, out, _ = invoke("info", "--json")
    assert code == 0
    assert json.loads(out)["default trees"] == {
        "smollm2": f"draft smollm2-head, tree {bundled}",
        "your own pair": f"draft your draft, tree {own}",
        "n-grams too": f"draft your draft, tree {with_ngrams}, drafter lookup+model",
        "n-grams alone": "drafter lookup",
        "your model alone": f"draft int8, tree {copy}",
        "int8 model alone": "drafter suffix",
    }


@pytest.mark.parametrize(
    ("backends", "said"),
    [(("triton", "native"), "triton, native, reference"), (("native",), "native, reference"), ((), "reference")],
)
def test_info_says_which_backends_may_be_chosen(invoke, backends: tuple[str, ...], said: str) -> None:
    with operations.using(*backends):
        assert json.loads(invoke("info", "--json")[1])["machine"]["backends"] == said


def test_info_says_which_native_code_runs(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(invoke("info", "--json")[1])["machine"]["native code"]
    assert said.startswith(("prebuilt ", "compiled here: ", "none: "))
    monkeypatch.setenv("POLYDRAFT_NATIVE", "0")
    assert "native code      none: POLYDRAFT_NATIVE is 0" in invoke("info")[1]
    with operations.using("triton"):
        assert "none: the backend is switched off" in invoke("info")[1]


def test_info_as_json(invoke) -> None:
    code, out, _ = invoke("info", "--json")
    facts = json.loads(out)
    assert code == 0 and set(facts["schemes"]) == set(SCHEMES)
