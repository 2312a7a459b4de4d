"""Block verification in C, on a CPU.

In torch a node takes hundreds of small operations, which cost more to call than to compute. Here the picks of a level are one
call, and the ends of all paths another. `polydraft.verify.block` describes what is computed.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from polydraft.backends.native.arguments import MOST_CHILDREN, End, Pick, addresses, working_memory
from polydraft.backends.native.build import library, loaded
from polydraft.backends.native.drawing import draw
from polydraft.devices import can_sync
from polydraft.operations import implements
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify.block import verify_block
from polydraft.verify.hybrid import Race, threshold_of
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import Fault, TargetDistribution, Verdict


def _supports(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> bool:
    """Whether `hybrid` or a bucketed race has drawn the trees; must not depend on anything in which rows differ."""
    if not can_sync(uniforms_BU) or not draft.distributions or draft.distribution_rows_BN is None or loaded() is None:
        return False
    return (
        threshold_of(scheme) is not None
        and isinstance(scheme, Race)
        and scheme.buckets is not None
        and draft.distributions[0].shape[-1] >= scheme.buckets  # with fewer columns, the reference sorts the buckets
        and draft.child_table_BNK.shape[-1] <= MOST_CHILDREN
        and draft.depth < MOST_CHILDREN
        and all(distribution.dtype == torch.float32 and distribution.stride(-1) == 1 for distribution in draft.distributions)
        and uniforms_BU.dtype == torch.float64
        and uniforms_BU.stride(1) == 1
    )


@implements(verify_block, "native", supports=_supports)
def _verify_block(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> Verdict:
    return _Walk(library(), scheme, draft, target_distribution, uniforms_BU, least_weight).run()


class _Walk:
    """One round's verification."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        scheme: Scheme,
        draft: DraftTree,
        target_distribution: TargetDistribution,
        uniforms_BU: Tensor,
        least_weight: float,
    ) -> None:
        assert isinstance(scheme, Race) and scheme.select_uniforms is not None and draft.distribution_rows_BN is not None
        self.kernels, self.draft, self.target_distribution, self.uniforms_BU = kernels, draft, target_distribution, uniforms_BU
        self.buckets, self.least_weight, self.threshold = scheme.buckets or 0, least_weight, threshold_of(scheme)
        self.numbers_per_level = scheme.select_uniforms
        self.tokens_BN, self.table_BNK = draft.tokens_BN.numpy(), draft.child_table_BNK.numpy()
        self.distribution_rows_BN, self.rows_B = draft.distribution_rows_BN.numpy(), np.arange(len(draft.tokens_BN))
        self.distributions: list[Tensor] = []
        """The target's distributions at each level."""
        self.tables: list[Tensor] = []
        """For each level: the target's mass and the picked children's distribution, by columns."""
        self.nodes = [0 * self.rows_B]
        self.weights = [np.ones(len(self.rows_B))]
        self.going: list[np.ndarray] = []
        self.masses: list[np.ndarray] = []
        self.offered: list[np.ndarray] = []
        self.fault_B = 0 * self.rows_B

    def run(self) -> Verdict:
        """Go down all rows in step, then draw where each stops."""
        path_BP = self.tokens_BN[:, :0]
        arrived_B = self.rows_B >= 0
        for level in range(self.draft.depth):
            node_B, weight_B = self.nodes[-1], self.weights[-1]
            nodes_BK, children_BK = self._children(node_B)
            picking_B = arrived_B & (weight_B >= self.least_weight) & (weight_B > 0) & self.offered[-1]
            if level and not picking_B.any():
                break
            self.distributions.append(self._distribution(node_B, path_BP))
            child_B, ratio_B = self._pick(level, node_B, nodes_BK, children_BK, arrived_B * 1 + picking_B)
            arrived_B = picking_B & (child_B != NO_TOKEN)
            self.going.append(arrived_B)
            self.weights.append(np.where(arrived_B, np.minimum(weight_B * ratio_B, 1.0), 0.0))
            node_B = np.where(arrived_B, child_B, node_B)
            self.nodes.append(node_B)
            token_B = np.where(arrived_B, self.tokens_BN[self.rows_B, node_B], NO_TOKEN)
            path_BP = np.concatenate([path_BP, token_B[:, None]], 1)
        else:
            self._children(self.nodes[-1])
        return self._verdict(*self._end(path_BP))

    def _children(self, node_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return node ids and tokens of the children of one node per row, and record whether there are any."""
        nodes_BK = self.table_BNK[self.rows_B, node_B]
        children_BK = np.where(nodes_BK > 0, np.take_along_axis(self.tokens_BN, nodes_BK, 1), NO_TOKEN)
        self.offered.append((children_BK != NO_TOKEN).any(-1))
        return nodes_BK, children_BK

    def _distribution(self, node_B: np.ndarray, path_BP: np.ndarray) -> Tensor:
        distribution_BV = self.target_distribution(torch.from_numpy(node_B), torch.from_numpy(path_BP))
        return distribution_BV.float().contiguous()

    def _pick(
        self, level: int, node_B: np.ndarray, nodes_BK: np.ndarray, children_BK: np.ndarray, state_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the picked child's node of every row, and p(x)/r(x)."""
        distribution_BGD, vocabulary, target_BV = self.draft.distributions[level], self.draft.vocabulary, self.distributions[-1]
        rows, columns = len(node_B), distribution_BGD.shape[-1] + (vocabulary is not None)
        table_2BX = torch.empty(2, rows, columns, dtype=torch.float64)
        group_B = np.minimum(self.distribution_rows_BN[self.rows_B, node_B], distribution_BGD.shape[1] - 1)
        offset_B = self.rows_B * distribution_BGD.stride(0) + group_B * distribution_BGD.stride(1)
        numbers_2B, wholes_2B = np.empty((2, rows)), np.empty((2, rows), np.int64)
        nodes_BK, children_BK = np.ascontiguousarray(nodes_BK), np.ascontiguousarray(children_BK)
        state_B = state_B.astype(np.uint8)
        memory = working_memory(self.kernels.polydraft_pick_memory(columns, self.buckets))
        known = (0, 0, 0) if vocabulary is None else vocabulary.addresses
        first_number = 8 * level * self.numbers_per_level
        self.kernels.polydraft_pick(
            Pick(
                target_BV.data_ptr(), distribution_BGD.data_ptr(), offset_B.ctypes.data, *known,
                children_BK.ctypes.data, nodes_BK.ctypes.data, self.uniforms_BU.data_ptr() + first_number, state_B.ctypes.data,
                table_2BX.data_ptr(), table_2BX[1].data_ptr(), numbers_2B.ctypes.data, numbers_2B[1:].ctypes.data,
                wholes_2B.ctypes.data, wholes_2B[1:].ctypes.data, memory,
                rows, target_BV.shape[1], distribution_BGD.shape[-1], columns, children_BK.shape[1], self.uniforms_BU.stride(0),
                self.buckets, self.threshold,
            )
        )  # fmt: skip
        self.tables.append(table_2BX)
        self.masses.append(numbers_2B[1])
        self.fault_B = np.where(self.fault_B, self.fault_B, wholes_2B[1])
        return wholes_2B[0], numbers_2B[0]

    def _end(self, path_BP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many tokens of each row's path are accepted, and the one that follows."""
        rows, levels, vocabulary = len(self.rows_B), len(self.distributions), self.draft.vocabulary
        weights_LB, masses_LB = np.stack(self.weights), np.stack(self.masses)
        going_LB = np.stack(self.going).astype(np.uint8)
        accepted_B, token_B = np.empty((2, rows), np.int64)
        lumped, distribution = addresses([table[0] for table in self.tables]), addresses([table[1] for table in self.tables])
        targets, size = addresses(self.distributions), self.distributions[0].shape[1]
        last_2 = self.uniforms_BU[:, -2:]
        self.kernels.polydraft_end(
            End(
                ctypes.addressof(lumped), ctypes.addressof(distribution), ctypes.addressof(targets),
                weights_LB.ctypes.data, masses_LB.ctypes.data, going_LB.ctypes.data,
                None if vocabulary is None else vocabulary.addresses[0], last_2.data_ptr(),
                working_memory(self.kernels.polydraft_draw_memory(size)),
                accepted_B.ctypes.data, token_B.ctypes.data,
                rows, levels, size, self.draft.distributions[0].shape[-1], self.tables[0].shape[-1], self.uniforms_BU.stride(0),
            )
        )  # fmt: skip
        whole_B = accepted_B == levels
        if whole_B.any():
            distribution_BV = self._distribution(self.nodes[-1], path_BP)
            token_B = np.where(whole_B, draw(distribution_BV, last_2[:, 1:])[:, 0].numpy(), token_B)
        return accepted_B, token_B

    def _verdict(self, stop_B: np.ndarray, token_B: np.ndarray) -> Verdict:
        depth, accepted_B1 = self.draft.depth, np.maximum(stop_B, 0)[:, None]
        # Entries beyond a path's end repeat its last node.
        nodes_BD = np.stack(self.nodes + self.nodes[-1:] * (depth + 1 - len(self.nodes)), 1)
        place_D = np.arange(depth + 1)
        path_BD = np.take_along_axis(nodes_BD, np.minimum(place_D, accepted_B1), 1)
        below_BD = np.concatenate([nodes_BD[:, 1:], 0 * accepted_B1], 1)
        tokens_BD = np.where(place_D == accepted_B1, token_B[:, None], np.take_along_axis(self.tokens_BN, below_BD, 1))
        offered_B = accepted_B1[:, 0] + np.stack(self.offered, 1)[self.rows_B, accepted_B1[:, 0]]
        unknown_B = (self.fault_B == Fault.NONE.value) & ((stop_B == NO_TOKEN) | (token_B == NO_TOKEN))
        fault_B = np.where(unknown_B, Fault.TARGET.value, self.fault_B)
        parts = (path_BD, accepted_B1[:, 0], tokens_BD, offered_B, fault_B)
        return Verdict(*(torch.from_numpy(part) for part in parts))
