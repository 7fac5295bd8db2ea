# `make demo` and `make test` do everything a fresh machine needs: they create .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test check format bench zoo pocket clean

# One stamp per set of dependencies: a second call finds it and starts at once.
$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[transformers]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.run
	$(BIN)/interpose demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/transformers_cost.py
	$(BIN)/python -m benchmarks.methods

# Every model type of transformers, as docs/models.md has it: minutes.
zoo: $(VENV)/.dev
	$(BIN)/python scripts/models_page.py --check

# Trains the pocket model anew into build/pocket and evaluates it: minutes on a GPU, a night without.
pocket: $(VENV)/.dev
	$(BIN)/python -m training.train --out build/pocket
	$(BIN)/python -m training.evaluate build/pocket/model
	$(BIN)/python -m training.circuit build/pocket/model

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
