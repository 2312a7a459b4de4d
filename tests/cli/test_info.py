import json

from polydraft.drafters import DRAFTERS
from polydraft.models import FAMILIES
from polydraft.schemes import SCHEMES


def test_info_lists_everything_that_can_be_chosen(invoke) -> None:
    code, out, _ = invoke("info")
    assert code == 0
    for name in [*SCHEMES, *DRAFTERS, *FAMILIES, "smollm2", "torch", "cpu"]:
        assert name in out


def test_info_as_json(invoke) -> None:
    code, out, _ = invoke("info", "--json")
    facts = json.loads(out)
    assert code == 0 and set(facts["schemes"]) == set(SCHEMES)
