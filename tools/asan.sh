#!/usr/bin/env bash
# Builds the core with the address and undefined-behaviour sanitizers and runs the tests of hostile frames and of parity
# with the reference, once per instruction set of this machine. Everything is built in build/asan; the installed package
# is not touched. Extra arguments go to pytest; `asan.sh fuzz ARGUMENTS` runs fuzz/run.py instead,
# `asan.sh build` builds only, `asan.sh isas` prints the instruction sets of this machine. LACONIC_PYTHON is the
# interpreter, if it is not that of .venv.
#
# A machine whose compiler has no sanitizer runtime takes it, and a core, from one that has:
#
#   tools/asan.sh core FOLDER      # there: the runtime and the core of this Python, to be copied
#   LACONIC_SANITIZER_RUNTIME=FOLDER LACONIC_ASAN_CORE=FOLDER tools/asan.sh    # here
#
# The core is taken if it is of the same csrc/ and can be loaded, otherwise built with that runtime; the Python files are
# always those of this checkout.
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
folder=${LACONIC_SANITIZER_RUNTIME:+$(realpath -e "$LACONIC_SANITIZER_RUNTIME")}
runtime() {
  local path=$folder/$1
  if [ -z "$folder" ]; then path=$("$CXX" -print-file-name="$1"); fi
  test -e "$path" || { echo "asan: ${folder:-$CXX} has no $1: install the sanitizer runtime of $CXX, or name a folder with" \
    "that of another machine in LACONIC_SANITIZER_RUNTIME" >&2; exit 1; }
  realpath "$path"
}
# The interpreter is not instrumented, so the runtime must be loaded first; libstdc++, too, or the interceptor of
# __cxa_throw has nothing to forward to.
asan=$(runtime libasan.so)
ubsan=$(runtime libubsan.so)
preload=$asan:$ubsan:libstdc++.so.6
# Addresses drawn at random can overlap the memory of older runtimes, which then end at once: they are fixed where that
# is allowed, and otherwise drawn again.
fixed=() starts=10
if setarch -R true 2> /dev/null; then fixed=(setarch -R) starts=1; fi
sanitized() { LD_PRELOAD=$preload "${fixed[@]}" "$python" -S "$@"; }
core() {  # runs lines of Python on the core
  local start
  for ((start = 1; start < starts; start++)); do sanitized -c "$1" 2> /dev/null && return; done
  sanitized -c "$1"
}

site=$("$python" -c 'import sys; print(":".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))')
export PYTHONPATH=$work/package:$PWD/lab/src:$site
# torch and the interpreter leak on purpose at exit. A frame may request more memory than there is, which must be an
# error and not end the process.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}
export LACONIC_MUTATIONS=${LACONIC_MUTATIONS:-100000}
export PYTHONDONTWRITEBYTECODE=1

digest() { find "$@" -type f ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum; }
# What the built package is of: the sources and the Python.
sources() { digest CMakeLists.txt pyproject.toml csrc src/laconic; "$python" -c 'import sys; print(sys.implementation.cache_tag)'; }

take_core() {
  if ! cmp -s <(digest CMakeLists.txt csrc) "$1/sources"; then
    echo "asan: the core in $1 is not of this csrc/: building one" >&2
    return 1
  fi
  mkdir -p "$work/package"
  cp -r src/laconic "$work/package/"
  cp "$1"/_core*.so "$work/package/laconic/"
  core 'import laconic._core' || { echo "asan: the core in $1 cannot be loaded: building one" >&2; return 1; }
}
build() {
  rm -rf "$work/package"
  if [ -n "${LACONIC_ASAN_CORE:-}" ] && take_core "$(realpath -e "$LACONIC_ASAN_CORE")"; then return; fi
  rm -rf "$work/package"
  # Without build isolation if the build tools are installed (no downloads), otherwise as `make` does it.
  local isolation=() flags=()
  if "$python" -c 'import nanobind, scikit_build_core' 2>/dev/null; then isolation=(--no-build-isolation); fi
  if [ -n "$folder" ]; then flags=(--config-settings=cmake.define.CMAKE_CXX_FLAGS="-B$folder"); fi
  # The tools that build, such as cmake, may be scripts of this Python: they read its .pth files, not this PYTHONPATH.
  env -u PYTHONPATH "$python" -m pip install --quiet --disable-pip-version-check --no-deps "${isolation[@]}" \
    --target "$work/package" --config-settings=build-dir="$work/cmake-{wheel_tag}" \
    --config-settings=cmake.define.LACONIC_SANITIZE=ON "${flags[@]}" .
}
# LACONIC_ASAN_KEEP=1 takes the core of an earlier run, for callers that run one target after another.
kept() { [ -n "${LACONIC_ASAN_KEEP:-}" ] && [ -e "$work/package/sources" ]; }
mkdir -p "$work"
if ! kept || [ "${1:-}" = build ]; then
  exec {lock}> "$work/lock"  # two calls at the same time build one after the other
  flock "$lock"
  if ! kept || ! cmp -s <(sources) "$work/package/sources"; then
    before=$(sources)
    build
    echo "$before" > "$work/package/sources"
  fi
  exec {lock}>&-
fi
# Other calls may be running on what is there, so that it is not built again behind their back.
cmp -s <(sources) "$work/package/sources" ||
  { echo "asan: the sources have changed since $work/package was built: run tools/asan.sh build" >&2; exit 1; }
if [ "${1:-}" = build ]; then exit 0; fi
if [ "${1:-}" = core ]; then
  mkdir -p "${2:?asan: core needs a folder}"
  cp "$work"/package/laconic/_core*.so "$2"
  cp "$asan" "$2/libasan.so"
  cp "$ubsan" "$2/libubsan.so"
  cp "${folder:-$(dirname "$("$CXX" -print-file-name=libsanitizer.spec)")}"/{libsanitizer.spec,libasan_preinit.o} "$2"
  digest CMakeLists.txt csrc > "$2/sources"
  exit 0
fi

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

for isa in ${LACONIC_ISAS:-baseline avx2 avx512}; do
  export LACONIC_ISA=$isa
  chosen=$(core 'import laconic._core; print(laconic._core.isa)')
  if [ "${1:-}" = isas ]; then
    if [ "$chosen" = "$isa" ]; then echo "$isa"; fi
    continue
  fi
  if [ "$chosen" != "$isa" ]; then
    echo "asan: this machine does not support $isa, skipped"
    continue
  fi
  if [ "${1:-}" = fuzz ]; then
    core 'import laconic_asan_guard; laconic_asan_guard.pytest_configure(None)'
    "${fixed[@]}" "$python" -S fuzz/run.py --blind --preload "$preload" --starts "$starts" "${@:2}"
    continue
  fi
  # A finding ends the process at once; --capture=sys lets its report reach stderr.
  sanitized -m pytest -p laconic_asan_guard -p no:cacheprovider --capture=sys -q --timeout 1800 \
    "${left_out[@]/#/--deselect=}" "${tests[@]}" "$@"
done
