"""The engine on one GPU: how close each part of a round is to the hardware's limits, and speed end to end.

python benchmarks/gpu.py                      # everything, under 8 minutes on an H200
python benchmarks/gpu.py --only limits parts  # some of it
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polydraft
from gpu_texts import TEXTS, sample_prompts
from polydraft.backends.triton.layers import FusedBody
from polydraft.draft import Plain, TreeDrafter
from polydraft.engine import Decoder
from polydraft.engine.round import distributions
from polydraft.engine.workspace import Workspace
from polydraft.errors import PolydraftError
from polydraft.models import HeadShape
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel, early_exit
from polydraft.models.inflated import InflatedModel
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import PartialVocabulary, RowParams, SamplingParams
from polydraft.trees import Block, parse_tree
from polydraft.verify import AUTO

SHAPE_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 49152, "max_position_embeddings": 65536}  # fmt: skip
SHAPE_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
              "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
_PROCESSES = 15
"""Number of processes for the GPU tests."""
OPTIONS = argparse.Namespace()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS, *TEXTS], default=[*SECTIONS, *TEXTS])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--prompts", type=Path, help="a file of prompts; the built-in ones otherwise")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0], help="of the end-to-end run")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the end-to-end run above temperature 0")
    parser.add_argument("--limit", type=int, default=12, help="prompts of the end-to-end run")
    parser.add_argument("--context", type=int, default=0, help="tokens of other prompts before each, end to end")
    parser.add_argument("--hugging-face", type=int, default=4, metavar="N", help="prompts that its `generate` decodes as well")
    parser.add_argument("--target", default="inflated:7b", help="of the end-to-end run; smollm2 is the bundled model itself")
    parser.add_argument("--draft", default="smollm2-head", help="of that target, a folder or a name")
    parser.add_argument(
        "--trees", nargs="*", help="default, trees, with a scheme if wished (4x2x1,top; default,coupled), or n-grams (4x2x1+32)"
    )
    options = parser.parse_args(namespace=OPTIONS)
    torch.cuda.init()
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in options.only:
        start = time.perf_counter()
        figures[name] = SECTIONS[name]() if name not in TEXTS else TEXTS[name](options)
        print(f"-- {name}: {time.perf_counter() - start:.0f} s\n", flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))


def limits() -> dict[str, float]:
    """Copy bandwidth, and plain and tree passes of a 7B-shaped model against the reading of its weights."""
    bandwidth = copy_bandwidth()
    target = random_model(SHAPE_7B)
    seconds = sum(parameter.nbytes for name, parameter in target.hf_model.named_parameters() if "embed" not in name) / bandwidth
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; weights of the 7B shape read in {1e3 * seconds:.2f} ms")
    rows = {"bandwidth": bandwidth, "weights_ms": 1e3 * seconds}
    for nodes in (1, 8, 16, 32, 64, 128):
        rows[f"pass of {nodes}"] = 1e3 * pass_seconds(target, nodes, context=512)
    assert target.fast is not None, "the kernels run on this GPU"
    own, target.fast = target.fast, FusedBody(target.lean, product=torch.nn.functional.linear)
    rows["pass of 1, library"] = 1e3 * pass_seconds(target, 1, context=512)
    target.fast = own
    whole, device, _ = round_seconds(Decoder(target), SamplingParams(temperature=0), 512)
    rows |= {"token": 1e3 * whole, "token on the device": 1e3 * device}
    ratios = whole / seconds, device / seconds
    print(
        f"plain decoding {1e3 * whole:.2f} ms per token, {1e3 * device:.2f} on the device: {ratios[0]:.2f}, {ratios[1]:.2f} of "
        "the weights' time (aim 1.4)"
    )
    print("passes, ms:", {key: round(value, 2) for key, value in rows.items() if key.startswith("pass")})
    ratio, other = (rows["pass of 64"] / rows[key] for key in ("pass of 1", "pass of 1, library"))
    print(f"pass of 64 nodes ÷ plain pass: {ratio:.3f} (aim 1.15); ÷ plain pass with the library's products: {other:.3f}")
    return rows


def invariant() -> dict[str, float]:
    """Compare batch-invariant passes with usual ones: times, and how many greedy texts equal plain decoding's."""
    rows: dict[str, float] = {}
    for name, shape in {"7B": SHAPE_7B, "135M": SHAPE_135M}.items():
        target = random_model(shape)
        bodies = {kind: FusedBody(target.lean, kind == "invariant") for kind in ("usual", "invariant")}
        for _ in range(3):  # in turn, and the least of each
            for kind, body in bodies.items():
                target.fast = body
                times = {f"{nodes} nodes": pass_seconds(target, nodes, context=512) for nodes in (1, 8, 16, 32, 64, 128)}
                times |= {f"{nodes} nodes at 4096": pass_seconds(target, nodes, context=4096) for nodes in (1, 64)}
                times |= {f"prompt of {length}": prompt_seconds(target, length) for length in (100, 512, 2048)}
                for key, seconds in times.items():
                    rows[f"{name} {kind} {key}"] = min(rows.get(f"{name} {kind} {key}", 1e9), 1e3 * seconds)
        for key in times:
            usual, own = (rows[f"{name} {kind} {key}"] for kind in bodies)
            print(f"{name:5} {key:20} usual {usual:8.3f} ms, invariant {own:8.3f} ms ({own / usual:.3f})", flush=True)
    # A random model with its own first layers as a draft; the first tokens after random prompts are often near-ties.
    target = random_model({**SHAPE_7B, "num_hidden_layers": 8, "initializer_range": 0.03})
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, 49152, (length,), generator=generator).tolist() for length in (5, 20, 77, 130, 250, 256, 300, 600)
    ]
    rows |= same_texts("random", Decoder(target), early_exit(target, 7), prompts)
    try:
        plain = polydraft.load("smollm2", "none", device="cuda")
    except PolydraftError as error:
        print(f"without the bundled model: {error}")
        return rows
    head = load_draft("smollm2-head", Loaded(plain.target, plain.tokenizer, plain.eos_token_ids))
    prompts = [plain.encode(text, chat=True) for text in sample_prompts(OPTIONS.prompts, 8)]
    return rows | same_texts("smollm2", plain, head, prompts)


def same_texts(name: str, plain: Decoder, draft: object, prompts: list[list[int]]) -> dict[str, int]:
    """Count greedy texts that are those of plain decoding of one text at a time."""
    rows = {}
    target = cast(HFModel, plain.target)
    for kind in ("invariant", "usual"):
        target.fast = FusedBody(target.lean, kind == "invariant")
        expected = [greedy(plain.replace(), [prompt])[0] for prompt in prompts]
        for tree in ("none", "chain:3", "4x2x2x1x1", "best:64x6"):
            topology = parse_tree(tree)
            decoder = plain.replace(drafter=TreeDrafter(draft, topology) if tree != "none" else None)
            ways = {"alone": [greedy(decoder, [prompt])[0] for prompt in prompts], "in a batch": greedy(decoder, prompts)}
            same = {way: sum(one == two for one, two in zip(texts, expected, strict=True)) for way, texts in ways.items()}
            rows |= {f"{name} {kind} {tree} {way}": count for way, count in same.items()}
            print(f"{name} {kind:9} tree {tree:10} texts as plain, of {len(prompts)}: {same}", flush=True)
    return rows


def greedy(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    results = decoder.generate(prompts, sampling=SamplingParams(temperature=0), max_new_tokens=96, seed=0)
    return [result.token_ids for result in results]


def prompt_seconds(target: HFModel, length: int) -> float:
    """Return the time in which a prompt is read."""
    context, ids = target.start(1, length), torch.randint(0, 1000, (length,)).tolist()

    def read() -> None:
        with torch.inference_mode():
            context.rewind([0])
            context.prefill([ids])

    return event_seconds(read, repeat=3, together=1)


def context() -> dict[str, float]:
    """Time of a tree pass at growing contexts."""
    target = random_model(SHAPE_7B)
    rows = {}
    for length in (512, 4096, 16384, 32000):
        rows[str(length)] = 1e3 * pass_seconds(target, 64, context=length)
        rows[f"{length} plain"] = 1e3 * pass_seconds(target, 1, context=length)
        rows[f"512 in a buffer of {length}"] = 1e3 * pass_seconds(target, 64, context=512, span=length + 64)
    print("tree pass of 64 nodes at a context of ..., ms:", {key: round(value, 2) for key, value in rows.items()})
    return rows


def parts() -> dict[str, float]:
    """Pieces of a round with a head of the shipped shape under a 7B-shaped model."""
    target = InflatedModel(random_model(SHAPE_135M), "7b")
    head = random_head(target)
    rows = {}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        for tree, topology in (("4x2x2x1x1", parse_tree("4x2x2x1x1")), ("64 nodes", parse_tree("best:64x6"))):
            label = f"T={temperature:g} {tree}"
            drafter = TreeDrafter(head, topology)
            rows |= {f"{label} {key}": value for key, value in pieces(target, drafter, params).items()}
    for key, value in rows.items():
        print(f"{key:45} {value:8.3f} ms")
    return rows


def pieces(target: HFModel, drafter: TreeDrafter, params: SamplingParams) -> dict[str, float]:
    """Time what a round consists of, each as a graph of its own, and the whole of it."""
    decoder = Decoder(target, drafter)
    whole, device, workspace = round_seconds(decoder, params, 512)
    walk = workspace.session.resolve_walk(AUTO)
    uniforms_BU = torch.rand(1, workspace.num_uniforms(walk), dtype=torch.float64, device="cuda")
    session = workspace.session
    with torch.inference_mode():
        lengths = [context.lengths_B.clone() for context in workspace.contexts]

        def restore() -> None:
            for context, length in zip(workspace.contexts, lengths, strict=True):
                context.lengths_B.copy_(length)

        def propose():
            restore()
            return session.propose(workspace.state.tail_B2, uniforms_BU)

        drafting = graph_seconds(propose)
        draft = propose()
        features_BNF = workspace.memory.context.extend(draft.tokens_BN, draft.block())
        scoring = graph_seconds(lambda: target.head(workspace.memory.context.extend(draft.tokens_BN, draft.block())))

        def verify():
            restore()
            target_probs = distributions(workspace.state, features_BNF)
            return walk.run(session.scheme, draft, target_probs, uniforms_BU[:, session.num_uniforms :])

        verifying = graph_seconds(verify)
        head_pass = graph_seconds(lambda: target.head(features_BNF))
    return {
        "round": 1e3 * whole,
        "round on the device": 1e3 * device,
        "draft level": 1e3 * drafting / session.depth,
        "target pass and head": 1e3 * scoring,
        "walk": 1e3 * (verifying - head_pass),
        "walk, commit, book-keeping": 1e3 * (whole - drafting - scoring),
    }


def gpu_tests() -> dict[str, str]:
    """The tests that need a GPU, in several processes: most of their time is compiling."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    listed = subprocess.run([*command, "--collect-only", "tests/gpu"], capture_output=True, text=True)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        raise SystemExit(f"no test was found: {listed.stdout[-500:]}{listed.stderr[-500:]}")

    def run(part: int) -> str:
        done = subprocess.run([*command, *names[part::_PROCESSES]], capture_output=True, text=True)
        marks = "".join(line.split()[0] for line in done.stdout.splitlines() if line.endswith("%]"))
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        result = f"{marks.count('.')} passed, {marks.count('s')} skipped, exit {done.returncode} {' '.join(failed)}"
        print(f"part {part + 1} of {_PROCESSES}, {len(names[part::_PROCESSES])} tests: {result}", flush=True)
        return result

    with ThreadPoolExecutor(_PROCESSES) as pool:
        return dict(zip(map(str, range(_PROCESSES)), pool.map(run, range(_PROCESSES)), strict=True))


def random_model(shape: dict[str, int]) -> HFModel:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return HFModel(model)


def random_head(target: HFModel) -> object:
    """Return a random head of the shipped one's size: its cost is real, its distributions are not."""
    sizes = {"num_heads": 9, "num_key_heads": 3, "head_size": 64, "mlp_size": 1536, "window": 384}
    shape = HeadShape(hidden_size=target.hidden_size, taps=(10, 20), **sizes)
    target.tap(shape.taps)
    known = PartialVocabulary(torch.arange(0, 49152, 4, device="cuda"), target.vocab_size)
    return new_head(shape, target, known, "random").to("cuda", torch.bfloat16).requires_grad_(False)


def round_seconds(decoder: Decoder, params: SamplingParams, length: int) -> tuple[float, float, Workspace]:
    """Return the mean time of free-running rounds as the user sees it, that of one on the device alone, and the workspace."""
    prompt = torch.randint(10, 30000, (length + 8,), generator=torch.Generator().manual_seed(1)).tolist()
    warm_up = decoder.stream(prompt, sampling=params, max_new_tokens=400, seed=0)
    for _ in range(80):  # so that the rounds that count, and some more, find captures of their kind
        warm_up.engine.step()
    warm_up.close()
    stream = decoder.stream(prompt, sampling=params, max_new_tokens=400, seed=0)
    run, workspace = stream.engine, stream.engine.workspace
    for _ in range(10):
        run.step()
    start = time.perf_counter()
    for _ in range(50):
        run.step()
    seconds = (time.perf_counter() - start) / 50
    assert run.stats.replayed_rounds == 60 and not run.done, (run.stats.replayed_rounds, workspace.launcher.graphs.obstacle)
    capture = next(reversed(workspace.launcher.graphs._captures.values()))
    return seconds, event_seconds(capture.graph.replay), workspace


def pass_seconds(target: HFModel, nodes: int, context: int, span: int | None = None) -> float:
    """Return the time of one pass of `nodes` tokens and the output head, as a graph."""
    workspace = Workspace(target, Plain(), RowParams((SamplingParams(),)))
    memory = workspace.memory.context
    with torch.inference_mode():
        memory.places = 256
        memory.reserve((span or context) + 256)
        memory.rewind([context])
        memory.span = memory.capacity if span is None else min(memory.capacity, span + 192)
        block = parse_tree("none" if nodes == 1 else f"fork:{nodes - 1}x1").tables(torch.device("cuda"))
        tokens_BT = torch.randint(0, 1000, (1, nodes), device="cuda")
        shape = Block(0, block.depths_N[None], block.ancestors_NN[None])
        return graph_seconds(lambda: target.head(memory.extend(tokens_BT, shape)))


def graph_seconds(function: Callable[[], object]) -> float:
    """Capture a function and return the median time of its replays."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return event_seconds(graph.replay)


def event_seconds(function: Callable[[], object], repeat: int = 8, together: int = 4) -> float:
    """Return the median time of one call when several follow each other, as rounds do that run ahead."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(together):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / together)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return bytes read and written a second by a large copy."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / event_seconds(lambda: target.copy_(source))


SECTIONS: dict[str, Callable[[], object]] = {
    "tests": gpu_tests,
    "limits": limits,
    "parts": parts,
    "invariant": invariant,
    "context": context,
}

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
