#!/bin/sh
# Debian's packages for the tests: mooncake loads the first two, two hosts need ip(8).
set -u
missing=""
for package in libibverbs1 librdmacm1 iproute2; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "not installed:$missing (needs root and apt-get); the tests that need them are skipped"
    exit ${CI:+1}
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing; } >/dev/null; then
    echo "could not install$missing; the tests that need them are skipped"
    exit ${CI:+1}
fi
