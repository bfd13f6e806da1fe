#!/bin/sh
# Prints a program of a peer that the tests of make test-all compare with or run against pd, or nothing
# if it cannot be installed. The peers need other versions of packages than pd, so each of them has an
# environment of its own, DIRECTORY/PEER. We make it where the package index can be reached (some
# minutes).
#
#     sh scripts/peer_environment.sh PEER DIRECTORY [PYTHON]
#
# aiperf and schemathesis print a program. sglang prints a Python that has SGLang's frontend language,
# llama-index, lm-eval, guidellm and harmony one that has this package, and frameworks one that has
# packages which get along with each other. sglang-programs prints SGLang's file of test programs.
set -u
peer=$1 directory=$2/$1 python=${3:-python3}
case $peer in
aiperf)
    given=${PD_TEST_AIPERF:-$(command -v aiperf)} program=aiperf
    packages=aiperf==0.13.0 alone=
    ;;
sglang)
    given=${PD_TEST_SGLANG:-} program=python
    # Newer releases pin another torch. The frontend needs none.
    packages="numpy tqdm pybase64 requests IPython pydantic aiohttp" alone=sglang==0.5.2
    ;;
sglang-programs)
    given=${PD_TEST_SGLANG_PROGRAMS:-} program=
    packages= alone=sglang==0.5.23
    ;;
frameworks)
    given=${PD_TEST_FRAMEWORKS:-} program=python
    packages="dspy==3.4.1 langchain-openai==1.7.4 langchain-anthropic==1.7.10 litellm==1.110.2"
    packages="$packages openai-agents==0.24.0 pydantic-ai-slim[openai,anthropic]==2.62.0" alone=
    ;;
llama-index)
    given=${PD_TEST_LLAMA_INDEX:-} program=python
    packages="llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1" alone=
    ;;
lm-eval)
    given=${PD_TEST_LM_EVAL:-} program=python
    # Of the transformers it needs only tokenizers, so no torch.
    packages="lm-eval[api]==0.4.13 transformers==5.24.0" alone=
    ;;
guidellm)
    given=${PD_TEST_GUIDELLM:-} program=python
    # It needs torch for a loader of data; this release is the one in requirements/tested.txt.
    packages="guidellm==0.8.1 transformers==5.24.0 torch==2.13.0" alone=
    ;;
harmony)
    given=${PD_TEST_HARMONY:-} program=python
    # LiteLLM's wheel has the vocabulary that openai-harmony would download.
    packages=openai-harmony==0.0.8 alone=litellm==1.110.2
    ;;
schemathesis)
    given=${PD_TEST_SCHEMATHESIS:-$(command -v schemathesis)} program=schemathesis
    packages=schemathesis==4.32.5 alone=
    ;;
*)
    echo "unknown peer '$peer': see the names in $0" >&2
    exit 2
    ;;
esac
if [ -n "$given" ]; then
    echo "$given"
    exit 0
fi
install() {
    "$directory/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
        --retries 1 --timeout 20 "$@" >&2
}
if [ ! -e "$directory/.installed" ]; then
    # shellcheck disable=SC2086  # a list of packages
    if "$python" -m venv --clear "$directory" >&2 && { [ -z "$packages" ] || install $packages; } &&
        { [ -z "$alone" ] || install --no-deps "$alone"; }; then
        touch "$directory/.installed"
    else
        rm -rf "$directory"
        echo "$peer could not be installed; the tests that need it are skipped" >&2
        exit 0
    fi
fi
directory=$(cd "$directory" && pwd)
if [ -n "$program" ]; then
    echo "$directory/bin/$program"
else
    echo "$directory"/lib/python3*/site-packages/sglang/test/test_programs.py
fi
