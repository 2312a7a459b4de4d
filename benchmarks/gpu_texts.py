"""End-to-end speed on a GPU: single texts, batches, and Hugging Face. `benchmarks/gpu.py` runs it."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch

import polydraft
from polydraft.certify.greedy_identity import likeness_of
from polydraft.draft import Combination, Drafter, GramTreeOptions, TreeDrafter
from polydraft.draft.grams import GRAM_DRAFTERS, gram_tree
from polydraft.engine import Decoder, Stats
from polydraft.models import FeatureHead
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded, load_draft
from polydraft.prompts import load_prompts
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_dynamic, parse_tree
from polydraft.tune.contest import speedup_interval

TREES = ("default", "4x2x2x1x1", "dynamic:64")
"""What the end-to-end run tries by default."""
ALIKE = ("default", "chain:5", "3x2x1x1x1", "4x2x2x1x1", "best:64x6", "dynamic:64")
"""Trees whose greedy texts are compared with plain decoding's."""
_WARM = 3
"""Prompts that every arm decodes before it counts, the longest ones: then no memory grows, and every round is captured."""


def end_to_end(options: argparse.Namespace) -> dict[str, float]:
    """Decode prompts one at a time, arms in turn, against our plain decoding; Hugging Face decodes the first few."""
    usual = polydraft.load(options.target, options.draft, device="cuda")
    head = load_draft(options.draft, Loaded(usual.target, usual.tokenizer, usual.eos_token_ids))
    sample = load_prompts(str(options.prompts or "builtin"), limit=options.limit)
    texts, categories = [prompt.text for prompt in sample], [prompt.category for prompt in sample]
    before = usual.encode("\n\n".join(texts) * (1 + options.context // 500))[: options.context] if options.context else []
    prompts = [before + usual.encode(text, chat=True) for text in texts]
    bare = usual.replace(tokenizer=None)  # without detokenizing
    arms = {"plain": bare.replace(drafter=None)}
    for spec in options.trees or TREES:
        shape = spec.removesuffix(",coupled")
        one = bare.replace(coupled=shape != spec)
        arms[spec] = one if shape == "default" else one.replace(drafter=drafter_of(shape, head, usual))
    rows: dict[str, float] = {}
    for temperature in options.temperatures:
        sampling = SamplingParams(temperature=temperature, top_p=options.top_p if temperature else 1.0)
        start = time.perf_counter()
        for decoder in arms.values():
            decoder.warm_up(sampling=sampling, longest=max(map(len, prompts)) + 129)
            for prompt in sorted(prompts, key=len)[-_WARM:]:
                decoder.generate(prompt, sampling=sampling, max_new_tokens=128, seed=0)
        print(f"T={temperature:g}: warming up took {time.perf_counter() - start:.1f} s", flush=True)
        stats: dict[str, list[Stats]] = {name: [] for name in arms}
        waited: dict[str, list[float]] = {name: [] for name in arms}
        found_texts: dict[str, list[list[int]]] = {name: [] for name in arms}
        for seed, prompt in enumerate(prompts):
            for name, decoder in arms.items():
                start = time.perf_counter()
                result = decoder.generate(prompt, sampling=sampling, max_new_tokens=128, seed=seed)
                waited[name].append(time.perf_counter() - start)
                stats[name].append(result.stats)
                found_texts[name].append(result.token_ids)
        for name, found in stats.items():
            rate, low, high = speed_up(found, stats["plain"])
            whole = speedup_interval(paired(found, waited[name], stats["plain"], waited["plain"]))
            first = statistics.median(one.first_token_seconds or 0.0 for one in found)
            tokens, passes = sum(one.new_tokens for one in found), sum(one.passes for one in found)
            seconds = sum(one.decode_seconds for one in found)
            rows |= {f"T={temperature:g} {name}": tokens / seconds, f"T={temperature:g} {name} ratio": rate}
            rows |= {f"T={temperature:g} {name} with prompts": tokens / sum(waited[name])}
            rows |= {f"T={temperature:g} {name} ratio with prompts": whole[0], f"T={temperature:g} {name} first token": first}
            same = sum(one == two for one, two in zip(found_texts[name], found_texts["plain"], strict=True))
            alike = f"  {same} of {len(prompts)} texts as plain" if temperature == 0 else ""
            for kind in dict.fromkeys(categories):
                own = [one for one, category in zip(found, categories, strict=True) if category == kind]
                rows[f"T={temperature:g} {name} per pass, {kind}"] = sum(one.new_tokens for one in own) / sum(
                    one.passes for one in own
                )
            print(
                f"T={temperature:g} {name:14} {tokens / seconds:7.1f} tokens/s  {rate:5.2f}x plain ({low:.2f} to {high:.2f})  "
                f"{tokens / passes:5.2f} tokens/pass  {1e3 * seconds / passes:6.2f} ms/pass  "
                f"{100 * sum(one.replayed_rounds for one in found) / passes:3.0f} % replayed{alike}\n"
                f"    with prompts  {tokens / sum(waited[name]):7.1f} tokens/s  {whole[0]:5.2f}x plain "
                f"({whole[1]:.2f} to {whole[2]:.2f})  first token after {1e3 * first:.1f} ms (median)",
                flush=True,
            )
        timed = [
            hf_generate(cast(HFModel, usual.target).hf_model, prompt, temperature) for prompt in prompts[: options.hugging_face]
        ]
        if not timed:
            continue
        rows[f"T={temperature:g} hf"] = sum(count for count, _ in timed) / sum(spent for _, spent in timed)
        print(
            f"T={temperature:g} Hugging Face {rows[f'T={temperature:g} hf']:.1f} tokens/s, prefill and first use included",
            flush=True,
        )
    return rows


def speed_up(arm: list[Stats], plain: list[Stats]) -> tuple[float, float, float]:
    """Return the ratio of two arms' tokens per second, and its 95 % interval over prompts."""
    seconds = [[one.decode_seconds for one in found] for found in (arm, plain)]
    return speedup_interval(paired(arm, seconds[0], plain, seconds[1]))


def paired(arm: list[Stats], arm_seconds: list[float], plain: list[Stats], plain_seconds: list[float]) -> np.ndarray:
    """Return tokens and seconds of both arms, a row per prompt."""
    columns = [one.new_tokens for one in arm], arm_seconds, [one.new_tokens for one in plain], plain_seconds
    return np.array(columns).T


def drafter_of(spec: str, head: FeatureHead, plain: Decoder) -> Drafter:
    """Make a tree, with a scheme if wished, and candidates from n-grams beside it: 4x2x1,top or 4x2x1+32 or none+63.

    Names of n-gram drafters stand for themselves: self-draft, suffix+corpus.
    """
    if spec.split("+")[0] in GRAM_DRAFTERS:
        return gram_tree(spec.split("+"), GramTreeOptions().for_tokenizer(plain.tokenizer))
    drawn, _, nodes = spec.partition("+")
    tree, _, scheme = drawn.partition(",")
    shape = parse_dynamic(tree) or parse_tree(tree)
    if not nodes:
        return TreeDrafter(head, shape, scheme or "auto")
    grams = gram_tree(["suffix", "corpus"], GramTreeOptions(nodes=int(nodes)).for_tokenizer(plain.tokenizer))
    return grams if tree == "none" else Combination(TreeDrafter(head, shape, scheme or "auto"), grams)


def batches(options: argparse.Namespace) -> dict[str, float]:
    """Throughput of plain and speculative decoding at growing batches."""
    plain = polydraft.load("inflated:7b", "none", device="cuda")
    head = load_draft("smollm2-head", Loaded(plain.target, plain.tokenizer, plain.eos_token_ids))
    texts = sample_prompts(options.prompts, 64)
    rows: dict[str, float] = {}
    for batch in (1, 4, 16, 64):
        prompts = [plain.encode(text, chat=True) for text in texts[:batch]]
        for tree in ("none", "chain:2", "2x1", "4x2x1", "4x2x2x1x1"):
            drafter = TreeDrafter(head, parse_tree(tree)) if tree != "none" else None
            # Without ends of text: all rows work to the last round.
            decoder = plain.replace(drafter=drafter, tokenizer=None, eos_token_ids=())
            for _ in range(2):
                results = decoder.generate(prompts, sampling=SamplingParams(temperature=0), max_new_tokens=64, seed=0)
            stats = results[0].stats
            rows[f"batch {batch} {tree}"] = stats.new_tokens / stats.decode_seconds
        row = {tree: rows[f"batch {batch} {tree}"] for tree in ("none", "chain:2", "2x1", "4x2x1", "4x2x2x1x1")}
        print(f"batch {batch:3}:", {tree: f"{rate:.0f} ({rate / row['none']:.2f}x)" for tree, rate in row.items()}, flush=True)
    return rows


def identity(options: argparse.Namespace) -> dict[str, int]:
    """Greedy texts of the bundled model on the GPU, drafted and captured, against Hugging Face's."""
    decoder = polydraft.load("smollm2", device="cuda", tree="4x2x2x1x1")
    found: dict[str, int] = {}
    for text in sample_prompts(options.prompts, 20):
        prompt = decoder.encode(text, chat=True)
        ids = torch.tensor([prompt], device="cuda")
        model = cast(HFModel, decoder.target).hf_model
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0)
        expected = output[0, len(prompt) :].tolist()
        got = decoder.generate(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=64).token_ids
        likeness = str(likeness_of(decoder.target, prompt, expected, got))
        found[likeness] = found.get(likeness, 0) + 1
    print("greedy texts against Hugging Face's:", found)
    return found


def alike(options: argparse.Namespace) -> dict[str, int]:
    """Count greedy texts that differ from plain decoding's, alone and in batches of 8: none, where passes are invariant."""
    usual = polydraft.load(options.target, device="cuda")
    head = load_draft("smollm2-head", Loaded(usual.target, usual.tokenizer, usual.eos_token_ids))
    prompts = [usual.encode(text, chat=True) for text in sample_prompts(options.prompts, options.limit)]
    bare, greedy = usual.replace(tokenizer=None), SamplingParams(temperature=0)
    arms = {"plain": bare.replace(drafter=None)}
    for spec in options.trees or ALIKE:
        shape = spec.removesuffix(",coupled")
        one = bare.replace(coupled=shape != spec)
        arms[spec] = one if shape == "default" else one.replace(drafter=drafter_of(shape, head, usual))
    found: dict[str, int] = {}
    expected: list[list[int]] = []
    for rows in (1, 8):
        for name, decoder in arms.items():
            texts: list[list[int]] = []
            for first in range(0, len(prompts), rows):
                batch = prompts[first : first + rows]
                texts += [one.token_ids for one in decoder.generate(batch, sampling=greedy, max_new_tokens=128)]
            expected = expected or texts
            differ = sum(one != two for one, two in zip(texts, expected, strict=True))
            found[f"{name}, batch {rows}"] = differ
            print(f"{name}, batch {rows}: {differ} of {len(texts)} greedy texts differ from plain decoding alone", flush=True)
    return found


def sample_prompts(path: Path | None, limit: int) -> list[str]:
    """Return prompts of all categories in turn: from a file, or the built-in ones."""
    return [prompt.text for prompt in load_prompts(str(path) if path else "builtin", limit=limit)]


def hf_generate(model, prompt: list[int], temperature: float) -> tuple[int, float]:
    ids = torch.tensor([prompt], device="cuda")
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.cuda.synchronize()
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, pad_token_id=0, **choice)
    torch.cuda.synchronize()
    return output.shape[1] - len(prompt), time.perf_counter() - start


TEXTS: dict[str, Callable[[argparse.Namespace], object]] = {
    "identity": identity,
    "alike": alike,
    "end": end_to_end,
    "batches": batches,
}
