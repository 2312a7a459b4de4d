"""Names on a hub, without a network; nothing here asks one."""

import re
import socket

import pytest
import torch
from huggingface_hub import constants

from polydraft.errors import UsageError
from polydraft.models.finding import hub_options
from polydraft.models.loading import check_name, load_model
from polydraft.train.corpus_cache import load_tokenizer

NAME = "nobody/nothing"


@pytest.fixture
def asked(monkeypatch):
    """Which hosts were looked for, on a machine that finds none, with the hub's client at liberty to try."""
    hosts = []

    def getaddrinfo(host, *_args, **_options):
        hosts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    return hosts


@pytest.mark.parametrize(
    "load",
    [lambda: load_model(NAME, torch.device("cpu"), torch.float32), lambda: load_tokenizer(NAME)],
    ids=["model", "tokenizer"],
)
def test_without_a_network_a_name_is_refused_at_once(load, asked):
    with pytest.raises(UsageError, match=f"cannot load .*{NAME}") as error:
        load()
    # Our look, and one that the client takes in any case; when it tries again and again there are many more.
    assert 1 <= len(asked) <= 2 and asked[0] in constants.ENDPOINT
    assert "\n" not in str(error.value)
    assert re.search("allowed: smollm2, a folder, (a GGUF file, )?or a hub name", str(error.value))


def test_what_was_downloaded_is_still_found(tmp_path, asked, monkeypatch):
    seen = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name, **options: seen.append((name, options)))
    load_tokenizer(NAME)
    load_tokenizer(str(tmp_path))
    assert seen == [(NAME, {"local_files_only": True}), (str(tmp_path), {})]


def test_folders_proxies_and_offline_mode_need_no_look(tmp_path, asked, monkeypatch):
    assert hub_options(str(tmp_path)) == {}
    with monkeypatch.context() as patch:
        patch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
        assert hub_options(NAME) == {}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_options(NAME) == {} and not asked


@pytest.mark.parametrize("endpoint", ["https://hub.example", "http://hub.example:8080/below"])
def test_a_hub_that_is_found_is_asked(endpoint, asked, monkeypatch):
    found = []
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address: found.append(address))
    assert hub_options(NAME) == {}
    assert found == [("hub.example", 8080 if "8080" in endpoint else 443)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (" ", "empty draft name"),
        ("~/none", "no such folder"),
        ("./none", "no such folder"),
        (__file__, "is a file, but not in"),
    ],
)
def test_what_cannot_be_a_name_is_refused(name, message):
    with pytest.raises(UsageError, match=f"{message}.*allowed: this"):
        check_name("draft", name, "this")
