"""Attention from the tokens of a tree to their text, and a switch for torch's own attention kernels."""

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.devices import captures
from polydraft.operations import operation


@operation
def tree_attention(
    query_BHTC: Tensor,
    key_BHSC: Tensor,
    value_BHSC: Tensor,
    lengths_B: Tensor,
    visible_BTU: Tensor,
    scale: float,
    max_length: int,
    starts_BT: Tensor | None = None,
) -> Tensor:
    """Attend to the committed text and, through the tree's mask, to uncommitted places.

    Parameters
    ----------
    query_BHTC : Tensor
        Queries of T tree tokens; any strides, but adjacent channels.
    key_BHSC, value_BHSC : Tensor
        One layer of a `SlotCache`, already with the tokens' own keys and values. H divides the queries' number of heads
        (grouped-query attention). Slots past `lengths_B + U` may hold anything but NaN.
    lengths_B : Tensor
        Committed tokens per row, on the device.
    visible_BTU : Tensor
        Which uncommitted places (slots `lengths_B + u`) each token sees. Rows may be expanded.
    scale : float
        Factor for the products of queries and keys.
    max_length : int
        Most committed tokens of any row, now and in later replays of a capture.
    starts_BT : Tensor, optional
        First committed slot that each token sees (sliding windows); all slots if not given.

    Returns
    -------
    Tensor
        `[B, H, T, C]`; undefined for tokens that see nothing.
    """
    group = query_BHTC.shape[1] // key_BHSC.shape[1]
    mask_BTS = visible_slots(lengths_B, visible_BTU, key_BHSC.shape[2], starts_BT)
    return functional.scaled_dot_product_attention(
        query_BHTC,
        key_BHSC.repeat_interleave(group, dim=1),
        value_BHSC.repeat_interleave(group, dim=1),
        attn_mask=mask_BTS[:, None],
        scale=scale,
    )


def visible_slots(lengths_B: Tensor, visible_BTU: Tensor, count: int, starts_BT: Tensor | None = None) -> Tensor:
    """Return which of a cache's first `count` slots each token sees: committed text, and uncommitted places by the mask."""
    slot_S = torch.arange(count, device=lengths_B.device)
    place_BS, places = slot_S - lengths_B[:, None], visible_BTU.shape[2]
    inside_BS = (place_BS >= 0) & (place_BS < places)
    place_BTS = place_BS.clamp(0, places - 1)[:, None].expand(-1, visible_BTU.shape[1], -1)
    committed_BTS = (place_BS < 0)[:, None]
    if starts_BT is not None:
        committed_BTS = committed_BTS & (slot_S >= starts_BT[:, :, None])
    return committed_BTS | (inside_BS[:, None] & visible_BTU.gather(2, place_BTS))


class _WithoutPlans(AbstractContextManager[None]):
    """Turns cuDNN's attention off while any thread is inside; torch has one switch for all threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_WITHOUT_PLANS = _WithoutPlans()


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without cuDNN's attention, which takes 0.1 to 1.3 s to plan for every new length.

    Once planned, it takes within 10 % of the others' time to read a prompt (docs/log), and prompts come in all lengths.
    """
    return _WITHOUT_PLANS if captures(device) else nullcontext()
