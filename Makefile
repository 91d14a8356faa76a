# Every target does its own set-up. `make PYTHON=python3.12 test` chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-cpu.lock
INSTALLED := $(VENV)/.installed

# CPU builds of torch are not on the default package index: they come from PIP_FIND_LINKS when that
# is set (folders or pages with wheels, as pip reads it), otherwise from PyTorch's own index.
ifdef PIP_FIND_LINKS
TORCH := $(foreach place,$(PIP_FIND_LINKS),--find-links $(place))
else
TORCH := --torch-backend cpu
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format lock clean

help:  ## This list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## The CPU environment in .venv, at the versions of the lock

# Byte code is compiled once here: without it every process that imports vLLM takes twice as long
# to start where Python may not write byte code itself.
$(INSTALLED): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^uv==' $(LOCK))"
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode $(TORCH) -r $(LOCK)
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: install  ## An answer whose KV cache crosses from the small to the large model
	$(BIN)/kvcascade demo $(ARGS)

test: install  ## All tests that this machine can run; ARGS goes to pytest
	$(BIN)/kvcascade models
	$(BIN)/python -m pytest $(ARGS)

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: install  ## Renew the lock from pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra dev --python-version 3.11 $(TORCH) \
	  --no-emit-find-links --no-emit-index-url --no-header --no-annotate --quiet --upgrade \
	  --output-file $(LOCK)

clean:  ## Remove the environment and every cache of the tools
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
