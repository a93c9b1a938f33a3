# Every command a contributor or CI needs, one line each; `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Paddle and torch live together in an environment of their own, so that the main one shows what torch users have.
PADDLE_VENV ?= .venv-paddle

# The versions that are tested together on a CPU. On a GPU machine choose your own build, e.g. `make setup TORCH=torch==2.11.0`;
# a CUDA build of torch brings the triton that fits it, and TRITON is then not used.
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.8.0

# Tests use many small operators, for which a pool of threads costs more than it gives.
TEST_THREADS ?= 1
PYTEST_ARGS := -m pytest --durations=15
KERNEL_TESTS := $(wildcard tests/*/kernels)
PYTEST := OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup train paddle parity test test-paddle test-gpu test-slow fmt lint types check bench docs

help:       ## show this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# $(call install,VENV): a virtual environment with torch, triton and openkda with EXTRAS.
# What is installed of torch and triton is a constraint on all that follows: no dependency may replace them.
PIP = bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off
VERSION = import importlib.metadata as m; [print(p + "==" + m.version(p)) for p in
define install
@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "make setup: needs Python 3.11 or newer, got %s; use PYTHON=path/to/python3" % sys.version.split()[0])'
$(PYTHON) -m venv $(1)
$(1)/$(PIP) '$(TORCH)'
@$(1)/bin/python -c '$(VERSION) ["triton"]]' >/dev/null 2>&1 || (set -x; $(1)/$(PIP) --no-deps '$(TRITON)')
@$(1)/bin/python -c '$(VERSION) ["torch", "triton"]]' > $(1)/constraints.txt
$(1)/$(PIP) --constraint $(1)/constraints.txt --editable '.[$(EXTRAS)]'
@touch $(1)/.setup-done
endef

setup: $(VENV)/.setup-done  ## make .venv with all that training and the tests need (again only when pyproject.toml changes)

$(VENV)/.setup-done: EXTRAS = torchtitan,transformers,dev
$(VENV)/.setup-done: pyproject.toml
	$(call install,$(VENV))

$(PADDLE_VENV)/.setup-done: EXTRAS = paddle,test
$(PADDLE_VENV)/.setup-done: pyproject.toml
	$(call install,$(PADDLE_VENV))

train: setup  ## train kimi_linear_tiny on the default text
	$(BIN)/openkda train --config kimi_linear_tiny

paddle: $(PADDLE_VENV)/.setup-done  ## train a small model with PaddlePaddle on the default text
	OMP_NUM_THREADS=$(TEST_THREADS) $(PADDLE_VENV)/bin/python examples/paddle_train.py

parity: setup  ## compare our Kimi Linear with that of transformers, on a small random model
	$(BIN)/openkda parity --hf tiny --grad --packed

test: setup  ## the tests, without the slow ones: core, kernels in the interpreter, Paddle
	$(PYTEST) -m 'not slow and not interpreter'
	@# Triton decides when it is imported whether kernels are interpreted, so they have a process of their own.
	TRITON_INTERPRET=1 $(PYTEST) -m 'interpreter and not slow' $(KERNEL_TESTS)
	$(MAKE) test-paddle

test-paddle: $(PADDLE_VENV)/.setup-done  ## the tests with PaddlePaddle, in .venv-paddle
	OMP_NUM_THREADS=$(TEST_THREADS) $(PADDLE_VENV)/bin/python $(PYTEST_ARGS) -m 'not slow and not interpreter' tests/paddle
	TRITON_INTERPRET=1 OMP_NUM_THREADS=$(TEST_THREADS) $(PADDLE_VENV)/bin/python $(PYTEST_ARGS) -m interpreter tests/paddle

test-gpu: setup  ## the kernels on this machine's GPU
	$(PYTEST) -m 'gpu or interpreter' tests

test-slow: setup  ## the slow tests
	@# Exit status 5 says that no test was chosen: there may be no slow kernel test.
	TRITON_INTERPRET=1 $(PYTEST) -m 'slow and interpreter' $(KERNEL_TESTS) || [ $$? -eq 5 ]
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
