#!/usr/bin/env bash
# Reads mutated packets under sanitizers on a machine that has no environment of this checkout and no package index:
#
#   PYTHON=/path/to/python tools/mutations.sh RECORDS JOBS SECONDS
#
# PYTHON has torch, numpy, nanobind, scikit-build-core, cmake and ninja. What else is needed is installed from the wheels
# in the folder WHEELS (.carry), which a machine with an index fills:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d .carry \
#     grpcio cryptography cffi pycparser typer rich markdown-it-py mdurl pygments shellingham annotated-doc \
#     safetensors typing_extensions click pip
#
# All is built in build/mutations and build/asan, and used again by the next call. RECORDS is a file of Records of tier 3,
# such as results/faults/tier3.jsonl or a copy of it: JOBS processes read what is missing to the tier's goal, each a
# target and a seed of its own, and no piece is started later than SECONDS after the build; those under way are finished.
# Every piece appends its Record when it ends, so that nothing but the pieces under way is lost if this is killed.
set -euo pipefail
test $# -eq 3 || { echo "usage: PYTHON=... tools/mutations.sh RECORDS JOBS SECONDS" >&2; exit 2; }
records=$(realpath -m "$1") jobs=$2 seconds=$3
cd "$(dirname "$0")/.."

python=$(command -v "${PYTHON:-python3}")
wheels=${WHEELS:-.carry}
venv=$PWD/build/mutations/venv
export PATH=$venv/bin:$(dirname "$python"):$PATH
export CUDA_VISIBLE_DEVICES=  # the readers are on the processor, and CUDA's mappings collide with the sanitizer's
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -e "$venv/.ready" ]; then
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
    scikit_build_core:scikit-build-core packaging:packaging pathspec:pathspec ninja:ninja; do
    if missing "${module%%:*}"; then
      echo "mutations: installing ${module#*:} from $wheels"
      "${pip[@]}" install --quiet --no-index --no-deps --find-links "$wheels" "${module#*:}"
    fi
  done
  # The driver's own core, without sanitizers, is built beside the one with them.
  LACONIC_PYTHON=$venv/bin/python bash tools/asan.sh build & sanitized=$!
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e . -e lab
  wait "$sanitized"
  touch "$venv/.ready"
fi

export LACONIC_PYTHON=$venv/bin/python
echo "mutations: $jobs processes for at least $seconds s"
nice -n 19 "$venv/bin/python" -m laconic lab faults --tier 3 --parts packets --jobs "$jobs" --limit "$seconds" \
  --record "$records" --json
