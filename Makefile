# Both commands set up all they need: a virtual environment in .venv and the package in it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# 2.13.0 is a small CPU wheel where the local index has it; any torch that pyproject allows will do.
TORCH ?= torch==2.13.0

# Attributes of an nn.Module are typed Tensor | Module; tests reach into modules all the time.
LOOSE = $(foreach c,union-attr operator arg-type assignment call-overload no-any-return \
	no-untyped-call attr-defined index,--disable-error-code $(c)) --no-warn-unused-ignores

.PHONY: demo test lint clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/mypy tests $(LOOSE)

clean:
	rm -rf $(VENV) .demo build dist *.egg-info
