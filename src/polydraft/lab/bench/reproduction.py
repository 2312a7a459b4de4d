"""Paper reproductions: run a paper's experiments one after the other, each in its own folder, and write its tables."""

import dataclasses
import datetime
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from polydraft.defaults import default_draft
from polydraft.devices import captures, dtype_name
from polydraft.errors import UsageError, unknown_name
from polydraft.lab.analyze.analysis import Analysis
from polydraft.lab.analyze.settings import AnalyzeSettings
from polydraft.lab.bench import BASELINE
from polydraft.lab.bench.diff import load_results
from polydraft.lab.bench.meters import machine
from polydraft.lab.bench.method import MethodSpec
from polydraft.lab.bench.options import BenchOptions
from polydraft.lab.bench.session import BenchSession, Models
from polydraft.lab.bench.shards import Shard, merge_shards
from polydraft.lab.papers.pages import FILE, charts, keep, reproduction, write_kept
from polydraft.lab.papers.paper import LARGE_TARGET, PAPERS, SIZES, DistributionRun, Results, Run
from polydraft.models.fingerprint import digest_of
from polydraft.models.placement import resolve_device
from polydraft.output import check_folder, read_settings, write_text
from polydraft.papers.decision import shipped_decision

logger = logging.getLogger(__name__)

_ROWS = "analysis.json"
_MODELS = {"target", "draft"}
ALL_RUNS = "all"
_KINDS = {False: "counted", True: "timed"}
RunBench = Callable[[BenchSession, Path], dict[str, Any]]
"""Runs a benchmark in a folder and returns its results."""


def check_choice(papers: Sequence[str], names: Collection[str], methods: Collection[str]) -> None:
    """Refuse unknown names of runs, and methods that none of the papers measures."""
    runs = [run for paper in papers for run in PAPERS.get(paper).runs]
    known = [ALL_RUNS, *_KINDS.values(), *dict.fromkeys(run.name for run in runs)]
    arms = dict.fromkeys(arm for run in runs if isinstance(run, Run) for arm in run.arms)
    for kind, given, allowed in (("run", names, known), ("method", methods, arms)):
        for name in given:
            if name not in allowed:
                raise unknown_name(kind, name, allowed)


class Reproduction:
    """Measures a paper's tables and figures again, at one of the `SIZES`.

    `options` has all fields of `BenchOptions`. Those named in `given` were chosen by the user and override the size's; if
    methods are among them, no others are measured. `runs` names runs, or kinds of runs. Papers can share their models.
    """

    def __init__(
        self,
        name: str,
        size: str,
        options: Mapping[str, Any],
        given: Collection[str],
        models: Models,
        runs: Collection[str] = (ALL_RUNS,),
    ) -> None:
        if size not in SIZES:
            raise unknown_name("size", size, SIZES)
        self.name, self.paper, self.size = name, PAPERS.get(name), SIZES[size]
        self._options, self._given = dict(options), set(given)
        self._models = models
        self._missed: set[str] = set()
        """Missing files that have been reported."""
        self._on_gpu = captures(resolve_device(options["device"]))
        self._only = set(options["methods"].split()) if "methods" in self._given else None
        named = [run for run in self.paper.runs if {ALL_RUNS, run.name, _KINDS[run.timed]} & {*runs}]
        self.runs = [run for run in named if self._has_arms(run)]
        for run in self.runs:
            self._source(run)

    def check(self, out: Path, *, resume: bool) -> None:
        """Refuse a folder that cannot be written to, before anything is loaded."""
        for run in self.runs:
            check_folder(out / run.name, resume=resume)

    def run(self, out: Path, run_bench: RunBench) -> dict[str, dict[str, Any]]:
        """Make the runs, update the tables after each, and return the results of the benchmarks among them.

        Finished runs are not repeated; interrupted benchmarks continue.
        """
        found: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            place = out / run.name
            if isinstance(run, DistributionRun):
                self._distributions(run, place)
            elif not self._is_left_out(run):
                options = self.bench_options(run)
                found[run.name] = _finished(options, place) or run_bench(BenchSession(options, self._models), place)
            write_tables(self.name, out)
        return found

    def _has_arms(self, run: Run | DistributionRun) -> bool:
        """Whether the user's methods include any of this run's, not counting the baseline."""
        return self._only is None or (isinstance(run, Run) and bool({*run.arms} & self._only - {BASELINE}))

    def _is_left_out(self, run: Run) -> bool:
        """Whether to skip a run with models of its own, because they are missing or the user has named others."""
        if not _MODELS & run.settings.keys():
            return False
        if _MODELS & self._given:
            return True
        missing = [place for place in run.needs if not Path(place).exists()]
        if missing and missing[0] not in self._missed:
            logger.warning("leaving out %s and others like it: there is no %s", run.name, missing[0])
            self._missed.add(missing[0])
        return bool(missing)

    def bench_options(self, run: Run) -> BenchOptions:
        """Return the options of one benchmark."""
        size = self.size
        of_size: dict[str, Any] = {
            "limit": size.timed_prompts if run.timed else size.prompts,
            "max_new_tokens": size.timed_tokens if run.timed else size.tokens,
            "batch": 1 if run.timed else size.batch,
        }
        if run.seeds:
            of_size["repeat"] = size.seeds
        if run.timed and self._options["shard"] is None:
            of_size["energy_seconds"] = size.energy_seconds
        if run.timed and self._on_gpu:
            of_size["target"] = LARGE_TARGET
        chosen = {key: value for key, value in of_size.items() if key not in self._given}
        if run.timed:
            chosen["batch"] = 1
        chosen |= {key: value for key, value in run.settings.items() if key not in self._given}
        fixed = {"source": self._source(run), "methods": self._methods(run), "temperature": run.temperature}
        return BenchOptions(**{**self._options, **chosen, **fixed})

    def _methods(self, run: Run) -> tuple[str, ...]:
        """Return the methods of a run; skip those whose decision model does not ship with the draft."""
        draft = default_draft(self._options["target"], self._options["draft"])
        left_out = set() if self.size.whole else {*run.more} - {*run.methods}
        if self._only is not None:
            left_out |= {*run.arms} - self._only
        wanted = {one: MethodSpec.parse(one).options.get("decision") for one in run.arms if one not in left_out}
        return tuple(one for one, kind in wanted.items() if kind is None or shipped_decision(draft, kind) is not None)

    def _source(self, run: Run | DistributionRun) -> str:
        """Return the file with a run's prompts, or the single source that the user gave."""
        source = str(self._options["source"])
        if not Path(source).is_dir():
            return source
        file = Path(source) / f"{run.prompts}.jsonl"
        if not file.exists():
            names = sorted({f"{one.prompts}.jsonl" for one in self.paper.runs})
            raise UsageError(f"{source} holds no {file.name}; --reproduce {self.name} needs {', '.join(names)} there")
        return str(file)

    def _distributions(self, run: DistributionRun, out: Path) -> None:
        """Compute the rows of an analysis unless they exist. Of several shards, only the first does."""
        shard = self._options["shard"]
        if shard is not None and Shard.parse(shard).index > 1:
            return
        options = self._options
        whole_set = Path(str(options["source"])).is_dir()
        settings = AnalyzeSettings(
            **{key: options[key] for key in ("target", "draft", "raw", "seed", "device", "dtype", "threads")},
            source=self._source(run),
            categories=run.categories if whole_set else (),
            limit=options["limit"] if "limit" in self._given else self.size.prompts,
            max_new_tokens=options["max_new_tokens"] if "max_new_tokens" in self._given else self.size.answer_tokens,
            positions=self.size.positions,
            batch_size=self.size.batch,
            temperatures=run.temperatures,
            drafts=run.drafts,
            schemes=run.schemes,
            paper_bound=True,
        )
        mark = digest_of(json.loads(json.dumps(dataclasses.asdict(settings))))
        path = out / _ROWS
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["mark"] == mark:
            return
        analysis = Analysis(settings)
        rows = [row.as_dict(paper_bound=True, by_prompt=True) for row in analysis.rows()]
        place = machine(analysis.pair.device)
        shown = {
            "target": settings.target,
            "draft": analysis.pair.draft_name,
            "dtype": dtype_name(analysis.pair.dtype),
            "max_new_tokens": settings.max_new_tokens,
            "machine": place["gpu"] or f"{place['threads']} threads of {place['cpu']}",
            "prompts": max(size.prompts for size in analysis.sizes),
            "positions": max(size.positions for size in analysis.sizes),
            "created": datetime.date.today().isoformat(),
            "source": Path(settings.source).name.removesuffix(".jsonl") + "".join(f" ({one})" for one in settings.categories),
        }
        out.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"mark": mark, "settings": shown, "rows": rows}, indent=1))


def _finished(options: BenchOptions, folder: Path) -> dict[str, Any] | None:
    """Return the results in a folder if they are complete and were measured with exactly these options, else None."""
    if not (folder / "results.json").exists():
        return None
    asked, before = json.loads(json.dumps(dataclasses.asdict(options))), read_settings(folder / "settings.json")
    if str(before.get("shard")).startswith("all/"):  # shards that were merged
        before["shard"] = None
    if {"shard": None} | before != asked:
        return None
    results = load_results(folder)
    whole = results["settings"]["repeat"] == options.repeat and list(results["methods"]) == list(dict.fromkeys(options.methods))
    return results if whole else None


def write_tables(name: str, out: Path) -> None:
    """Write a paper's figures, tables and charts from the finished runs in a folder."""
    paper, kept = PAPERS.get(name), Results()
    for run in paper.runs:
        place = out / run.name
        if isinstance(run, Run) and (place / "results.json").exists():
            kept[run.name] = keep(load_results(place), paper, timed=run.timed)
        elif isinstance(run, DistributionRun) and (place / _ROWS).exists():
            analysis = json.loads((place / _ROWS).read_text(encoding="utf-8"))
            kept[run.name] = {"settings": analysis["settings"], "rows": analysis["rows"]}
    out.mkdir(parents=True, exist_ok=True)
    write_kept(kept, out / f"{name}.json")
    for chart in charts(paper, kept):
        write_text(out / chart.file, chart.content)
    write_text(out / FILE, reproduction(paper, kept))


def merge_reproduction(name: str, out: Path, folders: Sequence[Path], command: list[str]) -> dict[str, dict[str, Any]]:
    """Join the shards of a reproduction, except runs that some shard has not finished; return the benchmarks' results."""
    found: dict[str, dict[str, Any]] = {}
    for run in PAPERS.get(name).runs:
        parts = [folder / run.name for folder in folders]
        if isinstance(run, DistributionRun):
            for part in parts:
                if (part / _ROWS).exists():
                    shutil.copytree(part, out / run.name, dirs_exist_ok=True)
        elif all((part / "results.json").exists() for part in parts):
            found[run.name] = merge_shards(out / run.name, parts, command)
        elif any(part.exists() for part in parts):
            logger.warning("leaving out %s: not all shards have finished it; finish them with --resume", run.name)
    write_tables(name, out)
    return found
