"""Distribute rows among Ray Data workers, and return their results in order."""

import itertools
import json
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from ray.exceptions import RayError

from polydraft.batch.files import BatchOptions, PromptFile, WorkerOptions
from polydraft.batch.runner import BatchTask, generate_rows
from polydraft.errors import FailureError
from polydraft.loading import load_with
from polydraft.options import LoadOptions
from polydraft.serve.cluster import cluster_with_room

_ROWS_PER_SLOT = 32
"""Size of a share. Slots idle at its end until the last text is done, which matters less in larger shares."""
_MOST_SHARES = 4096


class Worker:
    """A worker with its own copy of the model, which takes one share after another."""

    def __init__(self, loading: Mapping[str, Any], task: BatchTask, options: BatchOptions, threads: int) -> None:
        torch.set_num_threads(threads)
        self._decoder = load_with(LoadOptions(**loading), batch=options.slots, temperature=task.sampling.temperature)
        self._task, self._options = task, options

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the results of the one share in a batch."""
        rows = pickle.loads(batch["rows"][0])  # pickled by us a moment ago
        found = [one for group in generate_rows(self._decoder, rows, self._task, self._options) for one in group]
        return {"results": np.array([json.dumps(found)], dtype=object)}


def rows_by_ray(
    loading: Mapping[str, Any], workers: WorkerOptions, prompts: PromptFile, after: int, task: BatchTask, options: BatchOptions
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of all rows after one of them, in order, with workers on a cluster.

    A worker that dies is restarted and repeats its share: every row has its own seed.
    """
    size = max(_ROWS_PER_SLOT * options.slots, -(-prompts.lines // _MOST_SHARES))
    # With fewer rows than that per worker, share them evenly, so that no worker idles.
    size = max(min(size, -(-(prompts.lines - after) // workers.workers)), 1)
    rows = prompts.rows(after)
    shares = [{"rows": pickle.dumps(share)} for share in iter(lambda: list(itertools.islice(rows, size)), [])]
    if not shares:
        return
    with cluster_with_room("worker", workers.workers, cpus=workers.worker_cpus, gpus=workers.worker_gpus):
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False  # our own says more
        data = ray.data.from_items(shares, override_num_blocks=len(shares)).map_batches(
            Worker,
            fn_constructor_args=(dict(loading), task, options, max(int(workers.worker_cpus), 1)),
            batch_size=1,
            concurrency=workers.workers,
            num_cpus=workers.worker_cpus,
            num_gpus=workers.worker_gpus,
        )
        try:
            for row in data.iter_rows():
                yield json.loads(row["results"])
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise FailureError(
                f"a worker failed ({reason}); finished rows are safe: fix the cause, then add --resume"
            ) from None
