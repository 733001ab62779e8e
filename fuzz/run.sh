#!/bin/sh
# Runs fuzz targets: fuzz/run.sh SECONDS [TARGET...]
# Each for so many seconds, one after another. Prints executions per target;
# exits with 1 on a finding, which lies in fuzz/artifacts/TARGET.
set -u

case ${1-} in
'' | *[!0-9]*)
    echo "usage: $0 SECONDS [TARGET...]" >&2
    exit 2
    ;;
esac
seconds=$1
shift
cd "$(dirname "$0")/.." || exit 2
[ $# -gt 0 ] || set -- record frame superblock config log_recovery

if ! cargo fuzz --version >/dev/null 2>&1; then
    cargo install cargo-fuzz --locked || exit 2
fi

out=$(mktemp) || exit 2
trap 'rm -f "$out"' EXIT
failed=0
for target; do
    seeds=fuzz/seeds/$target
    mkdir -p "fuzz/corpus/$target" "$seeds" || exit 2
    if ! cargo +nightly fuzz build "$target" >"$out" 2>&1; then
        cat "$out"
        echo "$target: does not build"
        exit 2
    fi
    if cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "$seeds" -- \
        -max_total_time="$seconds" -max_len=8192 -rss_limit_mb=2048 -timeout=10 \
        -print_final_stats=1 >"$out" 2>&1; then
        word=ok
    else
        word=FAILED
        failed=1
        tail -n 60 "$out"
    fi
    n=$(sed -n 's/^stat::number_of_executed_units: *//p' "$out" | tail -n 1)
    echo "$target: $word, ${n:-0} executions in $seconds s"
done
exit $failed
