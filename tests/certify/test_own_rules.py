"""Rules that users bring along: what forms they may have, and what is said of those that are none."""

import json

import pytest

from covering import some_slow
from polydraft.certify import certify, find_subject
from polydraft.certify._node_trials import enumeration_trial
from polydraft.errors import UsageError

from .conftest import LEAST

WITH, WITHOUT = "with-replacement", "without-replacement"


FORMS = [
    ("right", WITH, "torch"),
    ("verify", WITH, "numpy"),
    ("verify_by_torch", WITHOUT, "torch"),
    ("top", "top", "numpy"),
    ("Own", None, "torch"),
    ("OwnWalk", None, "torch"),
]


# By default functions of one kind of arrays, distributions and tokens; wrong ones, below, have the other kind.
@pytest.mark.parametrize(
    ("name", "draws", "arrays"), some_slow(FORMS, [form for form in FORMS if form[1] and form[2] == "torch"])
)
def test_right_rules_of_every_form_are_certified(rules: str, name: str, draws: str | None, arrays: str) -> None:
    subject = find_subject(f"{rules}:{name}", draws, arrays)
    certificate = certify([subject], LEAST, power=False)
    assert certificate.certified, certificate.text()
    assert subject.kind in certificate.text()
    names = [check.name for check in certificate.checks]
    assert ("enumeration" in names) == subject.has_distribution == (not name.startswith("verify"))
    assert ("epsilon" in certificate.text()) == (not subject.has_distribution)


def test_the_same_rule_is_wrong_for_other_drawings(rules: str) -> None:
    trial = enumeration_trial(find_subject(f"{rules}:right", WITHOUT), LEAST)
    assert trial.worst is not None and trial.worst > 0.01 and trial.counter_example is not None


WRONG = {
    "without_residual": ("enumeration", "does not follow the target's distribution"),
    "verify_without_residual": ("cases", "sampled tokens"),
    "negative": ("enumeration", "is negative"),
    "not_a_number": ("enumeration", "is not a number"),
    "half": ("enumeration", "does not sum to one (0.5)"),
    "too_short": ("enumeration", "wrong shape: returned (1,), allowed: (2,)"),
    "nothing": ("enumeration", "wrong shape: returned NoneType"),
    "raises": ("enumeration", "raised RuntimeError: out of order"),
    "no_token": ("cases", "returned 0.5, allowed: a token"),
    "far_token": ("cases", "returned token 2, allowed: 0 to 1"),
    "NegativeDrawing": ("enumeration", "child_distribution is negative"),
    "WrongDtype": ("enumeration", "distribution is torch.float32"),
    "VerifiesOtherwise": ("fixture", "sampled tokens"),
    "ChangesDistributions": ("support", "changed in place"),
}


@pytest.mark.parametrize("name", some_slow(WRONG, ["verify_without_residual"]))  # its counter-example is looked at below
def test_wrong_rules_are_refused_by_name(invoke, least_sizes, rules: str, name: str) -> None:
    check, reason = WRONG[name]
    options = [] if name[0].isupper() else ["--draws", WITH]
    arrays = ["--arrays", "numpy"] if name.startswith("verify") else []
    code, out, err = invoke("certify", f"{rules}:{name}", *options, *arrays, "--quick", "--no-power", "--json")
    assert code == 1 and reason in err and err.splitlines()[-1].startswith("polydraft: error: ")
    result = json.loads(out)
    failed = [one for one in result["checks"] if not one["passed"]]
    assert not result["certified"] and failed[0]["name"] == check
    assert reason in failed[0]["counter_example"]["reason"]


def test_a_sampled_counter_example_is_one(rules: str) -> None:
    certificate = certify([find_subject(f"{rules}:verify_without_residual", WITH, "numpy")], LEAST, power=False)
    example = certificate.failures[0].counter_example
    assert example is not None and example.drafts == 1 and len(example.target_probs) == 2
    (first, second), draft = example.target_probs, example.draft_probs
    accepted = [min(target, share) for target, share in zip(example.target_probs, draft, strict=True)]
    expected = [share + (1 - sum(accepted)) * target for share, target in zip(accepted, (first, second), strict=True)]
    assert example.distribution == pytest.approx(expected, abs=0.05) and example.distance is not None and example.distance > 0.1


USAGE = {
    "unknown name": (["rrs-war"], "unknown scheme or walk 'rrs-war'; did you mean 'rrs-wr'?"),
    "unknown walk": (["rrs-wor+nodes"], "unknown walk 'nodes'; did you mean 'node'?"),
    "unknown scheme": (["race-buckted+node"], "did you mean 'race-bucketed'?"),
    "a walk that does not fit": (["rrs-wor+block"], "walk 'block' cannot verify"),
    "no name": ([], "name what to certify"),
    "names and all": (["naive", "--all"], "not both"),
    "draws of a scheme": (["naive", "--draws", "top"], "--draws top works only with your own function"),
    "unknown arrays": (["naive", "--arrays", "jax"], "unknown arrays 'jax'; allowed: numpy, torch"),
    "draws of all": (["--all", "--draws", "top"], "leave it out with --all"),
    "arrays of all": (["--all", "--arrays", "lists"], "--arrays lists works only with your own function"),
    "missing module": (["no_such_module:distribution"], "cannot import module 'no_such_module'"),
    "half a name": (["module:"], "does not name a rule"),
    "threads": (["naive", "--threads", "0"], "--threads 0"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(invoke, case: str) -> None:
    arguments, expected = USAGE[case]
    code, out, err = invoke("certify", *arguments)
    assert (code, out) == (2, "") and expected in err
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "draws", "expected"),
    [
        ("rigth", WITH, "did you mean 'right'?"),
        ("NUMBER", WITH, "is a int, which cannot be called"),
        ("right", None, "--draws with-replacement or"),
        ("right", "without-replacment", "did you mean 'without-replacement'?"),
        ("too_few", WITH, "takes 2 arguments"),
        ("Neither", None, "is not a subclass of polydraft's Scheme or Walk"),
        ("Choosy", None, "cannot create"),
        ("WithLaw", None, "has law.*, which is now called distribution.*; rename it$"),
        ("Own", "top", "--draws top works only with a function"),
    ],
)
def test_what_cannot_be_certified_is_refused(rules: str, name: str, draws: str | None, expected: str) -> None:
    with pytest.raises(UsageError, match="(?s)" + expected.replace("?", r"\?")):
        find_subject(f"{rules}:{name}", draws)


def test_a_function_by_its_former_name_is_told(rules: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "former_rules.py").write_text("def law(target_probs, draft_probs, children):\n    return target_probs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"^module 'former_rules' has law.*, which is now called distribution.*; rename it$"):
        find_subject("former_rules:distribution", WITH)
    assert find_subject("former_rules:law", WITH).has_distribution  # a function may have any name


def test_other_arrays_are_refused(rules: str) -> None:
    with pytest.raises(UsageError, match="unknown arrays 'jax'"):
        find_subject(f"{rules}:right", WITH, "jax")


def test_a_module_that_does_not_import_is_named(invoke, rules: str, tmp_path) -> None:
    (tmp_path / "broken_rules_module.py").write_text("1 / 0\n")
    code, _, err = invoke("certify", "broken_rules_module:distribution")
    assert code == 2 and "ZeroDivisionError: division by zero" in err and err.count("\n") == 1
