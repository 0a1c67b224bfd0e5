# Two commands do everything on a machine with Python 3.11+ and make:  make demo   and   make test
# Each target installs what it needs into .venv, once; uv is used when it is there.

PYTHON ?= python3
BIN    := .venv/bin
UV     := $(shell command -v uv 2>/dev/null)

ifdef UV
  CREATE  = uv venv -q --seed --python $(PYTHON) .venv
  INSTALL = uv pip install -q --python $(BIN)/python
else
  CREATE  = $(PYTHON) -m venv .venv
  INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check
endif

# Tests share two cores: BLAS with more threads than that gets slower, not faster.
TEST = OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test lab notebooks lint format matrix verify-peers clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 18

demo: .venv/.core  ## the main job: prove every gradient, train on real text, write demo/index.html
	$(BIN)/minitransformer demo

test: .venv/.test  ## every property, every mutant, every gate
	$(TEST)

lab: .venv/.notebook  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

notebooks: .venv/.notebook  ## execute the notebooks' sources and write the notebooks
	$(BIN)/python notebooks/build.py

lint: .venv/.dev  ## ruff, types, and the floors of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.dev  ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

matrix: .venv/.test  ## the full kill matrix: every mutant against every property
	$(BIN)/python -m minitransformer.checks.matrix

verify-peers: .venv/.verify  ## agreement with PyTorch, where it has the mechanism
	$(TEST) -k peer

clean:  ## remove .venv and everything generated
	rm -rf .venv demo runs .pytest_cache .hypothesis notebooks/.hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "minitransformer needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "creating .venv (once)"
	@$(CREATE)

.venv/.core: pyproject.toml | .venv/bin/python
	@echo "installing minitransformer into .venv (about a minute, once)"
	@$(INSTALL) -e .
	@touch $@

.venv/.%: pyproject.toml .venv/.core
	@echo "installing what '$*' needs"
	@$(INSTALL) -e '.[$*]'
	@touch $@

.venv/.verify: requirements/verify.txt .venv/.test
	@echo "installing the peers (PyTorch and others: large)"
	@$(INSTALL) -r requirements/verify.txt
	@touch $@
