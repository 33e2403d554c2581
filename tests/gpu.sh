#!/usr/bin/env bash
# All that an sm_90 or sm_120 card is for, in under 8 minutes: the conformance suite on the device, with all ranks
# of a group as virtual ranks on it; a little of each part under compute-sanitizer, where it is installed; the benches.
# Without a card each part says SKIPPED. Needs nvcc, and builds kernels for the card that nvidia-smi names; or say
# which: EAGLE_VERIFY_CUDA_ARCHS=90 (H100, H200) or 120a (RTX PRO 6000, RTX 50).
set -euo pipefail
cd "$(dirname "$0")/.."
# A stream for each virtual rank, and no kernel loaded late while another waits for it.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER

step() { printf '\n== %s\n' "$1"; }

if [ -z "${EAGLE_VERIFY_CUDA_ARCHS:-}" ] && command -v nvidia-smi >/dev/null 2>&1; then
    case "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 || true)" in
        9.0) export EAGLE_VERIFY_CUDA_ARCHS=90 ;;
        12.0) export EAGLE_VERIFY_CUDA_ARCHS=120a ;;
    esac
fi
cargo test --release --test gpu --no-run
cargo bench --bench gpu --no-run
SECONDS=0

step "conformance"
cargo test --release --test gpu -- --nocapture --test-threads=1

step "compute-sanitizer"
if command -v compute-sanitizer >/dev/null 2>&1 && command -v nvidia-smi >/dev/null 2>&1; then
    binary=$(cargo test --release --test gpu --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"executable":"\([^"]*gpu-[^"]*\)".*/\1/p' | tail -1)
    # Not of groups: the tools run one kernel at a time, and ranks wait for each other.
    for tool in memcheck racecheck initcheck synccheck; do
        EAGLE_VERIFY_GPU_LITTLE=1 timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 1 "$binary" \
            --test-threads=1 linear_layers kv_rows choices drafts ||
            { echo "$tool: failed, or out of time"; exit 1; }
    done
else
    echo "SKIPPED: no compute-sanitizer, or no driver"
fi

step "benches"
cargo bench --bench gpu

printf '\nall in %d s, the build not counted\n' "$SECONDS"
