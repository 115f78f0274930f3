.PHONY: help install demo test test-slow test-all lint format docs release stress gpu clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

install:  ## make .venv and install kbf into it
	scripts/bootstrap

demo:  ## set up, then train, evaluate and compare on the rotation problem
	scripts/demo

test: lint  ## set up with the tools for development, then check everything and run the quick tests
	.venv/bin/python -m pytest -n 2 -m "not slow"

test-slow:  ## the other tests: kills, trainings, programs that are compiled, pages that are built
	scripts/bootstrap dev,docs
	.venv/bin/python -m pytest -n 2 -m slow

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

gpu:  ## what the CUDA card of this machine does to kbf, in 8 minutes: numbers, training, time, memory (data/results/gpu/)
	scripts/gpu_check

clean:  ## remove the environment and what the commands wrote
	rm -rf .venv runs dist multirun outputs
