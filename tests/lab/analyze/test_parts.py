"""The pieces by themselves."""

import math
import statistics
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import Tensor

from polydraft.lab.analyze._distributions import read
from polydraft.lab.analyze.comparison import (
    GREEDY,
    TOP,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    Mean,
    drawing_of,
)
from polydraft.lab.charts import Curve, line_chart
from polydraft.lab.estimate import Estimate
from polydraft.lab.theory import acceptance, hybrid_optimum, with_replacement_optimum
from polydraft.models.loading import Loaded, load_draft
from polydraft.verify import SCHEMES, Hybrid, Naive

SVG = "{http://www.w3.org/2000/svg}"


def test_the_error_of_equal_clusters_is_that_of_their_means() -> None:
    values_CX = torch.rand(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = Mean.of(values_CX.flatten(), torch.arange(7).repeat_interleave(5))
    assert mean.value == pytest.approx(float(values_CX.mean()))
    assert mean.standard_error == pytest.approx(float(values_CX.mean(1).std() / math.sqrt(7)))


def test_positions_of_one_prompt_count_less_than_as_many_prompts() -> None:
    values_R = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    prompts = torch.tensor([4, 4, 4, 9, 9, 9]), torch.arange(6)
    alike, apart = (Mean.of(values_R, prompt_R).standard_error for prompt_R in prompts)
    assert alike is not None and apart is not None and alike > 1.5 * apart
    single = Mean.of(values_R, torch.zeros(6, dtype=torch.long))
    assert (single.value, single.standard_error) == (0.5, None)


def test_contributions_of_two_figures_differ_by_those_of_their_difference() -> None:
    values_XR = torch.rand(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prompts_R = torch.tensor([3, 3, 3, 3, 1, 1, 7, 7, 7])
    one, other = (Mean.of(values_R, prompts_R).by_prompt for values_R in values_XR)
    gains = [a - b for a, b in zip(one, other, strict=True)]
    gain = Mean.of(values_XR[0] - values_XR[1], prompts_R)
    assert statistics.mean(gains) == pytest.approx(gain.value)
    assert statistics.stdev(gains) / math.sqrt(3) == pytest.approx(gain.standard_error)


def test_every_registered_scheme_has_the_optimum_of_its_drawing() -> None:
    expected = {
        "rrs-wr": WITH_REPLACEMENT, "speculative": WITH_REPLACEMENT, "kseq": WITH_REPLACEMENT, "race": WITH_REPLACEMENT,
        "race-bucketed": WITH_REPLACEMENT, "rrs-wor": WITHOUT_REPLACEMENT, 
        "naive": WITHOUT_REPLACEMENT, "greedy": GREEDY, "spechub": GREEDY, "top": TOP,
    }  # fmt: skip
    for name in SCHEMES:
        drawing = drawing_of(SCHEMES.get(name)())
        assert drawing is not None
        assert drawing.name == "hybrid" if name == "hybrid" else drawing is expected[name]


def test_hybrids_optimum_follows_its_own_threshold() -> None:
    generator = torch.Generator().manual_seed(1)
    target_RV, draft_RV = torch.randn(2, 20, 30, generator=generator).mul(2).softmax(-1).unbind(0)
    for scheme, certain in ((Hybrid(threshold=0.0), 3), (Hybrid(threshold=math.inf), 0)):
        drawing = drawing_of(scheme)
        assert drawing is not None
        torch.testing.assert_close(drawing.optimum(target_RV, draft_RV, 4), hybrid_optimum(target_RV, draft_RV, 4, certain))
    free = drawing_of(Hybrid(threshold=math.inf))
    assert free is not None
    torch.testing.assert_close(free.optimum(target_RV, draft_RV, 4), with_replacement_optimum(target_RV, draft_RV, 4))


def test_a_subclass_keeps_an_optimum_only_with_the_drawing() -> None:
    class Verifies(Naive):
        """Draws as naive does."""

    class Draws(Naive):
        """Draws otherwise, and does not say how."""

        def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
            return draft_probs_RV

    assert drawing_of(Verifies()) is WITHOUT_REPLACEMENT and drawing_of(Draws()) is None


@pytest.mark.parametrize("kind", ["early-exit", "head"])
def test_reading_side_by_side_in_pieces_is_reading_alone(
    loaded: Loaded, drafts: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = load_draft(drafts[kind], loaded)
    head = draft if kind == "head" else None
    texts = [[5, 9, 2, 7, 1, 30, 4, 22, 11], [7, 3, 8], [3, 3, 8, 1, 30, 4, 22, 11, 6, 12, 40, 2, 9, 9]]
    places = [[2, 5, 8], [], [3, 13]]
    alone = [read(loaded.model, [text], [rows], head) for text, rows in zip(texts, places, strict=True) if rows]
    monkeypatch.setattr("polydraft.models.language_model.PREFILL_CHUNK", 4)
    together = read(loaded.model, texts, places, head)
    torch.testing.assert_close(together[0], torch.cat([one[0] for one in alone]), rtol=1e-4, atol=1e-4)
    if kind == "head":
        assert together[1] is not None
        torch.testing.assert_close(together[1], torch.cat([one[1] for one in alone]), rtol=1e-4, atol=1e-4)


def test_a_chart_rises_with_its_figures() -> None:
    rising = [(0.5, 0.2), (1.0, Estimate(0.4, 0.35, 0.45)), (2.0, 0.7)]
    curves = [
        Curve("α* kind & co", "kind", [(0.5, 0.8)], best=True),
        Curve("a", "kind", rising),
        Curve("b", "other", rising),
    ]
    picture = ElementTree.fromstring(line_chart(curves, across="T", up="α"))
    lines = [line for line in picture.iter(f"{SVG}line") if line.get("class") == "curve kind-0 dash-0"]
    places = [(float(line.get("x1", "")), float(line.get("y1", ""))) for line in lines[:2]]
    assert len(lines) == 3, "two pieces and a line of the legend"
    assert places[0][0] < places[1][0] and places[0][1] > places[1][1]
    words = {text.text for text in picture.iter(f"{SVG}text")}
    assert len([line for line in picture.iter(f"{SVG}line") if line.get("class") == "thin kind-1"]) == 3, "a bar with its ends"
    assert {"α* kind & co", "a", "b", "kind", "other", "T", "α", "0.5", "1", "2"} <= words
    assert ElementTree.fromstring(line_chart([], across="T", up="α")).tag == f"{SVG}svg"


def test_of_equally_likely_tokens_the_optimum_keeps_those_that_the_scheme_does() -> None:
    generator = torch.Generator().manual_seed(2)
    target_RV = torch.softmax(2 * torch.randn(80, 9, generator=generator), -1)
    draft_RV = torch.softmax(torch.randn(80, 9, generator=generator), -1)
    draft_RV[torch.arange(80), torch.randint(9, (80,), generator=generator)] = draft_RV.amax(-1)
    draft_RV = draft_RV / draft_RV.sum(-1, keepdim=True)
    scheme = Hybrid(threshold=0.2, buckets=None)
    drawing = drawing_of(scheme)
    assert drawing is not None
    reached_R = acceptance(scheme, target_RV, draft_RV, 2, samples=4)
    torch.testing.assert_close(reached_R.value_R, drawing.optimum(target_RV, draft_RV, 2), rtol=0, atol=1e-6)
