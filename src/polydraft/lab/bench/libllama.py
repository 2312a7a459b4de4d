"""llama.cpp as a shared library, called through its C functions: your own build, or the one in the wheel `xllamacpp`.

llama.cpp's parameter structures change from version to version, so we do not rely on their layout. We get them from its own
functions and pass them back, as blocks of bytes larger than any of them. That works because a structure of more than two words
is returned through a pointer, and passed through one (AAPCS64 on Arm) or after all other arguments (System V on x86-64): the
callee takes as many bytes as it needs. We write a single number into them, the size of the context, and then ask the context
whether it arrived.
"""

import ctypes
import importlib.util
import platform
import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from polydraft.errors import FailureError, UsageError, first_line
from polydraft.sampling import SamplingParams

VARIABLE = "POLYDRAFT_LLAMA_CPP"
"""Environment variable that names the library, or a folder with it."""
_FILES = ("libllama.so", "libllama.dylib")
_BELOW = (".", "lib", "bin", "build/bin", "build/lib")
"""Subfolders that may hold it, of an installation or a build."""
_MACHINES = ("x86_64", "aarch64", "arm64")
"""Architectures that pass structures as described above."""
SEEDS = 2**32 - 1
"""Number of seeds: they have 32 bits, and the highest one means "choose at random"."""


class _Block(ctypes.Structure):
    """A block of bytes that holds a structure of any version."""

    _fields_ = (("words", c_uint64 * 128),)


class _Batch(ctypes.Structure):
    """Tokens of one pass, in the layout used since 2024; `_ask_for_all` checks it before relying on it."""

    _fields_ = (
        ("count", c_int32), ("tokens", c_void_p), ("embeddings", c_void_p), ("positions", c_void_p),
        ("num_sequences", c_void_p), ("sequences", c_void_p), ("outputs", c_void_p), ("rest", c_uint64 * 121),
    )  # fmt: skip


assert ctypes.sizeof(_Block) == ctypes.sizeof(_Batch)
_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG, c_void_p)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_default_params": (_Block, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, _Block)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_context_default_params": (_Block, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, _Block)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_n_threads": (c_int32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_batch_get_one": (_Batch, (c_void_p, c_int32)),
    "llama_batch_init": (_Batch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (c_int32, (c_void_p, _Batch)),
    "llama_synchronize": (None, (c_void_p,)),
    "llama_get_logits_ith": (c_void_p, (c_void_p, c_int32)),
    "llama_sampler_chain_default_params": (c_uint64, ()),  # a structure of one byte
    "llama_sampler_chain_init": (c_void_p, (c_uint64,)),
    "llama_sampler_chain_add": (None, (c_void_p, c_void_p)),
    "llama_sampler_init_greedy": (c_void_p, ()),
    "llama_sampler_init_temp": (c_void_p, (c_float,)),
    "llama_sampler_init_top_k": (c_void_p, (c_int32,)),
    "llama_sampler_init_top_p": (c_void_p, (c_float, c_size_t)),
    "llama_sampler_init_dist": (c_void_p, (c_uint32,)),
    "llama_sampler_sample": (c_int32, (c_void_p, c_void_p, c_int32)),
    "llama_sampler_free": (None, (c_void_p,)),
}
_SINCE = "llama.cpp of June 2025 or later"
_SILENCE = _LOG(lambda level, text, data: None)
"""Replaces its log, which would go to stderr; global, because llama.cpp keeps the pointer."""


def find_build(place: str) -> Path:
    """Return the library that a user names by its file or folder."""
    path = Path(place).expanduser()
    if path.is_file():
        return path
    if found := found_below(path, *_FILES):
        return found
    what = f"folder {place!r} has no {_FILES[0]}" if path.is_dir() else f"there is no library or folder {place!r}"
    raise UsageError(f"{what}; give the folder where cmake built llama.cpp with -DBUILD_SHARED_LIBS=ON, such as build/bin")


def found_below(folder: Path, *names: str) -> Path | None:
    """Return the first of these files that is in the folder of an installation or a build."""
    files = (folder / below / name for below in _BELOW for name in names)
    return next((file for file in files if file.is_file()), None)


def find_wheel() -> Path:
    """Return the shared object of the package `xllamacpp`, without importing it."""
    spec = importlib.util.find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("xllamacpp*.so"))]
    if not files:
        raise UsageError("the package xllamacpp is not installed; get it with: pip install --no-deps xllamacpp")
    return files[0]


def _opened(file: Path) -> ctypes.CDLL:
    if platform.machine() not in _MACHINES:
        raise UsageError(f"llama.cpp's library cannot be called on {platform.machine()!r}; allowed: {', '.join(_MACHINES)}")
    try:
        library = ctypes.CDLL(str(file))
    except OSError as problem:
        raise UsageError(f"cannot load {str(file)!r} ({first_line(problem)}); build it on this machine") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise UsageError(f"{str(file)!r} has no function {name}; use {_SINCE}") from None
        function.restype, function.argtypes = result, arguments
    if library.llama_supports_gpu_offload():  # whose settings are in a structure of unknown layout
        raise UsageError(f"{str(file)!r} is built for a GPU, but only CPUs can be measured; use a build without GPU support")
    library.llama_log_set(_SILENCE, None)
    library.llama_backend_init()
    return library


class LlamaCpp:
    """A model with a context for one text, in the library that `find_build` or `find_wheel` returned.

    Prompts use the given number of threads too; llama.cpp's default for them is every core.
    """

    def __init__(self, file: Path, weights: Path, *, capacity: int, threads: int) -> None:
        self._library = library = _opened(file)
        model = library.llama_model_load_from_file(str(weights).encode(), library.llama_model_default_params())
        if not model:
            raise FailureError(f"{str(file)!r} cannot read {weights.name}; use {_SINCE}, built for this CPU")
        weakref.finalize(self, library.llama_model_free, model)
        params = library.llama_context_default_params()
        ctypes.cast(ctypes.byref(params), ctypes.POINTER(c_uint32))[0] = capacity  # the first member in all versions
        self._context = context = library.llama_init_from_model(model, params)
        if not context:
            raise FailureError(f"{str(file)!r} cannot open a context of {capacity} tokens; use fewer or shorter prompts")
        weakref.finalize(self, library.llama_free, context)  # freed before the model: finalizers run newest first
        library.llama_set_n_threads(context, threads, threads)
        if not capacity <= library.llama_n_ctx(context) < 2 * capacity + 512 or library.llama_n_threads(context) != threads:
            raise UsageError(f"{str(file)!r} has an unknown parameter layout; use {_SINCE}")
        self._most = int(library.llama_n_batch(context))
        self._memory = library.llama_get_memory(context)
        self.instructions = library.llama_print_system_info().decode(errors="replace").strip(" |\n")
        """What llama.cpp says it was compiled for."""

    def reset(self) -> None:
        """Forget the text."""
        self._library.llama_memory_clear(self._memory, False)

    def cut(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        assert self._library.llama_memory_seq_rm(self._memory, 0, length, -1)

    def read(self, tokens: Sequence[int], *, every_output: bool = False) -> None:
        """Append tokens to the text and compute the logits after the last one, or after each, in one pass."""
        assert not every_output or len(tokens) <= self._most
        for start in range(0, len(tokens), self._most):
            part = tokens[start : start + self._most]
            held = (c_int32 * len(part))(*part)  # must outlive the call of llama_decode
            batch = self._library.llama_batch_get_one(held, len(part))
            flags = (ctypes.c_int8 * len(part))(*[1] * len(part))
            if every_output:
                self._ask_for_all(batch, flags)
            if code := self._library.llama_decode(self._context, batch):
                raise FailureError(f"llama.cpp's decoding of {len(part)} tokens failed with code {code}; use shorter prompts")
        self._library.llama_synchronize(self._context)
        assert not every_output or all(self._library.llama_get_logits_ith(self._context, i) for i in range(len(tokens)))

    def generate(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> Iterator[int]:
        """Yield the tokens of a new text endlessly, one per pass."""
        self.reset()
        sampler = self._sampler(params, seed)
        try:
            tokens = prompt
            while True:
                self.read(tokens)
                tokens = [self._library.llama_sampler_sample(sampler, self._context, -1)]
                yield tokens[0]
        finally:
            self._library.llama_sampler_free(sampler)

    def _sampler(self, params: SamplingParams, seed: int) -> Any:
        """Return a chain of llama.cpp's samplers with the distribution of `params`."""
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        if params.temperature == 0:
            steps = [library.llama_sampler_init_greedy()]
        else:
            steps = [library.llama_sampler_init_temp(params.temperature)]
            steps += [library.llama_sampler_init_top_k(params.top_k)] if params.top_k else []
            steps += [library.llama_sampler_init_top_p(params.top_p, 1)] if params.top_p < 1 else []
            steps += [library.llama_sampler_init_dist(seed % SEEDS)]
        for step in steps:
            library.llama_sampler_chain_add(chain, step)  # takes ownership of the step
        return chain

    def _ask_for_all(self, batch: _Batch, flags: Any) -> None:
        """Let a pass compute the logits of all its tokens."""
        probe = self._library.llama_batch_init(1, 0, 1)  # allocates everything but embeddings
        room = (probe.tokens, probe.positions, probe.num_sequences, probe.sequences, probe.outputs)
        fits = all(room) and not probe.embeddings and batch.count == len(flags)
        self._library.llama_batch_free(probe)
        if not fits:
            raise UsageError("this llama.cpp has an unknown batch layout; use an earlier one")
        batch.outputs = ctypes.addressof(flags)
