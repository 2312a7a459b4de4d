"""The engine around a scheme and a walk that nobody need have registered."""

from dataclasses import dataclass

from polydraft.certify.subject import Subject
from polydraft.drafters import ModelTree
from polydraft.engine.run import Run
from polydraft.engine.workspace import Workspace
from polydraft.models import LanguageModel
from polydraft.sampling import RowParams, SamplingParams
from polydraft.sampling.noise import row_generator, row_seed
from polydraft.schemes import Scheme
from polydraft.trees import parse_tree
from polydraft.walks import AUTO, resolve_walk


def tree_for(scheme: Scheme | type[Scheme], wanted: str) -> str:
    """Return the wanted tree, or a chain as deep where the scheme takes fewer children."""
    limit, topology = scheme.max_children, parse_tree(wanted)
    return wanted if limit is None or topology.max_children <= limit else f"chain:{topology.depth}"


@dataclass(frozen=True, kw_only=True)
class OwnDecoder:
    """Rounds of draft, target pass, walk and commit, as `Decoder` runs them, without text around."""

    subject: Subject
    target: LanguageModel
    draft: LanguageModel
    tree: str
    draft_temperature: float | None = None

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, new_tokens: int, seed: int
    ) -> tuple[list[list[int]], float]:
        """Return the new tokens of each prompt, and how much of what was offered was accepted."""
        topology = parse_tree(tree_for(self.subject.scheme, self.tree))
        drafter = ModelTree(self.draft, topology, self.subject.scheme, self.draft_temperature)
        workspace = Workspace(self.target, drafter, RowParams.of(params, len(prompts)))
        scheme, walk = workspace.session.scheme, self.subject.walk
        run = Run(
            target=self.target,
            drafter=drafter,
            workspace=workspace,
            walk=walk if walk.fits(scheme) else resolve_walk(AUTO, scheme),
            prompts=prompts,
            generators=[row_generator(row_seed(seed, row)) for row in range(len(prompts))],
            max_new_tokens=[new_tokens] * len(prompts),
            eos_token_ids=frozenset(),
        )
        while not run.done:
            run.step()
        return [run.new_tokens(row) for row in range(len(prompts))], run.stats.acceptance_rate
