"""Dynamic trees as a GPU has them, on a CPU: of one size, so that rounds can be captured."""

from polydraft.draft import Builder, TreeDrafter
from polydraft.draft.shaped_builder import FixedBuilder
from polydraft.models import LanguageModel
from polydraft.sampling import RowParams
from polydraft.trees import DynamicShape


class FixedTrees(TreeDrafter):
    """Grow dynamic trees to their limits for any batch, where a GPU does so for one text."""

    def builder(self, params: RowParams, target: LanguageModel) -> Builder:
        shape = self.alone if self.alone is not None and len(params) == 1 and params.decided else self.topology
        if not isinstance(shape, DynamicShape):
            return super().builder(params, target)
        source = self.source(len(params))
        return FixedBuilder(source, shape, params, target.vocab_size, draft_temperature=self.draft_temperature)
