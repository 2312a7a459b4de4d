"""Operations of verifying one round on a device that the host may not look at, by scheme and walk; counted on the CPU.

python benchmarks/operations.py

In a CUDA graph small kernels take a few µs each, whatever they do, so their number is most of the cost. Views are not
counted, and neither is what makes the target's logits. Counted are also elements written, in rows of the vocabulary.
"""

import argparse
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polydraft.devices import values_hidden
from verification import PAIRS, prepare


class OperationCounter(TorchDispatchMode):
    """Count operators that compute something, and the elements that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not view and not any(name in func.__name__ for name in ("empty", "detach", "scalar_tensor")):
            self.counts[func.__name__] += 1
            outputs = result if isinstance(result, tuple | list) else [result]
            self.elements += sum(output.numel() for output in outputs if isinstance(output, torch.Tensor))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--tree", default="4x2x2x1x1")
    parser.add_argument("--only", help="a scheme, whose operators are listed one by one")
    parser.add_argument("--walk", default="block")
    options = parser.parse_args()
    options.device = "cpu"
    torch.set_grad_enabled(False)
    print("| scheme + walk, temperature | operations | vocabularies written |")
    print("|---|---|---|")
    for scheme, walk, temperature in PAIRS:
        if options.only and (scheme, walk) != (options.only, options.walk):
            continue
        counter = count(scheme, walk, temperature, options)
        rows = counter.elements / options.vocabulary
        print(f"| {scheme} + {walk}, T={temperature:g} | {counter.counts.total()} | {rows:.0f} |", flush=True)
        if options.only:
            print("\n".join(f"{number:5d} {name}" for name, number in counter.counts.most_common()))


def count(scheme: str, walk: str, temperature: float, options: argparse.Namespace) -> OperationCounter:
    """Run one round as a device does that may not be looked at."""
    with values_hidden():
        verify = prepare(scheme, walk, temperature, options)
        turn = verify.fresh()
        turn()  # tables that are made once
        with OperationCounter() as counter:
            turn()
    return counter


if __name__ == "__main__":
    main()
