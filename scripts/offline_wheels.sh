#!/usr/bin/env bash
# Collect the wheels that a GPU host without a network needs to run pd, in addition to its torch.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/offline_wheels.sh [DIR] [flags]      (DIR: ./offline)

Downloads wheels of pd, its dependencies and FlashInfer for another host and writes DIR/install.sh.
Not torch, triton and numpy: a GPU host has those that fit its CUDA.

  --python VERSION    of the host (default: 3.12)
  --machine NAME      x86_64 or aarch64 (default: x86_64)
  --glibc VERSION     of the host, or older (default: 2.28)
  --nixl              also NIXL for CUDA 13
  --mooncake          also Mooncake for CUDA 13 and the Debian packages that it loads
  --tests             also what the tests need

Then copy DIR to the host and run there, with the Python that has torch:

  sh DIR/install.sh [flags of pip install]
END
}

directory=""
python_version=3.12 machine=x86_64 glibc=2.28
nixl="" mooncake="" tests=""
while [ $# -gt 0 ]; do
    case "$1" in
        --python | --machine | --glibc)
            [ $# -gt 1 ] || { echo "offline_wheels.sh: $1 needs a value" >&2; exit 2; }
            case "$1" in
                --python) python_version=$2 ;;
                --machine) machine=$2 ;;
                --glibc) glibc=$2 ;;
            esac
            shift
            ;;
        --nixl) nixl=1 ;;
        --mooncake) mooncake=1 ;;
        --tests) tests=1 ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "offline_wheels.sh: unknown flag $1; see --help" >&2; exit 2 ;;
        *)
            [ -z "$directory" ] || { echo "offline_wheels.sh: one directory, not $1 too" >&2; exit 2; }
            directory=$1
            ;;
    esac
    shift
done
directory=${directory:-offline}
root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
[ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)

# pip takes only wheels of the given tags, so we name all tags that the host can use.
platforms=(--platform "manylinux2014_$machine" --platform "manylinux2010_$machine")
platforms+=(--platform "manylinux1_$machine")
for minor in $(seq 5 "${glibc#2.}"); do
    platforms+=(--platform "manylinux_2_${minor}_$machine")
done

download() {
    "$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
        --implementation cp --python-version "$python_version" "${platforms[@]}" \
        --dest "$directory" "$@"
}

# FlashInfer requires many packages only for kernels that we do not use. It imports these.
flashinfer_needs=(apache-tvm-ffi nvidia-ml-py requests click einops ninja packaging tabulate tqdm)
requirements() {
    "$python" - "$root/pyproject.toml" "$@" <<'END'
import re, sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = sys.argv[2:]
wanted = project["dependencies"] if not extras else project["optional-dependencies"][extras[0]]
for requirement in wanted:
    if re.split(r"[<>=!~\[ ]", requirement)[0] not in ("torch", "numpy"):
        print(requirement)
END
}
mapfile -t runtime < <(requirements | grep -v '^xgrammar')
# We install xgrammar without its requirements (below), so transformers is named here.
resolved=("${runtime[@]}" "${flashinfer_needs[@]}" "transformers>=5,<6")
[ -z "$tests" ] || resolved+=(pytest pytest-timeout pytest-xdist hypothesis jsonschema)
# Without their requirements, so that no CUDA library of another version comes along.
mapfile -t alone < <(requirements | grep '^xgrammar')
while read -r requirement; do
    case "$requirement" in nixl*) [ -n "$nixl" ] || continue ;; esac
    alone+=("$requirement")
done < <(requirements gpu)
[ -z "$mooncake" ] || alone+=("mooncake-transfer-engine-cuda13>=0.3.13")

echo "downloading for Python $python_version, $machine, glibc $glibc into $directory" >&2
download "${resolved[@]}"
download --no-deps "${alone[@]}"
# Packages that came along although the host has them.
find "$directory" -name 'torch-*.whl' -o -name 'triton-*.whl' -o -name 'numpy-*.whl' \
    -o -name 'nvidia_c*.whl' | xargs -r rm --
# From a copy, because setuptools would leave files in the tree and find them there next time.
copy=$(mktemp -d)
trap 'rm -r "$copy"' EXIT
cp -r "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$root/pd" "$copy"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$directory" "$copy"
if [ -n "$mooncake" ]; then
    (cd "$directory" && apt-get -qq download libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200)
fi

{
    echo '#!/bin/sh'
    echo '# Written by scripts/offline_wheels.sh. Flags are passed on to pip install.'
    echo 'set -eu'
    # Not expanded here, because it is the directory of install.sh on the other host.
    echo 'here=$(cd "$(dirname "$0")" && pwd)'
    echo 'pip="${PYTHON:-python3} -m pip install --no-index --find-links $here"'
    echo 'case " $* " in'
    echo '*" --target"* | *" -t "*)'
    echo '    # For another directory pip leaves out of account what the host has: torch and numpy.'
    echo '    $pip --no-deps "$@" "$here"/*.whl'
    echo '    ;;'
    echo '*)'
    printf '    $pip "$@" pd-serve'
    printf " '%s'" "${resolved[@]:${#runtime[@]}}"
    printf '\n    $pip --no-deps "$@"'
    printf " '%s'" "${alone[@]}"
    printf '\n    ;;\nesac\n'
    if [ -n "$mooncake" ]; then
        echo 'if ! { ldconfig -p | grep -q libibverbs.so.1 && ldconfig -p | grep -q librdmacm.so.1; }; then'
        echo '    dpkg -i "$here"/*.deb || echo "mooncake loads libibverbs1 and librdmacm1: install them as root"'
        echo 'fi'
    fi
} > "$directory/install.sh"

(cd "$directory" && du -k --apparent-size -- *.whl $(ls -- *.deb 2>/dev/null) | sort -rn |
    awk '{printf "%8.1f MB  %s\n", $1 / 1024, $2; sum += $1} END {printf "%8.1f MB  in all\n", sum / 1024}')
echo "copy $directory to the host and run there: sh $(basename "$directory")/install.sh"
