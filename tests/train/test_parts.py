"""The pieces of training by themselves."""

import torch

from polydraft.models.loading import Loaded
from polydraft.sampling import NO_TOKEN, PartialVocabulary
from polydraft.schemes import RejectionWithoutReplacement
from polydraft.train.corpus import Writer, chat_form
from polydraft.train.pupils import TargetLaws, Teacher, acceptance_of, loss_of


def test_the_form_of_a_template_is_what_stands_between_the_turns(target: Loaded) -> None:
    form = chat_form(target.tokenizer)
    assert form is not None
    parts = [target.tokenizer.decode(part) for part in (form.opening, form.to_answer, form.to_user)]
    assert parts == ["<user>", "</><assistant>", "</><user>"]


def test_conversations_alternate_and_answers_are_marked(target: Loaded) -> None:
    form = chat_form(target.tokenizer)
    assert form is not None
    # The tiny model never ends a turn itself, so turns are cut at their limits, and bridges come whole.
    writer = Writer(target.model, form, target.eos_token_ids)
    length, user, answers = 60, 10, 40
    texts = writer.write([form.opening] * 2, length, False, torch.Generator().manual_seed(0), lambda rows: None)
    place, compared = len(form.opening), 0
    for row in range(2):
        tokens, answer = texts.tokens_NL[row].tolist(), texts.answer_NL[row].tolist()
        assert tokens[:place] == form.opening
        if not any(token in {form.to_answer[0], *target.eos_token_ids} for token in tokens[place : place + user]):
            begin = place + user + len(form.to_answer)
            assert tokens[place + user : begin] == form.to_answer
            assert answer[: begin + 5] == [False] * begin + [True] * 5
            assert sum(answer) <= answers
            compared += 1
    assert compared > 0, "no turn was cut at its limit"


def test_answers_to_prompts_end_where_the_target_ends_them(target: Loaded) -> None:
    form = chat_form(target.tokenizer)
    end = 65
    writer = Writer(target.model, form, [end])
    starts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    texts = writer.write(starts, 50, True, torch.Generator().manual_seed(1), lambda rows: None)
    for start, tokens_L, answer_L in zip(starts, texts.tokens_NL, texts.answer_NL, strict=True):
        assert tokens_L[: len(start)].tolist() == start
        assert not answer_L[: len(start)].any()
        marked = answer_L.nonzero()[:, 0]
        assert marked.tolist() == list(range(len(start), len(start) + len(marked)))
        assert len(marked) > 1 and end not in tokens_L[marked[:-1]].tolist()


def test_acceptance_is_that_of_the_schemes() -> None:
    generator = torch.Generator().manual_seed(0)
    target_RV = torch.randn(400, 6, generator=generator).softmax(-1)
    logits_RV = torch.randn(400, 6, generator=generator)
    known = [0, 2, 3, 5]
    laws = TargetLaws(target_RV[:, known], torch.tensor([known.index(t) if t in known else -1 for t in target_RV.argmax(-1)]))
    measured = acceptance_of(laws, logits_RV[:, known])
    draft_RV = torch.zeros(400, 6)
    draft_RV[:, known] = logits_RV[:, known].softmax(-1)
    assert abs(measured.sampled_1 - torch.minimum(target_RV, draft_RV).sum(-1).mean().item()) < 1e-6
    best_R, top_R = target_RV.argmax(-1), draft_RV.argmax(-1)
    assert measured.greedy_1 == (best_R == top_R).double().mean().item()
    # The whole support is drawn, so the mass on it is exact whatever the order.
    scheme = RejectionWithoutReplacement()
    children_RK = scheme.draw(draft_RV, torch.rand(400, 4, generator=generator, dtype=torch.float64))
    assert NO_TOKEN not in children_RK
    law_RV = scheme.law(target_RV, draft_RV, children_RK)
    assert abs(measured.sampled_4 - law_RV.gather(1, children_RK).sum(-1).mean().item()) < 0.02


def test_teacher_tells_short_laws_of_the_full_model(target: Loaded) -> None:
    known = PartialVocabulary(torch.tensor([3, 10, 200]), target.model.vocab_size)
    tokens_BL = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    teacher = Teacher(target.model, known)
    laws = teacher.laws(teacher.features(tokens_BL).flatten(0, 1))
    expected_RV = target.model.hf_model(tokens_BL).logits.softmax(-1).flatten(0, 1)
    torch.testing.assert_close(laws.probs_RD, expected_RV[:, known.tokens_D], rtol=1e-4, atol=1e-6)
    best_R = expected_RV.argmax(-1)
    assert [known.tokens_D[c].item() if c >= 0 else None for c in laws.best_R] == [
        int(token) if token in known.tokens_D else None for token in best_R
    ]


def test_losses_are_least_for_the_target_itself() -> None:
    probs_RD = torch.randn(50, 8, generator=torch.Generator().manual_seed(2)).softmax(-1)
    laws = TargetLaws(probs_RD, probs_RD.argmax(-1))
    for kind in ("kl", "tv", "kl+tv"):
        best = loss_of(kind, laws, probs_RD.log())
        assert loss_of(kind, laws, 0.9 * probs_RD.log()) > best
    assert abs(loss_of("tv", laws, probs_RD.log()).item()) < 1e-6


def test_a_partial_vocabulary_spreads_and_names() -> None:
    known = PartialVocabulary(torch.tensor([1, 4]), 6)
    assert known.spread(torch.tensor([[0.25, 0.75]])).tolist() == [[0, 0.25, 0, 0, 0.75, 0]]
    assert known.tokens(torch.tensor([[1, NO_TOKEN, 0]])).tolist() == [[4, NO_TOKEN, 1]]
