# Every target sets itself up: a clean clone and Python 3.10 to 3.13 are all that is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint format simulate stubs benchmarks clean

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache

# Wire stubs are committed; tests regenerate and compare them.
stubs: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. protocol/wire/coordinator.proto
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. protocol/wire/swarm.proto

# Everything but the long suites.
test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Four peers train a small Llama together on this machine: one is killed, one joins late. Under 4 minutes on 2 cores.
demo: $(STAMP)
	$(BIN)/cairn demo

# The round machine under faults: thousands of rounds from as many seeds as asked for, on two processes.
SEEDS ?= 340
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
