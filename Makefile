# cpkit: one command for each thing that you do here. `make` alone lists them.
#
# Environments make themselves: .venv (numpy and cpkit) runs the program, .venv-test (everything) tests it. Each is
# rebuilt when pyproject.toml or constraints.txt changed, or when it was moved; otherwise it is used as it is.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules
.NOTPARALLEL:

RUN := .venv
TEST := .venv-test
TRACE ?= examples/data/conversation_excerpt.jsonl.gz
SIMULATE_FLAGS ?= --model deepseek-v3.2 -tp 4 -pcp 2 -dcp 8 --cp-kv-cache-interleave-size 64 --check all
PYTEST_FLAGS ?= -n 2 --dist worksteal

# The first Python >= 3.11 that can make environments; else the first >= 3.11, so that the error can name it.
# 3.11 is tried first: it is what constraints.txt was written with.
PYTHON ?= $(shell for need in ensurepip sys; do for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c "import sys, $$need; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo $$python && exit; done; done)

# An environment whose interpreter is gone, or that was made for another directory, counts as not made.
# Each stamp holds the directory that it was installed for.
usable = $(shell [ "$$(cat $(1)/installed 2>/dev/null)" = "$$(pwd -P)" ] && $(1)/bin/python -c "" 2>/dev/null || rm -f $(1)/installed)
$(call usable,$(RUN))
$(call usable,$(TEST))

.PHONY: help simulate test check bench lint clean

help: ## list the commands
	@echo "cpkit: plan, simulate, run and check context parallelism"; echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo; echo "  Variables: PYTHON, TRACE, SIMULATE_FLAGS, PYTEST_FLAGS. Environments: $(RUN), $(TEST)."

simulate: $(RUN)/installed ## replay the example trace and check every plan (numpy only, no GPU)
	@echo "==> replaying $(TRACE)"
	@echo "    cpkit simulate $(TRACE) $(SIMULATE_FLAGS)"
	@$(RUN)/bin/cpkit simulate $(TRACE) $(SIMULATE_FLAGS)

test: lint ## lint, format, types and every CPU test
	@echo "==> all CPU tests (pytest $(PYTEST_FLAGS))"
	@$(TEST)/bin/python -m pytest $(PYTEST_FLAGS)

check: lint ## lint, format, types and the fast tests: run it before each commit
	@echo "==> fast CPU tests (pytest $(PYTEST_FLAGS) -m 'not slow')"
	@$(TEST)/bin/python -m pytest $(PYTEST_FLAGS) -m "not slow"

lint: $(TEST)/installed
	@echo "==> lint (ruff check)"
	@$(TEST)/bin/ruff check
	@echo "==> format (ruff format --check)"
	@$(TEST)/bin/ruff format --check
	@echo "==> types (mypy)"
	@$(TEST)/bin/mypy --num-workers 2

bench: $(RUN)/installed ## time the planner on this machine
	@echo "==> timing the planner (benchmarks/planner.py)"
	@$(RUN)/bin/python benchmarks/planner.py

clean: ## remove the environments and caches
	@echo "==> removing $(RUN), $(TEST) and caches"
	@rm -rf $(RUN) $(TEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(RUN)/installed: EXTRAS :=
$(RUN)/installed: CONTENT := cpkit and numpy
$(TEST)/installed: EXTRAS := [all]
$(TEST)/installed: CONTENT := cpkit, torch, triton, MPI and the test tools, minutes the first time

$(RUN)/installed $(TEST)/installed: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: found no Python 3.11 or newer. Install one (Debian: apt-get install python3 python3-venv)" \
		"or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: PYTHON=$(PYTHON) does not run, or is older" \
		"than 3.11: cpkit needs Python 3.11 or newer" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make environments: its modules venv and" \
		"ensurepip are missing. Debian: apt-get install python3-venv" >&2; exit 2; }
	@echo "==> making $(@D) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv --clear $(@D)
	@echo "==> installing into $(@D): $(CONTENT)"
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e ".$(EXTRAS)"
	@$(@D)/bin/python -m compileall -qq -j 0 $(@D)/lib || true # by all cores, where pip takes one; torch has a file of newer Pythons
	@pwd -P > $@
