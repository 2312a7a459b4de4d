"""Means over positions, with errors that know that positions of one text are alike."""

import math

import torch
from torch import Tensor


def clustered_mean(values_R: Tensor, cluster_R: Tensor) -> tuple[float, float | None]:
    """Return the mean of all values and its standard error over clusters.

    Parameters
    ----------
    values_R : Tensor
        One a position, float64.
    cluster_R : Tensor
        Which cluster each belongs to.

    Returns
    -------
    mean : float
    standard_error : float or None
        √(C/(C − 1) Σ_c (Σ_{i∈c} (x_i − mean))²)/R, the linearised error of a mean whose clusters differ in size; None with a
        single cluster, which tells nothing of others.
    """
    mean = float(values_R.mean())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(cluster_R.tolist()))}
    clusters = len(numbers)
    if clusters < 2:
        return mean, None
    index_R = torch.tensor([numbers[name] for name in cluster_R.tolist()])
    sums_C = torch.zeros(clusters, dtype=torch.float64).index_add_(0, index_R, values_R.double() - mean)
    return mean, math.sqrt(float(sums_C.square().sum()) * clusters / (clusters - 1)) / len(values_R)
