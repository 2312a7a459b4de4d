"""Speculative decoding of hybrids with recurrent layers on a GPU: what it gives, and where the time of a round goes.

python benchmarks/hybrids.py --json hybrids.json              # models of about 1B parameters, some 5 minutes on an H200
python benchmarks/hybrids.py --tiny --device cpu              # whether the script runs

Weights are random, so that no real draft agrees with them. The draft is the target's first two layers, with its output head.
What the other layers add to the residual stream is multiplied by a number, which is chosen so that the draft's likeliest token
is the target's own with the probability `--agreement`. Every weight is read and multiplied as in a real model.
"""

import argparse
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from gpu import copy_bandwidth, event_seconds, graph_seconds
from hybrid_shapes import COMMON, FAMILIES, TINY
from polydraft.certify.greedy_identity import likeness_of
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Stats
from polydraft.models.hf import HFModel, early_exit
from polydraft.sampling import SamplingParams
from polydraft.trees import Block, DraftTree, parse_tree

DRAFT_LAYERS = 2
TREES = ("chain:3", "chain:4", "chain:5", "2x1x1")
WRITERS = ("o_proj", "out_proj", "down_proj", "w2")
"""Products whose results are added to the residual stream."""
GREEDY = SamplingParams(temperature=0)
OPTIONS = argparse.Namespace()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=["lfm2", "qwen3_5_text"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of what is timed; texts are compared in float32 as well")
    parser.add_argument("--agreement", type=float, default=0.75, help="probability that the draft's first guess is right")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the figures here, after every part")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand weights")
    options = parser.parse_args(namespace=OPTIONS)
    HFModel._checks_habits = False  # the tests check these families; weights this random are too coarse in bfloat16
    figures: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "options": options_of(options)}
    if options.device == "cuda":
        figures |= {"gpu": torch.cuda.get_device_name(), "bandwidth": copy_bandwidth()}
        torch.cuda.empty_cache()
    for family in options.families:
        found = figures[family] = {}
        for part in (speed, rounds, identity):
            start = time.perf_counter()
            try:
                part(family, found)
            # Nobody watches; what was found so far is worth more than a clean end.
            except Exception as error:
                found[f"{part.__name__} failed"] = repr(error)
                logging.exception("%s of %s failed", part.__name__, family)
            print(f"-- {family} {part.__name__}: {time.perf_counter() - start:.0f} s\n", flush=True)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1))
        PAIRS.clear()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


PAIRS: dict[tuple[str, str], tuple[HFModel, HFModel]] = {}


def pair_of(family: str, dtype: str, found: dict[str, Any]) -> tuple[HFModel, HFModel]:
    """Return target and draft, made once; in another dtype they are those that were calibrated."""
    if (family, dtype) in PAIRS:
        return PAIRS[family, dtype]
    PAIRS.clear()
    target = HFModel(built(family, getattr(torch, dtype)), name=family)
    draft = early_exit(target, DRAFT_LAYERS)
    writers = later_writers(target)
    if "scale" in found:
        rescale(writers, found["scale"])
    else:
        found["scale"], found["agreement"] = calibrated(target, draft, writers)
        print(
            f"{family}: {sum(one.numel() for one in target.hf_model.parameters()) / 1e9:.2f}B parameters; later layers times "
            f"{found['scale']:.3f}; the draft's first guess is right {found['agreement']:.2f} of the time",
            flush=True,
        )
    PAIRS[family, dtype] = target, draft
    return target, draft


def built(family: str, dtype: torch.dtype) -> Any:
    """Make a model of random weights, of a size at which every layer shows in the logits."""
    sizes = COMMON | FAMILIES[family]
    if OPTIONS.tiny:
        sizes |= {name: value for name, value in TINY.items() if name in sizes or name == "mamba_chunk_size"}
        sizes |= {"layer_types": sizes["layer_types"][:4]} if "layer_types" in sizes else {}
    if "layer_types" in sizes:
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    config = AutoConfig.for_model(family, **sizes)
    device = torch.device(OPTIONS.device)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(1)
    for module in model.modules():
        scale = 0.15 if isinstance(module, torch.nn.Embedding) else None
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1:
                # In float32 first: the model in another dtype is then the same but for rounding.
                values = torch.randn(weight.shape, generator=generator, device=device)
                weight.copy_(values * (scale or 1.3 / math.sqrt(weight.shape[-1])))
    return model.to(device)


def later_writers(target: HFModel) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return what layers behind the draft's write by, and copies of it."""
    found = []
    for number, layer in enumerate(target.hf_model.model.layers):
        for name, module in layer.named_modules():
            if number >= DRAFT_LAYERS and name.rsplit(".", 1)[-1] in WRITERS:
                found.append((module.weight, module.weight.clone()))
    assert found
    return found


def rescale(writers: list[tuple[torch.nn.Parameter, torch.Tensor]], scale: float) -> None:
    for weight, original in writers:
        weight.copy_(original * scale)


def calibrated(target: HFModel, draft: HFModel, writers: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> tuple[float, float]:
    """Find what later layers must be multiplied by, halving an interval of logarithms; return it with the agreement."""
    low, high = -9.0, 0.0  # agreement falls from low to high
    best = (math.inf, 1.0, 0.0)
    for _ in range(7):
        middle = (low + high) / 2
        rescale(writers, 2.0**middle)
        found = agreement(target, draft)
        best = min(best, (abs(found - OPTIONS.agreement), 2.0**middle, found))
        low, high = (middle, high) if found > OPTIONS.agreement else (low, middle)
    rescale(writers, best[1])
    return best[1], best[2]


def agreement(target: HFModel, draft: HFModel) -> float:
    """Return how often the draft's likeliest token is the next one of the target's own texts."""
    prompts = prompts_of(target)[:4]
    results = Decoder(target).generate(prompts, sampling=GREEDY, max_new_tokens=OPTIONS.new_tokens // 2, seed=0)
    right, count = 0, 0
    for prompt, result in zip(prompts, results, strict=True):
        text_1T = torch.tensor([prompt + result.token_ids], device=target.device)
        guesses_T = draft.plain(text_1T)[0, len(prompt) - 1 : -1].argmax(-1)
        right += int((guesses_T == text_1T[0, len(prompt) :]).sum())
        count += len(result.token_ids)
    return right / count


def prompts_of(target: HFModel) -> list[list[int]]:
    """Return texts of random tokens, which no two rows share."""
    generator = torch.Generator().manual_seed(2)
    lengths = [24 + 29 * number for number in range(OPTIONS.prompts)]
    return [torch.randint(3, target.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def speed(family: str, found: dict[str, Any]) -> None:
    """Time texts, arms in turn: plain decoding and trees, recorded and not."""
    target, draft = pair_of(family, OPTIONS.dtype, found)
    prompts = prompts_of(target)
    arms = {"plain": Decoder(target)}
    arms |= {tree: Decoder(target, TreeDrafter(draft, parse_tree(tree))) for tree in TREES}
    arms |= {f"{name}, unrecorded": arms[name].replace(graphs=False) for name in ("plain", "chain:4")}
    longest = max(map(len, prompts)) + OPTIONS.new_tokens + 1
    for decoder in arms.values():
        decoder.warm_up(sampling=GREEDY, longest=longest)
        decoder.generate(prompts[-1], sampling=GREEDY, max_new_tokens=OPTIONS.new_tokens, seed=0)
    stats: dict[str, list[Stats]] = {name: [] for name in arms}
    texts: dict[str, list[list[int]]] = {name: [] for name in arms}
    for prompt in prompts:
        for name, decoder in arms.items():
            result = decoder.generate(prompt, sampling=GREEDY, max_new_tokens=OPTIONS.new_tokens, seed=0)
            stats[name].append(result.stats)
            texts[name].append(result.token_ids)
    rates = {name: sum(one.new_tokens for one in own) / sum(one.decode_seconds for one in own) for name, own in stats.items()}
    for name, own in stats.items():
        base = "plain, unrecorded" if name.endswith("unrecorded") else "plain"
        passes = sum(one.passes for one in own)
        alike = [str(likeness_of(target, *three)) for three in zip(prompts, texts["plain"], texts[name], strict=True)]
        found[name] = {
            "tokens_per_second": rates[name],
            "ratio": rates[name] / rates["plain"],
            "ratio_of_its_kind": rates[name] / rates[base],
            "tokens_per_pass": sum(one.block_tokens for one in own) / passes,
            "acceptance_by_depth": [
                round(
                    sum(one.accepts_by_depth[depth] for one in own) / max(sum(one.offers_by_depth[depth] for one in own), 1), 3
                )
                for depth in range(min((len(one.offers_by_depth) for one in own), default=0))
            ],
            "ms_per_round": 1e3 * sum(one.decode_seconds for one in own) / passes,
            "replayed": sum(one.replayed_rounds for one in own) / sum(one.rounds for one in own),
            "ahead": sum(one.rounds_ahead for one in own) / sum(one.rounds for one in own),
            "texts": {kind: alike.count(kind) for kind in sorted(set(alike))},
        }
        row = found[name]
        print(
            f"{family} {name:20} {row['tokens_per_second']:7.1f} tokens/s  {row['ratio']:5.2f}x plain  "
            f"{row['tokens_per_pass']:5.2f} tokens/pass  {row['ms_per_round']:7.2f} ms/round  "
            f"{100 * row['replayed']:3.0f} % replayed  texts {row['texts']}",
            flush=True,
        )
    best = max(TREES, key=lambda name: rates[name])
    found["best"] = {"tree": best, "ratio": rates[best] / rates["plain"]}
    print(f"{family}: best {best}, {rates[best] / rates['plain']:.2f}x (aim 1.4)", flush=True)


def rounds(family: str, found: dict[str, Any]) -> None:
    """Time the pieces of a round: passes by levels and by rows, the draft's level, and what states cost."""
    target, draft = pair_of(family, OPTIONS.dtype, found)
    rows: dict[str, float] = {}
    with torch.inference_mode():
        for owner, model in {"target": target, "draft": draft}.items():
            context = model.start(1, 1024)
            context.places = 8
            context.prefill([prompts_of(target)[-1]])
            context.fix_span(512)
            state_bytes = context._states.nbytes / (1 + context._depths_BU.shape[1])
            rows[f"{owner}: state of a node, MB"] = state_bytes / 1e6
            shapes = ("none", "chain:1", *TREES) if model is target else ("none",)
            for tree in shapes:
                block = block_of(tree, target)
                tokens_BT = torch.ones_like(block.depths_BT)
                label = f"{owner}: pass of {tree}"
                rows |= timed_pass(label, model, context, tokens_BT, block)
                if block.size > 1:
                    # Not what trees mean, as states come too early; it shows what a pass in one level would take.
                    alone = replace(block, levels=(block.size,))
                    rows |= timed_pass(f"{owner}: pass of {tree} in one level", model, context, tokens_BT, alone)
            places_BD, counts_B = torch.zeros(1, 5, dtype=torch.long, device=model.device), torch.zeros_like(context.lengths_B)
            rows[f"{owner}: commit, ms"] = 1e3 * seconds_of(lambda: context.commit(places_BD, counts_B))  # noqa: B023
            index_B1 = places_BD[:, :1]
            rows[f"{owner}: commit of states alone, ms"] = 1e3 * seconds_of(lambda: context._states.gather(index_B1))  # noqa: B023
    weights = sum(one.nbytes for name, one in target.hf_model.named_parameters() if "embed_tokens" not in name)
    mixers = sum(one.nbytes for module in target.recurrence.mixers for one in module.parameters())
    rows |= {"target: weights, GB": weights / 1e9, "target: of which mixers, GB": mixers / 1e9}
    rows["target passes per round"] = 1.0
    for name, value in rows.items():
        print(f"{family} {name:50} {value:9.3f}", flush=True)
    found["round"] = rows
    if OPTIONS.device == "cuda":
        plain, best = rows["target: pass of none, ms"], found.get("best", {}).get("tree", "chain:4")
        whole = rows[f"target: pass of {best}, ms"]
        levels = whole - rows[f"target: pass of {best} in one level, ms"]
        draft_ms = parse_tree(best).depth * rows["draft: pass of none, ms"]
        told = found.get(best, {}).get("ms_per_round", math.nan), found.get("plain", {}).get("ms_per_round", math.nan)
        print(
            f"{family}: a round of {best} takes {told[0]:.2f} ms, a plain one {told[1]:.2f}; the target's pass {whole:.2f} "
            f"({levels:.2f} of it for reading mixers level by level), a plain pass {plain:.2f}, the draft's {draft_ms:.2f}",
            flush=True,
        )


def block_of(tree: str, target: HFModel) -> Block:
    topology = parse_tree(tree)
    tokens_1N = torch.zeros(1, topology.num_nodes, dtype=torch.long, device=target.device)
    return DraftTree.from_topology(topology, tokens_1N, (), tokens_1N[0]).block()


def timed_pass(label: str, model: HFModel, context: Any, tokens_BT: torch.Tensor, block: Block) -> dict[str, float]:
    """Time a pass with the output head, recorded and not, and count its operations."""

    def work() -> torch.Tensor:
        return model.head(context.extend(tokens_BT, block))

    with Counting() as counting:
        work()
    found = {f"{label}, ms": 1e3 * seconds_of(work), f"{label}, operations": float(counting.operations)}
    if model.device.type == "cuda":
        found[f"{label}, unrecorded, ms"] = 1e3 * event_seconds(work)
    return found


def seconds_of(work: Callable[[], object]) -> float:
    """Return the time of some work: on a GPU that of its recording."""
    if OPTIONS.device == "cuda":
        return graph_seconds(work)
    work()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Counting(TorchDispatchMode):
    """Counts operations; most of them are a launch."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def identity(family: str, found: dict[str, Any]) -> None:
    """Compare greedy texts of trees with plain ones in float32, where rounding seldom decides."""
    with full_precision():
        target, draft = pair_of(family, "float32", found)
        prompts = prompts_of(target)[: max(OPTIONS.prompts // 2, 1)]
        expected = [Decoder(target).generate(one, sampling=GREEDY, max_new_tokens=64, seed=0).token_ids for one in prompts]
        found["float32"] = {}
        for tree in TREES:
            decoder = Decoder(target, TreeDrafter(draft, parse_tree(tree)))
            ways = {
                "alone": [decoder.generate(one, sampling=GREEDY, max_new_tokens=64, seed=0).token_ids for one in prompts],
                "in a batch": [one.token_ids for one in decoder.generate(prompts, sampling=GREEDY, max_new_tokens=64, seed=0)],
            }
            for way, texts in ways.items():
                alike = [str(likeness_of(target, *three)) for three in zip(prompts, expected, texts, strict=True)]
                found["float32"][f"{tree} {way}"] = {kind: alike.count(kind) for kind in sorted(set(alike))}
        print(f"{family}, float32, texts as plain ones: {found['float32']}", flush=True)


@contextmanager
def full_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
