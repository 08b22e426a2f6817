#!/usr/bin/env bash
# Reads mutated packets under sanitizers on a machine that has no environment of this checkout and no package index:
#
#   PYTHON=/path/to/python tools/mutations.sh RECORDS JOBS SECONDS
#
# If PYTHON has this checkout installed (`pip install -e . -e lab`), it is used as it is. Otherwise it has torch, numpy and
# cmake, and an environment is made of it in build/mutations with the wheels in the folder WHEELS (.carry). A machine
# with an index and a compiler with sanitizers fills that folder, the second line with the same version of Python:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d .carry \
#     grpcio cryptography cffi pycparser typer rich markdown-it-py mdurl pygments shellingham annotated-doc safetensors \
#     typing_extensions click pip nanobind scikit-build-core packaging pathspec ninja zstandard
#   LACONIC_PYTHON=... tools/asan.sh core build/carry && tar -C build/carry -czf .carry/asan.tar.gz .
#
# The core in asan.tar.gz is used if it is of this csrc/, otherwise one is built with the runtime beside it; without this
# file the compiler must have a runtime. Set LACONIC_COMMIT to the commit of a tree that came without its history:
# the Records name it.
#
# RECORDS is a file of Records of tier 3, such as results/faults/tier3.jsonl or a copy of it: JOBS processes read what is
# missing to the tier's goal, each a target and a seed of its own, and no piece is started later than SECONDS after the
# build; those under way are finished. Every piece appends its Record when it ends, so that nothing but the pieces under
# way is lost if this is killed.
set -euo pipefail
test $# -eq 3 || { echo "usage: PYTHON=... tools/mutations.sh RECORDS JOBS SECONDS" >&2; exit 2; }
records=$(realpath -m "$1") jobs=$2 seconds=$3
cd "$(dirname "$0")/.."

python=$(command -v "${PYTHON:-python3}")
wheels=${WHEELS:-.carry}
venv=$PWD/build/mutations/venv
export CUDA_VISIBLE_DEVICES=  # the readers are on the processor, and CUDA's mappings collide with the sanitizer's
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
if [ -e "$wheels/asan.tar.gz" ]; then
  export LACONIC_SANITIZER_RUNTIME=$PWD/build/mutations/asan LACONIC_ASAN_CORE=$PWD/build/mutations/asan
  mkdir -p "$LACONIC_ASAN_CORE"
  tar -C "$LACONIC_ASAN_CORE" -xzf "$wheels/asan.tar.gz"
fi

make_environment() {
  "$python" -m venv --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
    > "$site/parent.pth"
  pip=("$venv/bin/python" -m pip)
  if ! "${pip[@]}" --version > /dev/null 2>&1; then pip=("$venv/bin/python" "$(realpath "$wheels"/pip-*.whl)/pip"); fi
  missing() { "$venv/bin/python" -c "import $1" 2> /dev/null && return 1; return 0; }
  for module in grpc:grpcio cryptography:cryptography _cffi_backend:cffi pycparser:pycparser typer:typer rich:rich \
    markdown_it:markdown-it-py mdurl:mdurl pygments:pygments shellingham:shellingham annotated_doc:annotated-doc \
    safetensors:safetensors typing_extensions:typing_extensions click:click pip:pip nanobind:nanobind \
    scikit_build_core:scikit-build-core packaging:packaging pathspec:pathspec ninja:ninja \
    zstandard:zstandard; do
    if missing "${module%%:*}"; then
      echo "mutations: installing ${module#*:} from $wheels"
      "${pip[@]}" install --quiet --no-index --no-deps --find-links "$wheels" "${module#*:}"
    fi
  done
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e . -e lab
}

installed() {
  "$1" - 2> /dev/null <<'CHECK'
from pathlib import Path

import cryptography, grpc, safetensors, torch, typer
import laconic._core, laconic_lab

for package in (laconic, laconic_lab):
    assert Path(package.__file__).is_relative_to(Path.cwd())
CHECK
}

if ! installed "$python"; then
  export PATH=$venv/bin:$(dirname "$python"):$PATH
  # Built again when a source has changed, not when a copy of the tree has new times.
  sources=$(find CMakeLists.txt pyproject.toml csrc lab/csrc src/laconic -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z |
    xargs -0 sha256sum | sha256sum)
  if [ "$(cat "$venv/.ready" 2> /dev/null)" != "$sources" ]; then
    make_environment
    echo "$sources" > "$venv/.ready"
  fi
  python=$venv/bin/python
fi
export LACONIC_PYTHON=$python LACONIC_ASAN_KEEP=1
nice -n 19 bash tools/asan.sh build

echo "mutations: $jobs processes for at least $seconds s"
nice -n 19 "$python" -m laconic lab faults --tier 3 --parts packets --jobs "$jobs" --limit "$seconds" \
  --record "$records" --json
