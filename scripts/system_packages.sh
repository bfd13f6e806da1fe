#!/bin/sh
# Debian's packages for the tests: mooncake loads the first two, hosts need ip(8) and ss(8), and
# openssl(1) makes certificates. With the argument "full", which make test-all gives, also a browser.
set -u
wanted="libibverbs1 librdmacm1 iproute2 openssl"
[ "${1:-}" = full ] && wanted="$wanted chromium"
missing=""
for package in $wanted; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "not installed:$missing (needs root and apt-get); the tests that need them are skipped"
    exit ${CI:+1}
fi
# No package starts a service: dpkg asks this program (policy-rc.d in Debian's invoke-rc.d).
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing; } >/dev/null; then
    echo "could not install$missing; the tests that need them are skipped"
    exit ${CI:+1}
fi
