# Every target sets up .venv by itself. Needs Python 3.10+, g++ and make; nothing else is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# What pip would do file by file, on all processors. Some packages carry files that are no Python of today.
BYTECODE := $(BIN)/python -m compileall -q -j 0
CORE := CMakeLists.txt pyproject.toml $(wildcard csrc/*.* csrc/simd/*) lab/CMakeLists.txt lab/pyproject.toml lab/csrc/pace.cpp

.PHONY: demo test test-slow lint format readme bench docs asan fuzz fuzz-asan wheel clean
.DEFAULT_GOAL := test

$(VENV)/.ready: constraints.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]' -e lab
	-$(BYTECODE) $(VENV)/lib > $(VENV)/bytecode.log 2>&1
	touch $@

# A server and two workers, each a process of its own, train on embedded digits by one method after the other. Ends
# with a table, and a page with the same and charts.
demo: $(VENV)/.ready
	$(BIN)/laconic demo --html runs/demo.html

# Two at a time: many tests wait for processes, which spend seconds importing torch. In the order of the files: by
# itself xdist begins with those of many tests, and one long test would be left to the end. Compiled beforehand, because
# where Python is told not to write bytecode every process would do so anew.
test: $(VENV)/.ready
	$(BYTECODE) src lab/src
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 3600

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the demo quietly for the Records behind README's table of it, and writes the table.
readme: $(VENV)/.ready
	$(BIN)/laconic demo --html runs/demo.html --record results/demo/demo.jsonl
	$(BIN)/python tools/readme_table.py

# Times every codec against the same run's memcpy and against what one would use instead; writes the Records behind
# docs/benchmarks.md and then its tables.
bench: $(VENV)/.ready
	$(BIN)/laconic bench --records results/bench/codecs.jsonl
	$(BIN)/python tools/readme_table.py

# A server and its workers, beside gRPC alone, over slow links (as root: in network namespaces) and with 64 clients;
# writes the Records behind docs/cluster-benchmarks.md and then its tables.
bench-cluster: $(VENV)/.ready
	for part in aggregation rounds load; do \
	  $(BIN)/laconic bench cluster --part $$part --record results/cluster/$$part.jsonl || exit 1; done
	$(BIN)/laconic bench cluster --part rounds --workers 4 --methods 3,4,homomorphic --record results/cluster/sums.jsonl
	$(BIN)/laconic bench cluster --part rounds --workers 4 --methods 3,4,homomorphic --rates unshaped --bundled \
	  --record results/cluster/sums-bundled.jsonl
	$(MAKE) cluster-tables

cluster-tables: $(VENV)/.ready
	for part in aggregation rounds sums sums-bundled load; do \
	  $(BIN)/python tools/readme_table.py --records results/cluster/$$part.jsonl --readme docs/cluster-benchmarks.md \
	  || exit 1; done

# Compressed layers against dense ones: the Records behind docs/layers.md, and then its table.
bench-layers: $(VENV)/.ready
	$(BIN)/laconic bench layers --record results/layers/cpu.jsonl
	$(BIN)/python tools/readme_table.py --records results/layers/cpu.jsonl --readme docs/layers.md

# The hostile-frame and parity tests against a core built with the address and undefined-behaviour sanitizers, once for
# each instruction set that the machine has: LACONIC_ISAS="baseline avx2" runs some, LACONIC_MUTATIONS=1000 fewer.
asan: $(VENV)/.ready
	bash tools/asan.sh

# Coverage-guided fuzzing of everything that reads bytes from outside, SECONDS for each of TARGETS (all of them by
# default); see fuzz/README.md. atheris has wheels for some Pythons only, so nothing else here needs it.
SECONDS ?= 60
TARGETS ?=
fuzz: $(VENV)/.ready
	$(PIP) atheris
	$(BIN)/python fuzz/run.py --seconds $(SECONDS) $(TARGETS)

# The same mutations, and what guided runs have found, against a core built with the sanitizers; LACONIC_ISAS as above.
fuzz-asan: $(VENV)/.ready
	bash tools/asan.sh fuzz --seconds $(SECONDS) $(TARGETS)

# Every table and picture of README and docs/, from the Records in results/.
docs: $(VENV)/.ready
	$(BIN)/python tools/readme_table.py
	$(BIN)/python docs/refresh.py
	$(BIN)/python docs/studies/refresh.py

wheel: $(VENV)/.ready
	$(BIN)/pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf build dist $(VENV)
