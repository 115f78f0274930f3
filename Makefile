.PHONY: help install demo test test-slow test-all lint format docs release stress mutants gpu clean

MUTANTS ?= 200

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

install:  ## make .venv and install kbf into it
	scripts/bootstrap

demo:  ## set up, then fit a filter to recordings of a robot arm and run it on a new one
	scripts/demo

test: lint  ## set up with the tools for development, then check everything and run the quick tests
	.venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow:  ## the other tests: kills, trainings, programs that are compiled, pages that are built
	scripts/bootstrap dev,docs
	.venv/bin/python -m pytest -n 2 --dist loadfile -m slow

test-all: test test-slow  ## both, as on every submission

lint:
	scripts/bootstrap dev,docs
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

format:  ## put the code into its standard form
	scripts/bootstrap dev,docs
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs:  ## set up with the tools for the documentation, then build its pages into runs/docs
	scripts/bootstrap dev,docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo "open runs/docs/index.html"

release:  ## build wheel and source archive into dist/, install the wheel elsewhere and use it
	scripts/bootstrap dev,docs
	scripts/check_release

stress:  ## run the stress tests: kills, damaged files, bad input (docs/stress.md)
	scripts/bootstrap dev
	.venv/bin/python -m studies stress --page

mutants:  ## mutate MUTANTS=200 places of the core and count what the tests notice (data/results/mutants.jsonl)
	scripts/bootstrap dev,docs,mutants
	.venv/bin/python scripts/mutants.py $(MUTANTS)

gpu:  ## measure kbf on the CUDA card of this machine, in 8 minutes (data/results/gpu/)
	scripts/gpu_check

clean:  ## remove the environment and what the commands wrote
	rm -rf .venv runs dist multirun outputs
