# What a person types. `make help` lists it.
VENV ?= .venv
PORT ?= 30000
TP ?= 1
LANE ?=
# A name given without its draft serves that model unspeculated; only the default model has a default draft.
MODEL ?= test/models/tiny-kimi
DRAFT ?= $(if $(filter test/models/tiny-kimi,$(MODEL)),test/models/tiny-kimi-eagle3)
ARGS ?=
# How many tests run at a time; 0: in this process, one after the other.
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Where this is set, every process compiles each import anew and starts several times slower.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED = 1

.PHONY: help setup serve stop test test-lane unit lint format lanes audit docs docs-serve
.DEFAULT_GOAL := help

help:
	@echo 'make serve                      set up, then serve the bundled model with its EAGLE-3 draft on port 30000'
	@echo 'make serve MODEL=.. DRAFT=.. TP=8 PORT=.. ARGS=".."   the same for a real model'
	@echo 'make setup                      only set up: what serve and test do first'
	@echo 'make stop PORT=..               end the server on that port and its children'
	@echo 'make lanes                      carry the patches to every release since 0.5.17 and write docs/lanes.md'
	@echo 'make docs                       build docs/ as a site into site/; make docs-serve shows it while you write'
	@echo 'make test-lane LANE=0.5.17      set up another upstream release in .venv-0.5.17 (9 GB) and test the series there'
	@echo 'make audit                      ask the package index for vulnerable and withdrawn packages of the image (online)'
	@echo 'make test | unit | lint | format                      checks: all, unit tests only, ruff and mypy, fix format'
	@echo '                                the tests run two at a time; WORKERS=0: one after the other, to read or to debug'

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml hatch_build.py python/sglang_patches.pth scripts/setup.sh
	@scripts/setup.sh $(VENV)
	@touch $@

serve: $(INSTALLED)
	@exec $(BIN)/python -P -m sglang_patches.serve --model '$(MODEL)' --draft '$(DRAFT)' --tp $(TP) --port $(PORT) -- $(ARGS)

stop: $(INSTALLED)
	@$(BIN)/sglang-patches stop --port $(PORT)

# Tests that measure speed run after the others, alone. Exit code 1 of pytest says that some failed: those run all the same.
test: lint
	@failed=0; $(BIN)/python -m pytest -n $(WORKERS) -m 'not alone' || failed=$$?; \
	[ $$failed -le 1 ] || exit $$failed; $(BIN)/python -m pytest -m alone && exit $$failed

test-lane:
	@scripts/test-lane.sh '$(LANE)'

unit: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --ignore test/e2e

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python sgl-kernel/python benchmark test scripts docker hatch_build.py
	$(BIN)/python scripts/audit.py

audit: $(INSTALLED)
	PATH="$(BIN):$$PATH" docker/lock.sh --check
	PATH="$(BIN):$$PATH" uv tool run pip-audit --disable-pip --require-hashes $(patsubst %,--requirement %,$(wildcard docker/lock/*.txt))

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Its notice that mkdocs-material will be followed by another tool concerns nobody who reads or writes these pages.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED)
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(INSTALLED)
	$(BIN)/python -m mkdocs serve

# Exit code 1 of the command says that some patch was not carried somewhere, which the matrix is there to tell.
lanes: $(INSTALLED)
	$(BIN)/sglang-patches port --dry-run --from 0.5.23 --to 0.5.17.. --write docs/lanes.md || [ $$? = 1 ]
