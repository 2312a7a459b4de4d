"""Whether a text is the right answer, as SQuAD, TriviaQA, Spider and GSM8K count it."""

import re
import string
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def is_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text is one of the answers.

    Where all answers are numbers, the last number of the text counts, as the solutions of GSM8K end with it. Otherwise the
    whole text does, without case, punctuation and articles, as in the evaluation script of SQuAD.
    """
    if all(_NUMBER.fullmatch(answer) for answer in answers):
        found = _NUMBER.findall(text)
        return bool(found) and _value(found[-1]) in map(_value, answers)
    return _normalised(text) in map(_normalised, answers)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _normalised(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
