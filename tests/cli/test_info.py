import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import polydraft
from polydraft import operations
from polydraft.advice import WAYS
from polydraft.draft import DRAFTERS
from polydraft.models import FAMILIES
from polydraft.models.heads.head_folder import new_head, save_head
from polydraft.models.hf import HFModel
from polydraft.options import LoadOptions
from polydraft.profile import Pick, Profile, origin_of
from polydraft.verify import SCHEMES
from stand_in import head_shape


def test_info_lists_everything_that_can_be_chosen(invoke) -> None:
    code, out, _ = invoke("info")
    assert code == 0
    for name in [*SCHEMES, *DRAFTERS, *FAMILIES, "smollm2", "torch", "cpu"]:
        assert name in out


@pytest.mark.parametrize(
    ("place", "dtype", "bundled", "own", "with_ngrams", "copy"),
    [
        ("cpu", torch.float32, "dynamic:8", "dynamic:8", "dynamic:8", "chain:4"),
        ("cpu", torch.bfloat16, "dynamic:64", "dynamic:64", "dynamic:64", "chain:3"),
        (
            "cuda",
            torch.bfloat16,
            "dynamic:32:6:fixed/load:4x2x1x1x1",
            "dynamic:64:7:fixed/load:4x2x1x1x1",
            "4x2x2x1x1",
            "load:2x1x1",
        ),
    ],
)
def test_info_says_which_trees_are_used_here(
    invoke,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    dtype: torch.dtype,
    bundled: str,
    own: str,
    with_ngrams: str,
    copy: str,
) -> None:
    for module in ("polydraft.loading", "polydraft.models.placement"):
        monkeypatch.setattr(f"{module}.resolve_device", lambda asked: torch.device(place))
        monkeypatch.setattr(f"{module}.resolve_dtype", lambda asked, place: dtype)
    code, out, _ = invoke("info", "--json")
    assert code == 0
    assert json.loads(out)["default trees"] == {
        "smollm2": f"draft smollm2-head, tree {bundled}",
        "your own pair": f"draft your draft, tree {own}",
        "n-grams too": f"draft your draft, tree {with_ngrams}, drafter lookup+model",
        "n-grams alone": "drafter lookup",
        "your model alone": f"draft int8, tree {copy}",
        "int8 model alone": "drafter suffix",
    }


@pytest.mark.parametrize(
    ("backends", "said"),
    [(("triton", "native"), "triton, native, reference"), (("native",), "native, reference"), ((), "reference")],
)
def test_info_says_which_backends_may_be_chosen(invoke, backends: tuple[str, ...], said: str) -> None:
    with operations.using(*backends):
        assert json.loads(invoke("info", "--json")[1])["machine"]["backends"] == said


def test_info_says_which_native_code_runs(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(invoke("info", "--json")[1])["machine"]["native code"]
    assert said.startswith(("prebuilt ", "compiled here: ", "none: "))
    monkeypatch.setenv("POLYDRAFT_NATIVE", "0")
    assert "native code      none: POLYDRAFT_NATIVE is 0" in invoke("info")[1]
    with operations.using("triton"):
        assert "none: the backend is switched off" in invoke("info")[1]


def test_info_as_json(invoke) -> None:
    code, out, _ = invoke("info", "--json")
    facts = json.loads(out)
    assert code == 0 and set(facts["schemes"]) == {"coupled", *SCHEMES}


SHIPPED = Path(polydraft.__file__).parent / "drafts" / "smollm2-head"
ON_CPU = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture
def about(invoke):
    """Return a function that says what `info` knows of a target."""

    def ask(target: object, *options: str) -> dict:
        code, out, _ = invoke("info", "--target", str(target), "--json", *(options or ON_CPU))
        assert code == 0
        return json.loads(out)

    return ask


def config_only(folder: Path, kind: str, **sizes: int) -> Path:
    """Write a folder of a large model whose weights nobody may read."""
    folder.mkdir()
    AutoConfig.for_model(kind, **sizes).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    return folder


def gguf_file(folder: Path) -> Path:
    pytest.importorskip("gguf")
    from models.gguf_cases import tiny, write

    write(folder / "mine.gguf", tiny())
    return folder / "mine.gguf"


def test_a_target_is_told_in_few_lines(invoke, roomy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = invoke("info", "--target", roomy, *ON_CPU)
    lines = out.splitlines()
    assert (code, err) == (0, "") and len(lines) <= 25
    assert "llama, 3 layers" in out and "our own kernels, in C" in out and "context of 1,024" in out
    assert "draft int8, tree chain:4: no draft is known, so its own weights in int8 draft" in out
    for way in WAYS:
        assert way.options in out
    assert f"polydraft train head --target {roomy}" in out and "schemes" not in out


def test_it_is_what_loading_does(about, roomy: str) -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        told, made = about(roomy, "--device", "cpu", "--dtype", dtype), polydraft.load(roomy, device="cpu", dtype=dtype)
        model = made.target
        assert isinstance(model, HFModel)
        parameters = list(model.hf_model.parameters())
        assert (told["layers"], told["vocabulary"]) == (model.num_layers, model.vocab_size)
        assert told["context"] == model.max_positions and told["dtype"] == dtype
        assert told["runs by"].startswith("our own kernels") == (model.fast is not None)
        if dtype == "int8":
            assert told["auto"]["drafter"] == made.drafter.name == "suffix"
        else:
            assert told["weights"] == sum(part.numel() for part in parameters)
            assert told["bytes"][dtype] == sum(part.nbytes for part in parameters)
            assert told["auto"]["draft"] == made.drafter.model.name == "int8"


def test_weights_are_not_read(about, tmp_path: Path) -> None:
    told = about(config_only(tmp_path / "large", "llama", num_hidden_layers=90, hidden_size=16384, intermediate_size=53248))
    assert told["layers"] == 90 and told["weights"] > 3e11
    assert told["fits"] is False and told["auto"] == {
        "draft": None,
        "drafter": None,
        "tree": None,
        "why": "it does not fit into memory",
    }


def test_a_gguf_file_is_known_by_its_header(about, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    file = gguf_file(tmp_path)
    told = about(file)
    assert (told["type"], told["layers"], told["converted"]) == ("qwen2", 2, False)
    assert not (tmp_path / "cache" / "gguf").exists()


def test_a_head_is_found_if_it_fits(about, roomy: str, tmp_path: Path) -> None:
    folder, beside = shutil.copytree(roomy, tmp_path / "mine"), tmp_path / "mine-head"
    shutil.copytree(SHIPPED, beside)
    told = about(folder)
    assert told["found"]["draft"] is None and told["auto"]["draft"] == "int8"
    target = HFModel(AutoModelForCausalLM.from_pretrained(roomy))
    save_head(new_head(head_shape(target, mlp_size=32, window=64), target, None, "head"), beside, "", {})
    told = about(folder)
    assert told["found"]["draft"] == told["auto"]["draft"] == str(beside)
    assert told["auto"]["tree"] == "dynamic:8" and "beside" in told["auto"]["why"]


def test_what_was_tuned_is_found(about, roomy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("cpu")
    origin = origin_of(LoadOptions(roomy), "none", place, torch.float32)
    pick = Pick(temperature=0.0, batch=1, tree="none", drafter="lookup", speedup=1.5)
    Profile(origin=origin, picks=[pick]).write(tmp_path / "profile.json")
    monkeypatch.setenv("POLYDRAFT_PROFILE", str(tmp_path / "profile.json"))
    told = about(roomy)
    assert told["found"]["tuned"]["speedup"] == 1.5
    assert (told["auto"]["draft"], told["auto"]["drafter"]) == ("none", "lookup") and "1.50× plain" in told["auto"]["why"]


def test_a_config_from_a_hub_will_do(about, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--mine"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    config = AutoConfig.for_model("qwen3", num_hidden_layers=5)
    config.save_pretrained(folder / "snapshots" / ("0" * 40))
    told = about("org/mine")
    assert (told["type"], told["layers"], told["converted"]) == ("qwen3", 5, None)


def test_types_by_other_code_and_types_that_are_refused(about, invoke, tmp_path: Path) -> None:
    recurrent = about(config_only(tmp_path / "mamba", "mamba"))
    assert "Hugging Face's modules" in recurrent["runs by"] and "recurrent" in recurrent["auto"]["why"]
    assert "recurrent" in recurrent["ways"][0]["not here"]
    refused = about(config_only(tmp_path / "gemma", "gemma3_text", use_bidirectional_attention=True))
    assert "not causal" in refused["refused"] and "auto" not in refused
    assert "refused   model type" in invoke("info", "--target", str(tmp_path / "gemma"), *ON_CPU)[1]


def test_quantised_weights_are_named(about, roomy: str, tmp_path: Path) -> None:
    folder = shutil.copytree(roomy, tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    told = about(folder)
    assert "gptqmodel" in told["runs by"] and "quantised by gptq" in told["auto"]["why"]
    assert "quantised by gptq already" in about(folder, "--device", "cpu", "--dtype", "int8")["refused"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "there is no such folder"),
        (lambda path: path.mkdir(), "its folder has no config.json"),
        (lambda path: (config_only(path, "llama") / "model.safetensors").unlink(), "its folder has no weights"),
        (lambda path: config_only(path, "t5"), "holds no loadable model"),
    ],
    ids=["nothing there", "empty folder", "no weights", "no causal model"],
)
def test_what_is_no_model_is_one_line(invoke, tmp_path: Path, make, expected: str) -> None:
    make(tmp_path / "mine")
    code, out, err = invoke("info", "--target", str(tmp_path / "mine"))
    assert (code, out) == (2, "") and expected in err and err.count("\n") == 1


def test_a_file_that_is_cut_short_is_one_line(invoke, tmp_path: Path) -> None:
    file = gguf_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    code, out, err = invoke("info", "--target", str(file))
    assert (code, out) == (1, "") and "is cut short" in err and err.count("\n") == 1
