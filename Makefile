PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-slow test-gpu test-harness check bench bench-mechanisms bench-training report docs clean

# Set-up: one environment in .venv, remade when its inputs change.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'  # what is imported is compiled then
	touch $@

install: .venv/ready

demo: .venv/ready         ## cosFormer beside softmax: checked, trained, shown on a page
	$(BIN)/cosformer demo

PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

test: .venv/ready         ## the tests that need no GPU and are not slow, in several processes
	$(PYTEST) -m "not slow"

test-slow: .venv/ready    ## the slow ones: graphs, sweeps by Triton's interpreter, whole runs
	$(PYTEST) -m slow

test-gpu:                 ## the tests that need one, with whatever Python has torch there
	python3 -m pytest -m gpu $$(find tests -name 'test_*_gpu.py')

test-harness: .venv/ready ## installs lm-evaluation-harness, then scores an exported run with it
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[harness]'
	$(BIN)/pytest -m slow tests/hf/test_hf_harness.py

check: .venv/ready        ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready        ## measure the op on this machine: rows in results/
	$(BIN)/cosformer bench ops

bench-mechanisms: .venv/ready  ## the same of every mechanism, a quarter of an hour or more
	$(BIN)/cosformer bench mechanisms

bench-training: .venv/ready  ## training steps, generated tokens and generated data
	$(BIN)/cosformer bench training
	$(BIN)/cosformer bench generation
	$(BIN)/cosformer bench data

report: .venv/ready       ## rows -> tables in README.md and docs/, figures in docs/
	$(BIN)/cosformer report
	$(BIN)/python docs/scale_picture.py

docs: .venv/ready         ## the site of docs/ in out/site, from its pages and the docstrings
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open out/site/index.html; with search: python3 -m http.server --directory out/site"

clean:
	rm -rf .venv build dist out
