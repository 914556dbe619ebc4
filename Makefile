# make demo    fine-tune a real small model over HTTP, from nothing, on this machine
# make test    lint, types, import contracts, tests with branch coverage
# make docs    the reference from the code, and the documentation as a site in build/docs
# make chaos   random faults on services, shims and ranks; a table of what was lost, doubled or untrue (nothing)
# make setup   only the virtualenv in .venv (both of the above do it first; a second time takes no time)
# make model   try again to install the package with the small model, if that failed
# make tracking  wandb and mlflow in .cache/tracking, for the tests that skip without them
# make clean   remove what was built, but not .demo (your models and jobs) nor anything tracked
#
# PYTHON=/path/to/python chooses the interpreter (3.11, 3.12 or 3.13), e.g. make test PYTHON=python3.12

PYTHON ?=
ARGS ?=
ROUNDS ?= 100
export PYTHON
.DEFAULT_GOAL := help
.PHONY: help setup model demo test docs clean chaos tracking

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

setup:
	@sh scripts/setup.sh

model:
	@sh scripts/setup.sh --model

demo: setup
	@.venv/bin/python -m posttrain_service demo --storage-dir .demo $(ARGS)

test: setup
	@sh scripts/check.sh $(ARGS)

chaos: setup
	@.venv/bin/python tests/chaos --rounds $(ROUNDS) $(ARGS)

# Beside the virtualenv, not in it: both bring much along, and nothing but their sinks needs them.
tracking: setup
	@test -d .cache/tracking || .venv/bin/python -m venv .cache/tracking
	@.cache/tracking/bin/python -m pip install -q --disable-pip-version-check pydantic wandb mlflow-skinny sqlalchemy alembic

docs: setup
	@.venv/bin/python scripts/reference.py
	@.venv/bin/python -m sphinx -W -q -c docs -d build/doctrees . build/docs && echo build/docs/docs/index.html

clean:
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov dist build
	@find service trainer migrations tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
