# Every target sets itself up: a clean clone and Python 3.10 to 3.13 with venv are all that is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Python compiles a module when it is first imported. pip would compile all of them, which takes half of its time, and
# most of transformers' are never imported. An environment that forbids to keep them would compile ours in each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-finetune test test-page test-long test-wan fuzz lint format simulate stubs vectors clean

# An environment without pip is what a failed or stopped `venv` leaves, or uv makes: it gets pip, and nothing goes.
$(STAMP): pyproject.toml setup.py
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || \
	  $(PYTHON) -m venv $(VENV)
	-@$(BIN)/python -m pip uninstall --quiet --yes cairn 2>/dev/null  # its name before
	-@$(BIN)/python -m pip install --quiet 'pip>=26,<27'  # Python 3.11's own takes twice as long to resolve
	@echo "installing Cairn into $(VENV), with all that its tests need"
	@$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]' || { \
	  echo "not installed, for the reason above: mend it and run make again." \
	    "For another Python: make clean, then make PYTHON=python3.11" >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache

# Wire stubs are committed; tests regenerate and compare them.
stubs: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. protocol/wire/coordinator.proto
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. protocol/wire/swarm.proto protocol/wire/ledger.proto

# Test vectors for other implementations (docs/vectors) are committed; tests make them again and compare.
vectors: $(STAMP)
	$(BIN)/python -m tests.vectors

# Everything but the long suites. WORKERS processes share the files (tests/conftest.py): one more than the two cores of
# CI, since a quarter of the time is waiting.
WORKERS ?= 3
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS)

# What takes long, on promises that shorter tests hold too: swarms of real processes, more layouts of ranks, more attacks,
# the benchmarks' own checks, and the images of docker/ in a bare root. An hour or more on two cores.
test-long: $(STAMP) debootstrap nft
	$(BIN)/python -m pytest -m long --ignore tests/e2e -n $(WORKERS); others=$$?; \
	$(BIN)/python -m pytest -m long tests/e2e && exit $$others  # one swarm at a time: each fills two cores

# Swarms of real processes on an emulated internet (Linux, root; nftables is installed if it can be). About an hour.
# SCENARIOS names some of tests/scenarios; all by default.
SCENARIOS ?=
test-wan: $(STAMP) nft
	$(BIN)/python -m tests.scenarios $(SCENARIOS)

# The ledger under kill -9, power cuts and lying disks, and a long run of its state machine. About half an hour.
KILLS ?= 1000
.PHONY: test-chaos
test-chaos: $(STAMP) postgres
	$(BIN)/python -m tests.chaos --kills $(KILLS)

# Mutated foreign input through every parser; with atheris also coverage-guided. About an hour.
INPUTS ?= 1000000
GUIDED ?= 20000
.PHONY: atheris
fuzz: $(STAMP) atheris
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --guided $(GUIDED)

# It has no wheels for every Python and system; without it the fuzzer says so and leaves that part out.
atheris: $(STAMP)
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/python -m pip install --quiet --editable '.[fuzz]' \
	  || echo "atheris could not be installed: no coverage-guided inputs"

# $(call system,PROGRAM,PACKAGE,WHAT): installs what is not here by apt-get, as root; else it says what is left out.
system = @command -v $(1) >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && timeout 300 sh -c \
	  'apt-get install -y -q $(2) || { apt-get update -q && apt-get install -y -q $(2); }' >/dev/null 2>&1; } \
	  || echo "$(1) is not here and could not be installed: $(3)"

# For the NAT gateways of the emulated internet; without it what needs them says so and is left out.
.PHONY: nft
nft:
	$(call system,nft,nftables,NAT is not emulated)

# For the images of docker/; without it what needs it says so and is left out.
.PHONY: debootstrap
debootstrap:
	$(call system,debootstrap,debootstrap,the images are not built)

# For the hooks of deploy/preempted; without it their tests say so and are left out.
.PHONY: curl
curl:
	$(call system,curl,curl,the hooks for preemption notices are not tested)

# For the ledger's tests; without it those that need it say so and are left out.
.PHONY: postgres
postgres:
	@{ command -v initdb || ls /usr/lib/postgresql/*/bin/initdb; } >/dev/null 2>&1 \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && timeout 180 sh -c \
	  'apt-get install -y -q postgresql || { apt-get update -q && apt-get install -y -q postgresql; }' >/dev/null 2>&1; } \
	  || echo "PostgreSQL is not here and could not be installed: the ledger is tested on SQLite alone"
# The page in a real browser: tests/page. What has no browser says so and is left out.
test-page: $(STAMP) chromium
	$(BIN)/python -m pytest tests/page tests/unit/coordinator/test_page_api.py

# Debian's Chromium for tests/page; Playwright brings none of its own here.
.PHONY: chromium
chromium:
	$(call system,chromium,--no-install-recommends chromium,the page is not tested in a browser)

# This list.
.PHONY: help
help:
	@awk '/^# /{text = text substr($$0, 2)} /^[a-z-]+:/{if (text) printf "make %-11s%s\n", substr($$1, 1, length($$1) - 1), text; text = ""} /^$$/{text = ""}' Makefile

# An editable .venv/bin/cairn, with all that the tests need.
.PHONY: install
install: $(STAMP)

# The documentation as a site in site/; a link that leads nowhere fails. See it: python3 -m http.server --directory site
.PHONY: docs mkdocs
docs: mkdocs
	$(BIN)/python -m pytest tests/structure/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

mkdocs: $(STAMP)
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install --quiet --editable '.[docs]' \
	  || echo "mkdocs-material is not here and could not be installed: the documentation is not built as a site"

# The pages of docs/results, from the JSON files beside them and benchmarks/templates.
.PHONY: results
results: $(STAMP)
	$(BIN)/python -m benchmarks.pages

# Style, prose and types.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose
	$(BIN)/pyright

# Corrects what of the style can be corrected.
format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Four peers train a small Llama together on this machine: one is killed, one joins late. 4 to 9 minutes on 2 cores.
demo: $(STAMP)
	$(BIN)/cairn demo

# Four peers make an assistant of a small base model by LoRA; one is killed. Under 5 minutes on 2 cores.
demo-finetune: $(STAMP)
	$(BIN)/python -m benchmarks.finetune.demo

# The round machine under faults: thousands of rounds from as many seeds as asked for, on two processes.
SEEDS ?= 340
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
