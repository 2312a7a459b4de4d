"""Writing children into the nodes of a static tree: those that were drawn, or the likeliest of a level."""

from torch import Tensor

from polydraft.operations import operation
from polydraft.sampling import PartialVocabulary
from polydraft.sampling.warper import RANKED_NATS
from polydraft.verify import SCHEMES

_TOP = SCHEMES.get("top")()


@operation
def plant_columns(columns_BX: Tensor, nodes_GK: Tensor, tokens_BN: Tensor, vocabulary: PartialVocabulary | None) -> None:
    """Write the tokens of drawn columns into `tokens_BN`; `NO_TOKEN` stays.

    Parameters
    ----------
    columns_BX : Tensor
        Columns of the draft's distributions, for all of `nodes_GK` side by side.
    nodes_GK : Tensor
        The nodes' children, in draw order; 0 for none.
    tokens_BN : Tensor
        All tokens of the tree, written in place.
    vocabulary : PartialVocabulary, optional
        What the columns mean, where they are not all tokens.
    """
    tokens_BX = columns_BX if vocabulary is None else vocabulary.tokens(columns_BX)
    root_B1 = tokens_BN[:, :1].clone()
    tokens_BN.scatter_(1, nodes_GK.flatten().expand_as(tokens_BX), tokens_BX)
    tokens_BN[:, :1] = root_B1


@operation
def plant_largest(
    logits_BGV: Tensor,
    nodes_GK: Tensor,
    tokens_BN: Tensor,
    vocabulary: PartialVocabulary | None,
    vocab_size: int,
) -> None:
    """Write the tokens of the largest logits into `tokens_BN`, of equal ones the first; `NO_TOKEN` for what has no weight.

    They are what `top` draws from `Warper.ranking`, whose weights round differences away that kernels may keep.

    Parameters
    ----------
    logits_BGV : Tensor
        Of G nodes per row.
    nodes_GK, tokens_BN, vocabulary
        As for `plant_columns`.
    vocab_size : int
        The target's: columns beyond it are padding.
    """
    known_BGV = logits_BGV if vocabulary is not None else logits_BGV[..., :vocab_size]
    scores_RV = known_BGV.float().flatten(0, 1)
    weights_RV = (scores_RV - (scores_RV.amax(-1, keepdim=True) - RANKED_NATS)).clamp_(min=0)
    columns_RK = _TOP.draw(weights_RV, weights_RV.new_empty(len(weights_RV), nodes_GK.shape[1]))
    plant_columns.reference(columns_RK.view(len(tokens_BN), -1), nodes_GK, tokens_BN, vocabulary)
