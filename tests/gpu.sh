#!/usr/bin/env bash
# All that an sm_90 or sm_120 card is for, in under 8 minutes: the conformance suites on the device, with all ranks
# of a group as virtual ranks on it; the same under compute-sanitizer, where it is installed; the benches.
# Without a card each part says SKIPPED. Needs nvcc for the card's kernels:
#   EAGLE_VERIFY_CUDA_ARCHS=90 tests/gpu.sh        (H100, H200; the default is 120a)
set -euo pipefail
cd "$(dirname "$0")/.."
# A stream for each virtual rank, and no kernel loaded late while another waits for it.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER

step() { printf '\n== %s\n' "$1"; }

step "conformance"
cargo test --release --test gpu -- --nocapture --test-threads=1

step "compute-sanitizer"
if command -v compute-sanitizer >/dev/null 2>&1 && command -v nvidia-smi >/dev/null 2>&1; then
    binary=$(cargo test --release --test gpu --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"executable":"\([^"]*gpu-[^"]*\)".*/\1/p' | tail -1)
    for tool in memcheck racecheck; do
        timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 1 "$binary" \
            --test-threads=1 choices_equal drafts_equal || { echo "$tool: failed, or out of time"; exit 1; }
    done
else
    echo "SKIPPED: no compute-sanitizer, or no driver"
fi

step "benches"
cargo bench --bench gpu
