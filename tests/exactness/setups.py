"""Models, prompts and decoders of the end-to-end tests."""

from collections.abc import Sequence

import torch

from polydraft.drafters import DRAFTERS, Parts
from polydraft.engine import Decoder
from polydraft.models import FeatureHead, HeadShape, TabularModel
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.schemes import SCHEMES
from polydraft.trees import parse_tree

from .checks import FIXTURE_DRAFT_V, FIXTURE_TARGET_V

VOCABULARY = 32
_SHARPNESS = 2.5  # laws of about two nats: enough to reject, few enough cells to see it


def _echoing_model(seed: int) -> TabularModel:
    """Make a random table that likes to repeat its context, so that penalties have something to do.

    It looks three tokens back: drafting starts from two known ones, so only a third shows errors in a draft's memory.
    """
    generator = torch.Generator().manual_seed(seed)
    table_XXXV = _SHARPNESS * torch.randn([VOCABULARY] * 4, generator=generator)
    tokens_V = torch.arange(VOCABULARY)
    table_XXXV[:, :, tokens_V, tokens_V] += 3.0
    table_XXXV[:, tokens_V, :, tokens_V] += 3.0
    return TabularModel(table_XXXV)


TARGET = _echoing_model(seed=1)
DRAFT = TARGET.mixed_with(_echoing_model(seed=2), share=0.7)


def _random_head() -> FeatureHead:
    """Make a head over the table's features (its logits) that knows three quarters of the tokens, attention cut short."""
    shape = HeadShape(hidden_size=VOCABULARY, num_heads=2, num_key_heads=1, head_size=8, mlp_size=32, window=6)
    known = PartialVocabulary(torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 4 != 1], VOCABULARY)
    identity_VH = torch.eye(VOCABULARY)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return FeatureHead(shape, identity_VH, 2 * identity_VH, known).requires_grad_(False)


HEAD = _random_head()
_LAST = [14, 9, 3]
# The likeliest continuations are in the prompt, where the repetition penalty finds them.
PROMPT = [int(token) for token in TARGET.logits_after(_LAST).topk(3).indices] + _LAST
RAGGED_PROMPTS = [[4, 17], PROMPT, [30, 2, 2, 8, 11, 25, 6, 19]]

# The fixture's laws at every node: small effects of wrong verification show here first.
FIXTURE_TARGET = TabularModel(FIXTURE_TARGET_V.log().repeat(4, 1))
FIXTURE_DRAFT = TabularModel(FIXTURE_DRAFT_V.log().repeat(4, 1))

TREES = ["3x2x1", "chain:4", "fork:3x3", "[[0],[1],[2],[0,0],[0,1],[2,0],[0,0,0],[0,1,0],[0,1,1]]"]
PENALTIES = SamplingParams(repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.9)


def tree_for(scheme: str, wanted: str = "3x2x1") -> str:
    """Return the wanted tree, or a chain as deep where the scheme takes fewer children."""
    limit, topology = SCHEMES.get(scheme).max_children, parse_tree(wanted)
    return wanted if limit is None or topology.max_children <= limit else f"chain:{topology.depth}"


def make_decoder(
    *,
    scheme: str = "rrs-wor",
    walk: str = "node",
    tree: str = "3x2x1",
    drafter: str = "model",
    draft_temperature: float | None = None,
    target: TabularModel = TARGET,
    draft: TabularModel = DRAFT,
    eos_token_ids: Sequence[int] = (),
) -> Decoder:
    """Build a decoder from names alone, as a newly registered name would be."""
    proposer = HEAD if drafter == "head" else draft
    parts = Parts(target=target, draft=proposer, topology=parse_tree(tree), scheme=scheme, draft_temperature=draft_temperature)
    return Decoder(target, DRAFTERS.get(drafter)(parts), walk=walk, eos_token_ids=eos_token_ids)
