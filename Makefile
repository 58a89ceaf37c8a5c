# Both commands set up all they need: a virtual environment in .venv and the package in it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# 2.13.0 is a small CPU wheel where the local index has it; any torch that pyproject allows will do.
TORCH ?= torch==2.13.0
ZOO = torch==2.14.1 torchvision==0.29.1 timm

# Attributes of an nn.Module are typed Tensor | Module; tests reach into modules all the time.
LOOSE = $(foreach c,union-attr operator arg-type assignment call-overload no-any-return \
	no-untyped-call attr-defined index,--disable-error-code $(c)) --no-warn-unused-ignores

.PHONY: demo test test-zoo lint clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet $(foreach p,$(TORCH),"$(p)") numpy
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# The same on the newest torch with both model zoos, in an environment of its own (5.6 GB).
test-zoo:
	$(MAKE) test VENV=.venv-zoo TORCH="$(ZOO)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/mypy tests $(LOOSE)

clean:
	rm -rf $(VENV) .venv-zoo .demo build dist *.egg-info
