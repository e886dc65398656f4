# Everything runs from a virtual environment in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is installed by its exact release first, so that a CPU build on offer is preferred.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
NAME ?= engine

.PHONY: setup demo test test-slow lint types bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Etude needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "could not make a virtual environment (on Debian: apt-get install python3-venv)"; exit 2; }
	@echo "installing PyTorch and Etude into $(VENV); this takes a minute or more"
	@$(PIP) "$(TORCH)" || { echo "could not install $(TORCH): see pip's words above; \
	set TORCH=torch==VERSION for another release, or check the network"; exit 2; }
	@$(PIP) -e ".[dev]" || { echo "could not install Etude's requirements: see pip's words above"; exit 2; }
	@touch $@

demo: setup
	$(BIN)/etude doctor
	$(BIN)/etude practice pypi:toolz --preset demo

test: setup
	$(BIN)/pytest

test-slow: setup
	$(BIN)/pytest -m slow

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: setup
	$(BIN)/basedpyright

bench: setup
	$(BIN)/python benchmarks/$(NAME).py

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache
