"""Ways to make your own model faster: the table that README shows and `polydraft info --target` prints.

The figures are from logs 39 to 45 (docs/log).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way: what you have, the options or the command to use, what it takes, and how much faster it is."""

    have: str
    options: str = ""
    """Options of any command that loads a model."""
    command: str = ""
    """Command to run once, in advance."""
    by_default: bool = False
    """Whether commands do this even without the options."""
    takes: str
    gives: str


COPY = Way(
    have="nothing but the model",
    options="--draft int8",
    by_default=True,
    takes="a byte of memory per weight",
    gives=(
        "1.46× at T=0, 1.50× at T=1 (Qwen2.5-Coder-1.5B in float32, two Arm cores; in bf16 1.12×); 1.24× and 1.26× (7B shape "
        "in bf16, H200; on a GPU, from 4B weights on)"
    ),
)
INT8 = Way(
    have="little memory, and a CPU",
    options="--dtype int8",
    takes="less memory; it is a slightly different model",
    gives=(
        "3.7× float32 (Qwen2.5-Coder-1.5B, two Arm cores, both without a draft); n-grams of the text add 1.03× at T=0, 1.05× "
        "at T=1, and pause where they would lose"
    ),
)
TRAIN = Way(
    have="minutes on a GPU",
    command="polydraft train head --target org/my-model --out my-model-head",
    takes="12 minutes and 0.13 GB of disk for Qwen2.5-Coder-1.5B (8M tokens, 1,100 steps, H200); it estimates yours first",
    gives="3.48× at T=0, 2.62× at T=1 (the same model, HumanEval, H200); used automatically from then on",
)
LAYERS = Way(
    have="MTP layers in the checkpoint",
    options="--draft mtp",
    by_default=True,
    takes="the layer's memory",
    gives="not measured",
)
WAYS = (
    COPY,
    INT8,
    LAYERS,
    Way(
        have="a public head (EAGLE, EAGLE-3, P-EAGLE, DFlash, a Gemma 4 assistant)",
        options="--draft org/head",
        takes="the head's memory",
        gives="not measured",
    ),
    Way(
        have="a small model of the same family, or of another",
        options="--draft org/small-model",
        takes="the small model's memory",
        gives="not measured; `polydraft tune` measures your pair",
    ),
    Way(
        have="most of the answer, such as a file to rewrite",
        options="--prediction FILE",
        takes="nothing",
        gives="7.17× at T=0 if a tenth of its lines change, 0.99× if it is wrong (SmolLM2-135M in float32, two Arm "
        "cores); 14.7× beside a head (7B shape in bf16, H200)",
    ),
    TRAIN,
)
