"""Kernels of captured rounds on a GPU: how many there are, how long each takes, and in which order they come.

    python benchmarks/gpu_kernels.py --prompts spec_bench.jsonl                            # plain and the default, T=0 and 1
    python benchmarks/gpu_kernels.py --target smollm2 --rounds 0:default 0:best:32x5 1:4x2x2x1x1 --order
    python benchmarks/gpu_kernels.py --batch 16 --rounds 0:none 0:chain:2

A round is one text's, or one of several that are alike; `--order` lists the second round's kernels one after the other.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import polydraft
from gpu_texts import drafter_of, sample_prompts
from polydraft.engine import Decoder, Engine, Stream
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import SamplingParams

_WARM, _TIMED, _PROFILED = 60, 30, 10
"""Rounds before anything counts, those that are timed, and those whose kernels are counted."""
_NAMED = 90
"""Characters of a kernel's name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="inflated:7b", help="smollm2 is the bundled model itself")
    parser.add_argument("--prompts", type=Path, help="a file of prompts, of which the first counts; a built-in one otherwise")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", nargs="+", default=["0:none", "0:default", "1:none", "1:default"], metavar="T:TREE")
    parser.add_argument("--most", type=int, default=16, help="kernels to show")
    parser.add_argument("--order", action="store_true", help="list the kernels of a round in their order as well")
    options = parser.parse_args()
    usual = polydraft.load(options.target, device="cuda")
    head = load_draft("smollm2-head", Loaded(usual.target, usual.tokenizer, usual.eos_token_ids))
    prompt = usual.encode(sample_prompts(options.prompts, 1)[0], chat=True)
    bare = usual.replace(tokenizer=None, eos_token_ids=())
    for spec in options.rounds:
        temperature, _, tree = spec.partition(":")
        decoder = bare
        if tree != "default":
            decoder = bare.replace(drafter=None if tree == "none" else drafter_of(tree, head, usual))
        show(spec, decoder, [prompt] * options.batch, SamplingParams(temperature=float(temperature)), options)


def show(name: str, decoder: Decoder, prompts: list[list[int]], sampling: SamplingParams, options: argparse.Namespace) -> None:
    """Print what the rounds of one kind consist of."""
    decoder.warm_up(sampling=sampling, batch_size=len(prompts), longest=900)
    started(decoder, prompts, sampling).close()  # captures what the warm-up did not
    stream = started(decoder, prompts, sampling)
    run: Engine = stream.engine
    start = time.perf_counter()
    for _ in range(_TIMED):
        run.step()
    torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - start) / _TIMED
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(_PROFILED):
            run.step()
        torch.cuda.synchronize()
    stream.close()
    kernels = [event for event in found.events() if event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: event.time_range.start)
    counts, spent = Counter[str](), Counter[str]()
    for event in kernels:
        counts[event.name[:_NAMED]] += 1
        spent[event.name[:_NAMED]] += event.time_range.elapsed_us()
    # The last rounds may still be under way when the profile ends: rounds are told by what each does once.
    rounds = counts.get("conclude", _PROFILED)
    print(f"T:tree {name}, {len(prompts)} texts: {milliseconds:.3f} ms per round, {len(kernels) / rounds:.0f} kernels, "
          f"{sum(spent.values()) / rounds:.0f} us at work, {run.stats.replayed_rounds} of {run.stats.rounds} rounds replayed",
          flush=True)  # fmt: skip
    for kernel, microseconds in spent.most_common(options.most):
        print(f"  {microseconds / rounds:8.1f} us in {counts[kernel] / rounds:6.1f}  {kernel}")
    if options.order:
        ends = [place for place, event in enumerate(kernels) if event.name == "conclude"]
        for event in kernels[ends[0] + 1 : ends[1] + 1] if len(ends) > 1 else []:
            since = event.time_range.start - kernels[ends[0]].time_range.end
            print(f"  {since:9.1f} {event.time_range.elapsed_us():7.1f}  {event.name[:_NAMED]}")


def started(decoder: Decoder, prompts: list[list[int]], sampling: SamplingParams) -> Stream:
    """Begin texts and run some rounds of them."""
    stream = decoder.stream(prompts, sampling=sampling, max_new_tokens=600, seed=0)
    for _ in range(_WARM):
        stream.engine.step()
    return stream


if __name__ == "__main__":
    main()
