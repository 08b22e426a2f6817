#!/usr/bin/env bash
# Builds the core with the address and undefined-behaviour sanitizers and runs the tests of hostile frames and of parity
# with the reference, once per instruction set of this machine. Everything is built in build/asan; the installed package
# is not touched. Extra arguments go to pytest; `asan.sh fuzz ARGUMENTS` runs fuzz/run.py instead,
# `asan.sh build` builds only, `asan.sh isas` prints the instruction sets of this machine. LACONIC_PYTHON is the
# interpreter, if it is not that of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${LACONIC_PYTHON:-$PWD/.venv/bin/python}
work=$PWD/build/asan
tests=(tests/test_hostile.py tests/kernels tests/codecs/test_coded_chains.py tests/codecs/test_invalid_sections.py)

# These tests limit the address space, which the sanitizer's shadow memory exceeds, or measure time and memory.
left_out=(
  tests/test_hostile.py::test_frame_that_declares_more_than_memory_raises_frame_error
  tests/codecs/test_coded_chains.py::test_decompression_bombs_take_neither_time_nor_memory
)

for path in "${tests[@]}"; do
  test -e "$path" || { echo "asan: $path is missing" >&2; exit 1; }
done
# pytest ignores a deselected name that no test has.
for test in "${left_out[@]}"; do
  grep -qs "^def ${test#*::}(" "${test%%::*}" || { echo "asan: there is no test $test to leave out" >&2; exit 1; }
done

# clang may lack the sanitizer runtime as a shared library, so g++ is the default.
export CXX=${CXX:-g++}
runtime() {
  local path
  path=$("$CXX" -print-file-name="$1")
  test -e "$path" || { echo "asan: $CXX has no $1: install its sanitizer runtime" >&2; exit 1; }
  realpath "$path"
}
# The interpreter is not instrumented, so the runtime must be loaded first; libstdc++, too, or the interceptor of
# __cxa_throw has nothing to forward to.
preload="$(runtime libasan.so):$(runtime libubsan.so):$(runtime libstdc++.so)"
# Addresses drawn at random can overlap the shadow memory of older runtimes, which then end at once.
fixed=()
if setarch -R true 2> /dev/null; then fixed=(setarch -R); fi
sanitized() { LD_PRELOAD=$preload "${fixed[@]}" "$python" -S "$@"; }

build() {
  # Without build isolation if the build tools are installed (no downloads), otherwise as `make` does it.
  isolation=()
  if "$python" -c 'import nanobind, scikit_build_core' 2>/dev/null; then isolation=(--no-build-isolation); fi
  rm -rf "$work/package"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps "${isolation[@]}" --target "$work/package" \
    --config-settings=build-dir="$work/cmake" --config-settings=cmake.define.LACONIC_SANITIZE=ON .
}
# LACONIC_ASAN_KEEP=1 takes the core of an earlier run, for callers that run one target after another.
if [ -z "${LACONIC_ASAN_KEEP:-}" ] || [ ! -e "$work/package/laconic/_version.py" ]; then
  mkdir -p "$work"
  exec {lock}> "$work/lock"  # two calls at the same time build one after the other
  flock "$lock"
  if [ -z "${LACONIC_ASAN_KEEP:-}" ] || [ ! -e "$work/package/laconic/_version.py" ]; then build; fi
  exec {lock}>&-
fi
if [ "${1:-}" = build ]; then exit 0; fi

# The installed package is editable: a .pth file puts its import hook before any path. Without `site` (-S) no .pth file
# is read, and PYTHONPATH decides. The guard runs inside pytest and stops it if another core was loaded.
cat > "$work/guard.$$" <<'GUARD'
import os
import pathlib

import laconic._core


def pytest_configure(config):
    loaded = pathlib.Path(laconic._core.__file__).resolve()
    wanted = pathlib.Path(__file__).resolve().parent
    if wanted not in loaded.parents:
        raise SystemExit(f"asan: expected the core below {wanted}, loaded {loaded}")
    if b"__asan_" not in loaded.read_bytes() or b"__ubsan_" not in loaded.read_bytes():
        raise SystemExit(f"asan: {loaded} is not built with the sanitizers")
    if laconic._core.isa != os.environ["LACONIC_ISA"]:
        raise SystemExit(f"asan: expected {os.environ['LACONIC_ISA']}, the core runs {laconic._core.isa}")
    print(f"asan: {loaded}, {laconic._core.isa}")
GUARD
mv "$work/guard.$$" "$work/package/laconic_asan_guard.py"  # other calls may read it now

site=$("$python" -c 'import sys; print(":".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))')
export PYTHONPATH=$work/package:$PWD/lab/src:$site
# torch and the interpreter leak on purpose at exit. A frame may request more memory than there is, which must be an
# error and not end the process.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}
export LACONIC_MUTATIONS=${LACONIC_MUTATIONS:-100000}
export PYTHONDONTWRITEBYTECODE=1

for isa in ${LACONIC_ISAS:-baseline avx2 avx512}; do
  export LACONIC_ISA=$isa
  chosen=$(sanitized -c 'import laconic._core; print(laconic._core.isa)')
  if [ "${1:-}" = isas ]; then
    if [ "$chosen" = "$isa" ]; then echo "$isa"; fi
    continue
  fi
  if [ "$chosen" != "$isa" ]; then
    echo "asan: this machine does not support $isa, skipped"
    continue
  fi
  if [ "${1:-}" = fuzz ]; then
    sanitized -c 'import laconic_asan_guard; laconic_asan_guard.pytest_configure(None)'
    sanitized fuzz/run.py --blind --sanitized "${@:2}"
    continue
  fi
  # A finding ends the process at once; --capture=sys lets its report reach stderr.
  sanitized -m pytest -p laconic_asan_guard -p no:cacheprovider --capture=sys -q --timeout 1800 \
    "${left_out[@]/#/--deselect=}" "${tests[@]}" "$@"
done
