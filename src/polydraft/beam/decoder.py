"""The public interface of beams: prompts in, scored texts out."""

import threading
from collections import deque
from typing import Any

import torch

from polydraft.beam._node import Stops
from polydraft.beam._run import BeamRequest, BeamRun
from polydraft.beam._sample import RandomChance, SampleRun
from polydraft.beam._search import CoupledRun, SearchRun
from polydraft.beam._workspace import BeamWorkspace
from polydraft.beam.options import BeamMode, BeamOptions
from polydraft.beam.stream import BeamGeneration, BeamStream
from polydraft.engine import Decoder
from polydraft.engine.request import Request, rows_of
from polydraft.errors import UsageError, unknown_name
from polydraft.models import Head, LanguageModel, check_prompts
from polydraft.models.translation import refuse_translated
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_generator

_GREEDY, _PLAIN = SamplingParams(temperature=0.0), SamplingParams()
_MOST_SPARE = 2
_DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p")


class BeamDecoder:
    """Beam search and beam sampling with the models of a decoder; with a draft, several steps per target pass.

    Parameters
    ----------
    decoder : Decoder
        Provides target, draft, tokenizer and end-of-text tokens; its tree, scheme and walk are for single texts.

    Examples
    --------
    >>> beams = polydraft.BeamDecoder(polydraft.load("smollm2"))            # doctest: +SKIP
    >>> beams.search("Translate to French: Hello.", beams=4).best.text      # doctest: +SKIP
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        draft = decoder.drafter.model
        refuse_translated(draft, "beam search")
        self.draft: LanguageModel | Head | None = draft if isinstance(draft, LanguageModel | Head) else None
        if isinstance(draft, Head) and draft.lacks is not None:
            raise UsageError(f"draft {draft.name!r} {draft.lacks}, as beams need; use another draft, or none")
        self._spare: deque[BeamWorkspace] = deque(maxlen=_MOST_SPARE)
        """Workspaces kept for their captured passes."""
        self._lending = threading.Lock()
        """Held while a workspace is taken or put back, so that no two threads get the same one."""

    def search(self, prompts: Any, **options: Any) -> Any:
        """Return the best texts of beam search with their scores; they equal those of Hugging Face.

        Parameters
        ----------
        **options
            Fields of `BeamOptions`, and of a request: sampling (of which only penalties apply), max_new_tokens, stop, chat,
            cancel.

        Returns
        -------
        BeamGeneration, or a list of them
        """
        return self._all(prompts, {**options, "mode": BeamMode.SEARCH})

    def sample(self, prompts: Any, **options: Any) -> Any:
        """Return texts of beam sampling; parameters as for `search`, plus seed."""
        return self._all(prompts, {**options, "mode": BeamMode.SAMPLE})

    def _all(self, prompts: Any, options: dict[str, Any]) -> BeamGeneration | list[BeamGeneration]:
        rows, single = rows_of(prompts)
        results = []
        for row, prompt in enumerate(rows):
            stream = self._stream(prompt, options, row, len(rows))
            for _ in stream:
                pass
            results.append(stream.result())
        return results[0] if single else results

    def stream(self, prompt: Any, *, settled: bool = True, **options: Any) -> BeamStream:
        """Decode one prompt, and yield tokens as soon as all texts that can still win agree on them.

        Parameters
        ----------
        settled : bool
            Must be true, because a stream cannot take tokens back.
        **options
            As for `search`, with `mode`.
        """
        if not settled:
            raise UsageError("settled=False: beams may take unsettled text back; stream settled text, or wait for the end")
        return self._stream(prompt, options, 0, 1)

    def _stream(self, prompt: Any, options: dict[str, Any], row: int, rows: int) -> BeamStream:
        names = BeamOptions.__dataclass_fields__
        for name in options:
            if not any(name in known for known in (names, Request.__dataclass_fields__, SamplingParams.__dataclass_fields__)):
                raise unknown_name("option", name, [*names, "sampling", "max_new_tokens", "seed", "stop", "chat", "cancel"])
        beam = BeamOptions(**{name: value for name, value in options.items() if name in names}).on(self.decoder.target.device)
        if beam.model_only and self.draft is None:
            raise UsageError("model_only needs a draft model, and there is none; load one, or leave it out")
        rest: Any = {name: value for name, value in options.items() if name not in names}
        request = Request.from_options(rest)
        if request.keep:
            raise UsageError("keep=True does not work with beams, whose memory belongs to one request; leave it out")
        assembler, limit = self.decoder.assembler(request.row_stops(rows)[row]), request.row_limits(rows)[row]
        given = None if request.sampling is None else request.row_params(rows).rows[row]
        params, target = check_distribution(beam, given), self.decoder.target
        if params.top_k > target.vocab_size:
            allowed = f"0 (keep all) to {target.vocab_size}"
            raise UsageError(f"top_k={params.top_k} is larger than the vocabulary; allowed: {allowed}")
        token_ids = self.decoder.encode(prompt, request.chat)
        ends = params.ends(self.decoder.eos_token_ids)
        params = self.decoder.with_defaults(params, token_ids, draws=beam.mode == BeamMode.SAMPLE).ending(ends)
        check_prompts([token_ids], target.max_positions, target.vocab_size)
        seed = request.seeds(rows)[row]
        generator = row_generator(seed)
        run = self._run(
            BeamRequest(
                target=target,
                draft=self.draft,
                prompt=token_ids,
                params=params,
                options=beam,
                eos_token_ids=ends,
                max_new_tokens=limit,
                stops=Stops(assembler),
            ),
            generator,
        )
        settings = {"seed": seed, "max_new_tokens": limit, "draft": run.draft_name, **vars(beam)}
        return BeamStream(run, self.decoder.tokenizer, assembler.fork(), settings, request.cancel)

    def _run(self, request: BeamRequest, generator: torch.Generator) -> BeamRun:
        workspace = self._workspace()
        run: BeamRun
        if request.options.mode == BeamMode.SEARCH:
            run = SearchRun(request, workspace)
        elif request.options.is_coupled:
            run = CoupledRun(request, generator, workspace)
        else:
            run = SampleRun(request, RandomChance(generator), workspace)
        if workspace.captures:
            with self._lending:
                self._spare.append(workspace)
        return run

    def _workspace(self) -> BeamWorkspace:
        """Return a workspace for one request: a spare one for the same models if one is idle, else a new one."""
        fitting = (self.decoder.target, self.draft, self.decoder.graphs, self.decoder.target.mark())
        with self._lending:
            for workspace in [*self._spare]:
                if workspace.spoiled or (workspace.target, workspace.draft, workspace.graphs, workspace.mark) != fitting:
                    self._spare.remove(workspace)
                elif workspace.idle:
                    self._spare.remove(workspace)
                    return workspace
        return self.new_workspace()

    def new_workspace(self) -> BeamWorkspace:
        """Return a new workspace for the decoder's models; a subclass may make another kind."""
        return BeamWorkspace(self.decoder.target, self.draft, self.decoder.graphs)


def check_distribution(options: BeamOptions, sampling: SamplingParams | None) -> SamplingParams:
    """Return the sampling parameters to use; refuse any that beams would ignore."""
    if sampling is not None and sampling.grammar is not None:
        raise UsageError("grammars are for single texts, not for beams; leave the grammar out")
    if sampling is not None and sampling.prediction is not None:
        raise UsageError("predictions are for single texts, not for beams; leave the prediction out")
    if options.mode == BeamMode.SAMPLE:
        params = sampling or _PLAIN
        if params.temperature == 0:
            raise UsageError("temperature=0.0 leaves beam sampling nothing to draw; use mode 'search', or raise it above 0")
        return params
    params = sampling or _GREEDY
    for name in _DISTRIBUTION:
        value = getattr(params, name)
        if value not in (getattr(_GREEDY, name), getattr(_PLAIN, name)):
            raise UsageError(f"{name}={value!r} has no meaning in beam search; leave it out, or use mode 'sample'")
    return params
