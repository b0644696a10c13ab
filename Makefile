# make demo: watch networks train on nodes that come and go. make test: the whole test suite. Both set themselves up.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
STAMP := $(VENV)/.installed

.PHONY: demo test test-fast lint format bench clean help

help:
	@grep -E '^#' Makefile | sed 's/^# //'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sunfleck needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "this Python cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/sunfleck demo

test: $(STAMP)
	$(BIN)/python -m pytest

# make test-fast: without real pools and workers, in seconds
test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not system and not real and not slow"

# make lint: ruff and mypy
lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix src tests bench
	$(BIN)/ruff format src tests bench

# make bench: every figure, one JSON line each
bench: $(STAMP)
	@for b in bench/*.py; do $(BIN)/python $$b || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
