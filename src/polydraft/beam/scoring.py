"""Exact log-probabilities of texts that are there already."""

from collections.abc import Sequence

import torch

from polydraft.beam.node import Node
from polydraft.beam.result import ScoredText
from polydraft.beam.slots import SlotTree
from polydraft.engine import Generation
from polydraft.models import LanguageModel

_NODES_A_PASS = 256
_NODES_A_HEAD = 32
"""Rows of logits that are held at a time."""


@torch.inference_mode()
def text_log_probs(target: LanguageModel, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the target's log-probability of every token of texts that follow one prompt.

    The prompt is read once, and so is whatever several texts begin with.

    Parameters
    ----------
    target : LanguageModel
    prompt : sequence of int
        At least one token.
    texts : sequence of token-id lists
        New tokens.
    """
    context = target.start(1, len(prompt) + sum(map(len, texts)) + 1)
    context.prefill([prompt[:-1]])
    tree, root = SlotTree(context), Node(prompt[-1])
    paths = []
    for tokens in texts:
        path = [root]
        for token in tokens:
            path.append(path[-1].child(int(token)))
        paths.append(path)
    inner = list(dict.fromkeys(node for path in paths for node in path[:-1]))
    for start in range(0, len(inner), _NODES_A_PASS):
        tree.read(inner[start : start + _NODES_A_PASS])
    for start in range(0, len(inner), _NODES_A_HEAD):
        nodes = inner[start : start + _NODES_A_HEAD]
        log_probs_RV = target.head(tree.features(nodes)).float().log_softmax(-1)
        for row, node in enumerate(nodes):
            for child in node.children.values():
                child.log_prob = float(log_probs_RV[row, child.token])
    return [[node.log_prob for node in path[1:]] for path in paths]


def scored(target: LanguageModel, prompt: Sequence[int], generations: Sequence[Generation]) -> list[ScoredText]:
    """Return samples of one prompt with their log-probabilities, likeliest first."""
    log_probs = text_log_probs(target, prompt, [one.token_ids for one in generations])
    texts = [
        ScoredText(one.text, one.token_ids, values, one.sources, one.stop_reason)
        for one, values in zip(generations, log_probs, strict=True)
    ]
    return sorted(texts, key=lambda one: -one.log_prob)
