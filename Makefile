# Everything a newcomer needs: `make demo`, `make test`. As root both run as an ordinary user (scripts/as-user),
# because Apptainer must not be run as root.
SHELL := /bin/bash
PYTHON ?= python3
# Any torch >= 2.6 will do; this one is what the project is tested with.
TORCH ?= torch==2.13.0
VENV := build/venv
BIN := $(VENV)/bin
AS_USER := scripts/as-user -- $(MAKE) --no-print-directory
export DNI_APPTAINER_PREFIX PYTHON TORCH
.DEFAULT_GOAL := help

.PHONY: help beside demo test e2e nightly gpu check wheelcheck system demo-here test-here gpu-here check-here wheelcheck-here vision-here clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: system ## Train a chain on Fashion-MNIST in four Apptainer containers, beside plain backprop
	@$(AS_USER) demo-here EPOCHS='$(EPOCHS)'

test: system ## Run all tests, with real containers and, as root, a real Slurm of three hosts
	@scripts/slurm-testbed run -- $(AS_USER) test-here TESTS='$(TESTS)'

e2e: ## Run the tests with real workers, containers and Slurm
	@$(MAKE) --no-print-directory test TESTS=tests/e2e

nightly: ## Run what CI has no time for: the whole demo, experiments, hundreds of seeds, and mends that are taken out
	@[ "$$(id -u)" -ne 0 ] || { command -v podman && command -v runc; } >/dev/null || apt-get -q -y --no-install-recommends install podman runc catatonit >/dev/null
	@$(MAKE) --no-print-directory demo
	@$(AS_USER) vision-here
	@$(MAKE) --no-print-directory test TESTS='$(BESIDE) tests/nightly'

gpu: system ## Run the tests that need a GPU, here
	@$(AS_USER) gpu-here

check: system ## Check format, lint and types
	@$(AS_USER) check-here

wheelcheck: system ## Build sdist and wheel, and look into them
	@$(AS_USER) wheelcheck-here

# What CI does before its tests, side by side: a demo that builds images, or ends, leaves a core idle.
beside: system
	@$(AS_USER) --jobs=3 --output-sync=target check-here wheelcheck-here demo-here EPOCHS='$(EPOCHS)'

clean: ## Remove what was built here (the image cache in ~/.cache/dnictl stays)
	rm -rf build dist

# What needs root, where we are root or may become it: Python's venv, Apptainer and its helpers.
system:
	@scripts/setup-python >/dev/null
	@scripts/setup-apptainer >/dev/null
	@[ "$$(id -u)" -ne 0 ] || [ ! -c /dev/net/tun ] || chmod 666 /dev/net/tun # as udev has it; for slow lines

$(VENV)/ready: pyproject.toml scripts/setup-venv
	@scripts/setup-venv $(VENV)
	@touch $@

build/typed: pyproject.toml # static tools cannot follow the import hook of an editable install
	@mkdir -p $@ && ln -sfn ../../runtime $@/dni_runtime && ln -sfn ../../cli $@/dnictl

demo-here: $(VENV)/ready
	@PATH="$$(dirname "$$(scripts/setup-apptainer)"):$$PATH" $(BIN)/python scripts/demo.py $(EPOCHS:%=--epochs %)

# All tests: five processes, as many of them wait; each takes a file at a time (tests/conftest.py).
BESIDE := --numprocesses=5 --dist=loadscope --no-loadscope-reorder --durations=40
test-here: $(VENV)/ready
	@PATH="$$(dirname "$$(scripts/setup-apptainer)"):$$PATH" $(BIN)/python -m pytest $(or $(TESTS),$(BESIDE))

gpu-here: $(VENV)/ready
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"torch {torch.__version__} sees no GPU")'
	@PATH="$$(dirname "$$(scripts/setup-apptainer)"):$$PATH" $(BIN)/python -m pytest -m gpu tests

vision-here: $(VENV)/ready # of the index that torch is of: the operators of another build do not load, and stop transformers
	@index="$$(cat $(VENV)/torch-index)"; $(BIN)/python -m pip install --quiet --no-compile $${index:+--extra-index-url "$$index"} '$(TORCH)' torchvision
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchvision

check-here: $(VENV)/ready build/typed
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy --config-file scripts/mypy.ini scripts/*.py scripts/experiments & $(BIN)/mypy && wait $$!

wheelcheck-here: $(VENV)/ready
	$(BIN)/python scripts/check_wheel.py
