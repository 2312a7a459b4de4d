"""The pieces of training by themselves."""

from pathlib import Path

import pytest
import torch

from polydraft.models.loading import Loaded
from polydraft.sampling import NO_TOKEN, PartialVocabulary
from polydraft.train import HeadSize
from polydraft.train.corpus import Corpus
from polydraft.train.objective import loss_of
from polydraft.train.pupils import Pupil, TargetDistributions, Teacher, acceptance_of
from polydraft.train.start import load_start
from polydraft.train.training import make_pupil
from polydraft.train.writer import Texts, Writer, chat_form
from polydraft.verify import RejectionWithoutReplacement
from polydraft.verify.hybrid import Hybrid

from .conftest import short


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
    length, user, answers = 60, 10, 30
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
    assert form is not None
    end, limit = 65, 25
    writer = Writer(target.model, form, [end])
    starts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    texts = writer.write(starts, 50, True, torch.Generator().manual_seed(1), lambda rows: None)
    ends = {end, form.to_answer[0], form.to_user[0]}
    for start, tokens_L, answer_L in zip(starts, texts.tokens_NL, texts.answer_NL, strict=True):
        tokens, place = tokens_L.tolist(), len(start)
        assert tokens[:place] == start
        assert not answer_L[:place].any()
        stop = next(at for at in range(place, 50) if tokens[at] in ends or at == place + limit - 1) + 1
        assert answer_L[place:stop].all()
        # The user goes on, by way of what stands between an answer and the next turn.
        bridge = form.to_user[1:] if tokens[stop - 1] in ends else form.to_user
        assert tokens[stop : stop + len(bridge)] == bridge[: 50 - stop]
        assert not answer_L[stop : stop + len(bridge)].any()


def test_rows_of_different_beginnings_are_written_as_if_alone(target: Loaded) -> None:
    """At temperature 0 nothing is left to chance, and all rows get that one here."""
    writer = Writer(target.model, None, [])
    writer._temperatures_X.zero_()
    starts = [[1, 2, 3], [9], [4, 5, 6, 7, 8], [9, 3]]
    noise = torch.Generator().manual_seed(0)
    together = writer.write_all(starts, 20, 3, noise, lambda rows: None)
    for row, start in enumerate(starts):
        alone = writer.write([start], 20, False, noise, lambda rows: None)
        assert together.tokens_NL[row].tolist() == alone.tokens_NL[0].tolist()
        assert together.answer_NL[row].tolist() == [False] * len(start) + [True] * (20 - len(start))


def test_prompts_read_in_parts_leave_the_same(target: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.train.writer._PREFILL_TOKENS", 8)
    test_rows_of_different_beginnings_are_written_as_if_alone(target)


def test_batches_go_through_all_texts_of_all_lengths() -> None:
    def texts(rows: int, length: int, first: int) -> Texts:
        tokens_NL = torch.arange(first, first + rows)[:, None].expand(rows, length)
        return Texts(tokens_NL, torch.ones(rows, length, dtype=torch.bool))

    corpus = Corpus((texts(41, 8, 0), texts(11, 16, 100)), "somewhere")
    held_out = {0, 1, 100}
    for epoch in range(2):
        seen = []
        for step in range(14 * epoch, 14 * (epoch + 1)):
            batch = corpus.batch(step, 4, seed=3).tokens_NL
            assert batch.shape in {(4, 8), (2, 16)}
            seen += batch[:, 0].tolist()
        # 39 texts of the first length are 9 batches of 4, and 10 of the second 5 of 2.
        assert len(seen) == len(set(seen)) == 46
        assert not held_out & set(seen)


def test_acceptance_is_that_of_the_schemes() -> None:
    generator = torch.Generator().manual_seed(0)
    target_RV = torch.randn(400, 6, generator=generator).softmax(-1)
    logits_RV = torch.randn(400, 6, generator=generator)
    known = [0, 2, 3, 5]
    distributions = TargetDistributions(
        target_RV[:, known], torch.tensor([known.index(t) if t in known else -1 for t in target_RV.argmax(-1)])
    )
    measured = acceptance_of(distributions, logits_RV[:, known])
    draft_RV = torch.zeros(400, 6)
    draft_RV[:, known] = logits_RV[:, known].softmax(-1)
    assert abs(measured.sampled_1 - torch.minimum(target_RV, draft_RV).sum(-1).mean().item()) < 1e-6
    best_R, top_R = target_RV.argmax(-1), draft_RV.argmax(-1)
    assert measured.greedy_1 == (best_R == top_R).double().mean().item()
    # The whole support is drawn, so the mass on it is exact whatever the order.
    scheme = RejectionWithoutReplacement()
    children_RK = scheme.draw(draft_RV, torch.rand(400, 4, generator=generator, dtype=torch.float64))
    assert NO_TOKEN not in children_RK
    distribution_RV = scheme.distribution(target_RV, draft_RV, children_RK)
    assert abs(measured.sampled_4 - distribution_RV.gather(1, children_RK).sum(-1).mean().item()) < 0.02


def test_teacher_tells_short_distributions_of_the_full_model(target: Loaded) -> None:
    known = PartialVocabulary(torch.tensor([3, 10, 200]), target.model.vocab_size)
    tokens_BL = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    teacher = Teacher(target.model, known)
    distributions = teacher.distributions(teacher.features(tokens_BL).flatten(0, 1))
    expected_RV = target.model.hf_model(tokens_BL).logits.softmax(-1).flatten(0, 1)
    torch.testing.assert_close(distributions.probs_RD, expected_RV[:, known.tokens_D], rtol=1e-4, atol=1e-6)
    best_R = expected_RV.argmax(-1)
    assert [known.tokens_D[c].item() if c >= 0 else None for c in distributions.best_R] == [
        int(token) if token in known.tokens_D else None for token in best_R
    ]


def answers(pupil: Pupil, texts: Texts) -> list[torch.Tensor]:
    """Logits at two depths of drafting."""
    return [pupil.logits(outputs_RH) for _, outputs_RH in pupil.study(texts, 2).outputs]


@pytest.mark.parametrize("mlp_size", [32, 48])
def test_a_head_goes_on_where_another_stopped(mlp_size: int, target: Loaded, tmp_path: Path) -> None:
    """With more units in its MLP and a layer that the other did not read, it says the same until it is trained."""
    generator = torch.Generator().manual_seed(0)
    tokens_NL = torch.randint(0, 200, (8, 24), generator=generator)
    texts = Texts(tokens_NL, torch.ones_like(tokens_NL, dtype=torch.bool))
    corpus = Corpus((texts,), "nowhere")
    first = make_pupil(short("head", vocabulary=100), target, corpus)
    first.prime(texts)
    for parameter in first.module.parameters():  # as they are written
        parameter.data = parameter.data.bfloat16().float()
    first.export(tmp_path, {})
    size = HeadSize(taps=(1, 2), rollouts=2, mlp_size=mlp_size)
    wider = short("head", vocabulary=100, size=size, start=str(tmp_path))
    second = make_pupil(wider, target, corpus, load_start(wider, target))
    untaught = answers(second, texts)[0]
    second.prime(texts)
    found = answers(second, texts)
    target.model.tap((1,))  # the two share their target
    expected = answers(first, texts)
    for found_RD, expected_RD in zip(found, expected, strict=True):
        torch.testing.assert_close(found_RD, expected_RD, rtol=1e-3, atol=1e-4)
    assert (untaught - expected[0]).abs().max() > 0.1


def random_distributions(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_RD = 2 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    target_RD = (logits_RD + torch.randn(rows, tokens, generator=generator, dtype=torch.float64)).softmax(-1)
    return target_RD * torch.linspace(0.7, 1, rows, dtype=torch.float64)[:, None], logits_RD


@pytest.mark.parametrize("candidates", [1, 2, 4])
@pytest.mark.parametrize("kind", ["kl", "tv", "kl+tv", "lk"])
def test_losses_are_least_for_the_target_itself(kind: str, candidates: int) -> None:
    probs_RD = torch.randn(50, 8, generator=torch.Generator().manual_seed(2)).softmax(-1)
    weights_R = torch.ones(50)
    best, accepted_R = loss_of(kind, probs_RD, probs_RD.log(), weights_R, candidates)
    assert loss_of(kind, probs_RD, 0.5 * probs_RD.log(), weights_R, candidates)[0] > best
    assert abs(accepted_R - 1).max() < 1e-5


@pytest.mark.parametrize("candidates", [1, 2, 4])
@pytest.mark.parametrize("kind", ["kl", "tv", "kl+tv", "lk"])
def test_gradients_of_losses_are_their_slopes(kind: str, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.train.objective._CHUNK_BYTES", 4 * 12 * 7)  # several rows at a time, but not all
    target_RD, logits_RD = random_distributions(20, 12, seed=5)
    weights_R = torch.linspace(0.1, 1, 20, dtype=torch.float64)
    logits_RD.requires_grad_()
    if kind == "lk":  # its shares are held fast, and so is what they are shares of
        monkeypatch.setattr("polydraft.train.objective._TRUST", 0.0)
    loss, _ = loss_of(kind, target_RD, logits_RD, weights_R, candidates)
    (gradient_RD,) = torch.autograd.grad(loss, logits_RD)
    direction_RD = torch.randn(logits_RD.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = 1e-6 * direction_RD
    with torch.no_grad():
        ahead, behind = (loss_of(kind, target_RD, logits_RD + sign * step, weights_R, candidates)[0] for sign in (1, -1))
    assert (ahead - behind).item() / 2e-6 == pytest.approx((gradient_RD * direction_RD).sum().item(), rel=1e-4)


@pytest.mark.parametrize("candidates", [1, 2, 4])
def test_the_acceptance_that_is_trained_is_that_of_hybrid(candidates: int) -> None:
    target_RD, logits_RD = random_distributions(300, 40, seed=7)
    _, accepted_R = loss_of("tv", target_RD, logits_RD, torch.ones(300, dtype=torch.float64), candidates)
    # What the draft does not know is one more token, which it never draws.
    target_RV = torch.cat([target_RD, 1 - target_RD.sum(-1, keepdim=True)], dim=-1)
    draft_RV = torch.nn.functional.pad(logits_RD.softmax(-1), (0, 1))
    children_RK = Hybrid().draw(draft_RV, torch.rand(300, candidates, dtype=torch.float64))
    assert children_RK.shape == (300, candidates)
    # One child is picked by r and accepted with chance Σ min(p, r), whatever was drawn.
    selected_RV = Hybrid().contest(target_RV, draft_RV, children_RK).distribution_RV
    expected_R = torch.minimum(target_RV, selected_RV).sum(-1)
    assert (accepted_R - expected_R).abs().mean() < 0.005
    assert (accepted_R - expected_R).abs().max() < 0.05


def test_a_partial_vocabulary_spreads_and_names() -> None:
    known = PartialVocabulary(torch.tensor([1, 4]), 6)
    assert known.spread(torch.tensor([[0.25, 0.75]])).tolist() == [[0, 0.25, 0, 0, 0.75, 0]]
    assert known.tokens(torch.tensor([[1, NO_TOKEN, 0]])).tolist() == [[4, NO_TOKEN, 1]]
