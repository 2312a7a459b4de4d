"""Slices of nodes are multiplied as one matrix."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from families import FAMILIES
from polydraft.models import HeadShape
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["target", "head"])
@pytest.mark.parametrize("rows", [1, 3])
def test_output_heads_multiply_slices_as_one_matrix(kind: str, rows: int) -> None:
    target = HFModel(FAMILIES.get("llama").build())
    shape = HeadShape(
        hidden_size=target.hidden_size, taps=(1,), num_heads=2, num_key_heads=1, head_size=16, mlp_size=32, window=16
    )
    known = PartialVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    model = target if kind == "target" else new_head(shape, target, known, "test")
    features = torch.randn(rows, 9, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Calls() as calls:
        logits = model.head(features[:, 2:6])
    assert "bmm" not in calls.names, calls.names
    torch.testing.assert_close(logits, model.head(features)[:, 2:6])
