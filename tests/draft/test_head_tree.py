"""A feature head inside the engine computes what it was trained to compute, round after round."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covering import some_slow
from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.draft.head_source import HeadSource
from polydraft.draft.policy import LONGEST_REST
from polydraft.draft.static_builder import StaticBuilder
from polydraft.engine import Decoder, Engine, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.lab.theory import Costs
from polydraft.models.heads.feature_head import TapNorm
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, PartialVocabulary, RowParams, SamplingParams
from polydraft.sampling.categorical import row_generator
from polydraft.train.corpus import Texts
from polydraft.train.head_pupil import HeadPupil
from polydraft.train.pupils import Teacher
from polydraft.trees import DynamicShape, parse_tree
from stand_in import head_shape

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 4, 22, 11, 6], [12, 40]]
DEPTH = 3


EAGLE3 = {"reads_last": False, "joins": False, "normed_output": False, "qkv_bias": True, "tap_norm": TapNorm.EACH}
QWEN3 = {"joins": False, "normed_residual": True, "query_key_norm": True, "tap_norm": TapNorm.ALL}


def target_and_head(lean: bool, taps: tuple[int, ...], **form: bool | TapNorm):
    model = FAMILIES.get("llama").build(seed=1).double().float()
    target = HFModel(model, lean=lean)
    shape = replace(head_shape(target, taps, mlp_size=48, window=12), **form)
    torch.manual_seed(2)
    vocabulary = PartialVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    head = new_head(shape, target, vocabulary, "test").requires_grad_(False)
    target.tap(taps)
    return target, head


class GraphCache:
    """Take down texts and logits of every level that is drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[tuple[list[list[int]], list[Tensor], list[Tensor]]] = []
        draw, build = StaticBuilder.draw, StaticBuilder.build
        logits: list[Tensor] = []

        def capture_draw(growth, level, logits_BGV, tokens_BN, uniforms_BU):
            logits.append(logits_BGV.clone())
            return draw(growth, level, logits_BGV, tokens_BN, uniforms_BU)

        def capture_build(builder, tail_B2, uniforms_BU):
            logits.clear()
            texts = [list(text) for text in builder.source._texts]
            tree = build(builder, tail_B2, uniforms_BU)
            self.rounds.append((texts, list(logits), [tree.tokens_BN.clone()]))
            return tree

        monkeypatch.setattr(StaticBuilder, "draw", capture_draw)
        monkeypatch.setattr(StaticBuilder, "build", capture_build)


def reference(target: HFModel, head, text: list[int], path: list[int], depth: int) -> Tensor:
    """Logits at `depth` below the end of `text`, by the code that trains heads."""
    pupil = HeadPupil.__new__(HeadPupil)
    pupil.head, pupil.teacher = head, Teacher(target, head.vocabulary)
    # The last token is never read: a lesson's last entry answers for the distribution before it.
    tokens_1L = torch.tensor([[*text, *path[:depth], 0]])
    answer_1L = torch.zeros(tokens_1L.shape, dtype=torch.bool)
    answer_1L[0, -1] = True
    _, outputs_1H = pupil.study(Texts(tokens_1L, answer_1L), depth + 1).outputs[depth]
    return pupil.logits(outputs_1H)[0]


FORMS = {
    "last": (True, (), {}),
    "tap": (True, (1,), {}),
    "taps": (False, (1, 2), {}),
    "EAGLE-3": (True, (1, 2), EAGLE3),
    "Qwen3": (False, (1,), QWEN3),
}


@pytest.mark.parametrize("form", some_slow(FORMS, ["tap", "taps"]))  # one tap and several are in the others
def test_every_level_of_every_round_is_what_training_computes(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    lean, taps, changes = FORMS[form]
    target, head = target_and_head(lean, taps, **changes)
    graphs = GraphCache(monkeypatch)
    decoder = Decoder(target, TreeDrafter(head, parse_tree(f"chain:{DEPTH}")))
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    results = decoder.generate(prompts, max_new_tokens=9, seed=0, sampling=SamplingParams(temperature=1.0))
    assert results[0].stats.drafted_tokens > 0, "nothing was accepted: rounds after acceptance are not tested"
    assert len(graphs.rounds) > 3
    compared = 0
    for texts, logits, (tokens_BN,) in graphs.rounds:
        for row, text in enumerate(texts):
            if len(text) >= len(prompts[row]) + 9:
                continue  # done: idles along
            for depth, logits_B1D in enumerate(logits):
                expected_D = reference(target, head, text, tokens_BN[row, 1:].tolist(), depth)
                torch.testing.assert_close(logits_B1D[row, 0], expected_D, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > 20


def test_a_tree_computes_along_each_of_its_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = target_and_head(True, (1,))
    graphs = GraphCache(monkeypatch)
    topology = parse_tree("2x2x1")
    Decoder(target, TreeDrafter(head, topology)).generate([PROMPTS[0], PROMPTS[2]], max_new_tokens=6, seed=3)
    texts, logits, (tokens_BN,) = graphs.rounds[1]
    for depth, level in enumerate(topology.levels[:-1]):
        for place, node in enumerate(level):
            path, ancestor = [], node
            while ancestor:
                path.append(ancestor)
                ancestor = topology.parents[ancestor]
            for row in range(2):
                tokens = tokens_BN[row, path[::-1]].tolist()
                expected_D = reference(target, head, texts[row], tokens, depth)
                torch.testing.assert_close(logits[depth][row, place], expected_D, rtol=1e-4, atol=1e-4)


def test_kept_memory_goes_on_where_the_text_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = target_and_head(True, (1,))
    decoder = Decoder(target, TreeDrafter(head, parse_tree("2x1")), eos_token_ids=(4,))
    first = decoder.generate(PROMPTS[2], max_new_tokens=7, seed=0, keep=True)
    longer = [*PROMPTS[2], *first.token_ids, 17, 23]
    graphs = GraphCache(monkeypatch)
    kept = decoder.generate(longer, max_new_tokens=8, seed=1, keep=True)
    held = graphs.rounds
    graphs.rounds = []
    fresh = Decoder(target, TreeDrafter(head, parse_tree("2x1"))).generate(longer, max_new_tokens=8, seed=1)
    assert kept.token_ids[:8] == fresh.token_ids[: len(kept.token_ids)]
    assert len(held) > 2 and len(graphs.rounds) >= len(held)
    for (texts, logits, _), (other_texts, other_logits, _) in zip(held, graphs.rounds, strict=False):
        assert texts == other_texts
        for one, other in zip(logits, other_logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_texts_of_one_token_are_drafted_for_too() -> None:
    target, head = target_and_head(True, (1,))
    greedy = SamplingParams(temperature=0)
    decoder = Decoder(target, TreeDrafter(head, parse_tree("3x2")))
    plain = Decoder(target)
    together = decoder.generate(PROMPTS, max_new_tokens=12, sampling=greedy)
    assert [result.token_ids for result in together] == [
        result.token_ids for result in plain.generate(PROMPTS, max_new_tokens=12, sampling=greedy)
    ]
    assert decoder.generate([[7], [8]], max_new_tokens=12, sampling=greedy)[0].token_ids == together[1].token_ids


def test_texts_may_come_while_all_others_rest() -> None:
    """No pass of the head then, for them or for others; entries wait, but never more of them than there is room for."""
    target, head = target_and_head(True, ())
    costs = Costs(draft_level=2.0, tree_pass=lambda nodes: 1.0 + 2.0 * (nodes - 1))  # drafting cannot pay
    drafter = TreeDrafter(head, DynamicShape(nodes=4, depth=2), costs=costs)
    greedy = SamplingParams(temperature=0)
    prompts = [[(7 * number + 3 * place) % 50 + 3 for place in range(4 + number)] for number in range(8)]
    engine = Engine(
        workspace=Workspace(target, drafter, RowParams((IDLE,) * 3)),
        prefixes=Prefixes(2**30),
        elastic=True,
    )
    roots, root = [], HeadSource.root
    for number, prompt in enumerate(prompts):
        limit = 110 if number == 0 else 20
        engine.add(TokenSequence(prompt=prompt, params=greedy, generator=row_generator(number), max_new_tokens=limit))
    sequences = list(engine.waiting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadSource, "root", lambda source, tail_B2: (roots.append(engine.stats.rounds), root(source, tail_B2))[1])
        while not engine.done:
            engine.step()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        expected = Decoder(target).generate(prompt, sampling=greedy, max_new_tokens=sequence.max_new_tokens)
        assert sequence.new_tokens == expected.token_ids
    gaps = [later - earlier for earlier, later in itertools.pairwise(roots)]
    assert engine.stats.rounds > 100 and max(gaps) <= LONGEST_REST + 1, "entries do not wait for ever"
    assert len(roots) < 12, "eight admissions alone ask for nothing"
