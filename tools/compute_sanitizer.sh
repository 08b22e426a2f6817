#!/usr/bin/env bash
# Runs every Triton kernel under NVIDIA's compute-sanitizer, on tensors of small and odd sizes (tools/launch_kernels.py):
# memcheck finds accesses outside of an allocation, racecheck hazards in shared memory. It needs a GPU and
# compute-sanitizer, which comes with the CUDA toolkit, and an installed laconic.
#
#   tools/compute_sanitizer.sh            all kernels; exits with 1 if there is a finding
#   JOBS=8 tools/compute_sanitizer.sh     the cases in so many processes at once
#   TOOLS="memcheck initcheck synccheck" PYTHON=.venv/bin/python tools/compute_sanitizer.sh
#   tools/compute_sanitizer.sh --only topk    cases whose name has this text; kernels without a case are not counted then
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
jobs=${JOBS:-4}
tools=${TOOLS:-memcheck racecheck}
work=${WORK:-build/compute-sanitizer}
command -v compute-sanitizer > /dev/null || { echo "compute_sanitizer: no compute-sanitizer on the PATH" >&2; exit 2; }
rm -rf "$work"
mkdir -p "$work"

# Allocations of their own for all tensors: in a block that torch's allocator shares out, an access outside of a tensor
# hits another one and is not found.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONUNBUFFERED=1

# Runs the cases in parts, each after the words of a command; prints the logs of the parts that fail.
run_parts() {
  local name=$1 part failed=0 pids=()
  shift
  for ((part = 0; part < jobs; part++)); do
    "$@" "$python" tools/launch_kernels.py --part "$part/$jobs" --verbose --launched "$work/$name.$part.kernels" \
      "${arguments[@]}" > "$work/$name.$part.log" 2>&1 &
    pids+=($!)
  done
  for ((part = 0; part < jobs; part++)); do
    # The summary says "ERROR SUMMARY: 0 errors" or "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
    if ! wait "${pids[part]}" || grep -E 'SUMMARY: *[1-9]' "$work/$name.$part.log" > /dev/null; then
      failed=1
      echo "--- $name, part $part: the findings, or the last lines of $work/$name.$part.log"
      grep -nE -A 12 '^=========.*(Invalid|Error|Warning|hazard|Race|Uninitialized|Barrier)' "$work/$name.$part.log" | head -200
      tail -n 15 "$work/$name.$part.log"
    fi
  done
  return $failed
}

arguments=("$@")
status=0
seconds=$SECONDS
# Once without a sanitizer: it compiles the kernels, which then come from Triton's cache, and shows that all are launched.
run_parts plain env || status=1
if [ ${#arguments[@]} -eq 0 ]; then
  "$python" tools/launch_kernels.py --check "$work"/plain.*.kernels || status=1
fi
echo "compute_sanitizer: all cases have run without a sanitizer after $((SECONDS - seconds)) s"
for tool in $tools; do
  seconds=$SECONDS
  if run_parts "$tool" compute-sanitizer --tool "$tool" --target-processes all --report-api-errors no --error-exitcode 86; then
    echo "compute_sanitizer: $tool: no findings in $((SECONDS - seconds)) s"
  else
    echo "compute_sanitizer: $tool: findings, or a case failed, after $((SECONDS - seconds)) s" >&2
    status=1
  fi
  grep -hE 'SUMMARY|cases, ' "$work/$tool".*.log | sed 's/^/  /'
done
exit $status
