#!/bin/sh
# Prints the program of AIPerf, with whose times those of a test of make test-all are compared, or
# nothing if there is none. AIPerf needs other versions of packages than pd, so it has an environment
# of its own, which is made in DIRECTORY where the package index can be reached (some minutes):
#
#     sh scripts/aiperf.sh DIRECTORY [PYTHON]
set -u
directory=$1 python=${2:-python3}
given=${PD_TEST_AIPERF:-$(command -v aiperf)}
if [ -n "$given" ]; then
    echo "$given"
    exit 0
fi
if [ ! -e "$directory/.installed" ]; then
    if "$python" -m venv --clear "$directory" >&2 &&
        "$directory/bin/python" -m pip install --quiet --no-compile \
            --disable-pip-version-check --retries 1 --timeout 20 aiperf==0.13.0 >&2; then
        touch "$directory/.installed"
    else
        rm -rf "$directory"
        echo "AIPerf could not be installed; the test that compares with it is skipped" >&2
        exit 0
    fi
fi
echo "$(cd "$directory" && pwd)/bin/aiperf"
