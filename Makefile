# Every command a contributor or CI needs, one line each; `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off

# The versions that are tested together on a CPU. On a GPU machine choose your own build, e.g. `make setup TORCH=torch==2.11.0`;
# a CUDA build of torch brings the triton that fits it, and TRITON is then not used.
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.8.0

# Tests use many small operators, for which a pool of threads costs more than it gives.
TEST_THREADS ?= 1
PYTEST := OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest --durations=15

.DEFAULT_GOAL := help
.PHONY: help setup train test test-gpu test-slow fmt lint types check bench docs

help:       ## show this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with all that training and the tests need (again only when pyproject.toml changes)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "make setup: needs Python 3.11 or newer, got %s; use PYTHON=path/to/python3" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("triton")' 2>/dev/null || (set -x; $(PIP) --no-deps '$(TRITON)')
	@# What is installed now is a constraint on all that follows: no dependency may replace torch or triton.
	@$(BIN)/python -c 'import importlib.metadata as m; [print(p + "==" + m.version(p)) for p in ("torch", "triton")]' > $(VENV)/constraints.txt
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[torchtitan,dev]'
	@touch $@

train: setup  ## train kimi_linear_tiny on the default text
	$(BIN)/openkda train --config kimi_linear_tiny

test: setup  ## the tests, without the slow ones
	$(PYTEST) -m 'not slow and not interpreter'
	@# Triton decides when it is imported whether kernels are interpreted, so they have a process of their own.
	TRITON_INTERPRET=1 $(PYTEST) -m 'interpreter and not slow' tests/kda/kernels

test-gpu: setup  ## the kernels on this machine's GPU
	$(PYTEST) -m 'gpu or interpreter' tests

test-slow: setup  ## the slow tests
	@# Exit status 5 says that no test was chosen: there may be no slow kernel test.
	TRITON_INTERPRET=1 $(PYTEST) -m 'slow and interpreter' tests/kda/kernels || [ $$? -eq 5 ]
	$(PYTEST) -m 'slow and not interpreter'

fmt: setup  ## format the code and sort the imports
	$(BIN)/ruff check --select I --fix --quiet .
	$(BIN)/ruff format .

lint: setup  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## check the types in src
	$(BIN)/pyright

check: lint types test  ## what a change must pass: lint, types, test

bench: setup  ## time the eager operators against their references
	$(BIN)/python benchmarks/bench_eager.py

docs: setup  ## check the links of the documentation and run its examples
	$(PYTEST) tests/test_docs.py
