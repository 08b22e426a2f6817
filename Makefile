# Every target sets up .venv by itself. Needs Python 3.10+, g++ and make; nothing else is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := CMakeLists.txt pyproject.toml $(wildcard csrc/*.* csrc/simd/*)

.PHONY: demo test test-slow lint format readme bench asan wheel clean
.DEFAULT_GOAL := test

$(VENV)/.ready: constraints.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

# A server and two workers, each a process of its own, train on embedded digits by one method after the other. Ends
# with a table, and a page with the same and charts.
demo: $(VENV)/.ready
	$(BIN)/laconic demo --html runs/demo.html

test: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 3600

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the demo quietly for the Records behind README's first table, and writes the table.
readme: $(VENV)/.ready
	$(BIN)/laconic demo --html runs/demo.html --record results/demo/demo.jsonl
	$(BIN)/python bench/readme_table.py

# Times every codec against the same run's memcpy and against what one would use instead; writes the Records behind
# README's second table and then the table.
bench: $(VENV)/.ready
	$(BIN)/laconic bench --records results/bench/codecs.jsonl
	$(BIN)/python bench/readme_table.py

# The hostile-frame and parity tests against a core built with the address and undefined-behaviour sanitizers.
asan: $(VENV)/.ready
	bash bench/asan.sh

wheel: $(VENV)/.ready
	$(BIN)/pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf build dist $(VENV)
