"""A machine without network namespaces or a library is noticed, in CI as a failure."""

from __future__ import annotations

import backends
import netns
import pytest


@pytest.mark.parametrize("what", ["namespaces", "library"])
@pytest.mark.parametrize("ci", ["", "1"])
def test_what_is_missing_skips_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, what: str, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(netns, "why_not", lambda: "network namespaces need root")
    monkeypatch.setattr(backends, "_missing", lambda flag: "no such library")
    require = netns.require if what == "namespaces" else backends.NIXL.require
    outcome = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(outcome, match=r"need root|no such library"):
        require()
