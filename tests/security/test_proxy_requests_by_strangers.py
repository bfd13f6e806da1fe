"""What web pages and clients without the right key cannot have the proxy do."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from edge_helpers import JSON, WEB_PAGES, routes_of
from proxy_cluster import Cluster

from pd.core.errors import ForbiddenError, UsageError
from pd.proxy.http.access import OPEN_PATHS, Access, Caller, load_api_keys
from pd.proxy.http.api_keys import ApiKey
from pd.proxy.http.error_shapes import is_anthropic, is_ollama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.proxy.server import ProxyThread

GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
ADMIN = [
    ("GET", "/workers", None),
    ("POST", "/workers", {"role": "decode", "url": "http://127.0.0.1:9"}),
    ("DELETE", "/workers/127.0.0.1:9", None),
    ("POST", "/flush_cache", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/abort_request", {"abort_all": True}),
]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(stack, "")
        made.pair()
        yield made


@pytest.fixture(scope="module")
def keyless() -> Iterator[ProxyThread]:
    with ExitStack() as stack:
        made = Cluster(stack, "")
        made.pair()
        yield made.proxy(text=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(proxy: ProxyThread, method: str, path: str, body: Any = None, **headers: str) -> int:
    url = proxy.url + path
    return httpx.request(method, url, json=body, headers=headers, timeout=20).status_code


# ---- web pages


@pytest.mark.one_process("reads the routes of the proxy in this process")
@pytest.mark.parametrize("page", WEB_PAGES)
def test_a_web_page_cannot_drive_a_proxy(keyless: ProxyThread, page: str) -> None:
    assert keyless.proxy is not None
    routes = list(routes_of(keyless.proxy._app))
    assert len(routes) >= 10
    for method, path in routes:
        body = json.dumps(GENERATE | {"abort_all": True, "prompt": "x"}).encode()
        answer = httpx.request(method, keyless.url + path, headers=WEB_PAGES[page], content=body)
        assert answer.status_code in (403, 415), path
        error = answer.json()["error"]
        if is_ollama(path):
            assert isinstance(error, str)
        elif is_anthropic(path):
            assert error["type"] in ("permission_error", "invalid_request_error")
        else:
            assert error["code"] in ("forbidden", "unsupported_media_type")
    assert ask(keyless, "POST", "/generate", GENERATE) == 200


@pytest.mark.parametrize("dest", ["image", "script", "iframe", "empty"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_parts_of_a_web_page_cannot_either(keyless: ProxyThread, site: str, dest: str) -> None:
    """A browser loads them with GET and without ``Origin``."""
    sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": dest}
    assert httpx.get(f"{keyless.url}/health_generate", headers=sent).status_code == 403
    # A link to the server is followed, and its own page loads what it needs.
    for other in ({"Sec-Fetch-Dest": "document"}, {"Sec-Fetch-Site": "same-origin"}):
        assert httpx.get(f"{keyless.url}/docs", headers=sent | other).status_code == 200


def test_a_name_that_was_made_to_resolve_here_reads_nothing(keyless: ProxyThread) -> None:
    for path in ("/workers", "/v1/models", "/metrics", "/openapi.json", "/docs", "/nothing"):
        assert ask(keyless, "GET", path, Host="evil.example") == 403


def test_curl_without_the_header_is_told_which(keyless: ProxyThread) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{keyless.url}/generate", content=b"{}", headers=form)
    assert answer.status_code == 415
    assert "-H 'Content-Type: application/json'" in answer.json()["error"]["message"]
    charset = {"Content-Type": "Application/JSON; charset=utf-8"}
    content = json.dumps(GENERATE).encode()
    answer = httpx.post(f"{keyless.url}/generate", content=content, headers=charset)
    assert answer.status_code == 200


def test_a_proxy_for_others_does_not_look_at_host(cluster: Cluster) -> None:
    proxy = cluster.proxy(text=False, host="0.0.0.0")
    proxy.proxy.url = proxy.url.replace("0.0.0.0", "127.0.0.1")  # type: ignore[union-attr]
    assert ask(proxy, "POST", "/generate", GENERATE, Host="api.example") == 200
    assert ask(proxy, "POST", "/generate", GENERATE, Origin="http://evil.example") == 403
    assert ask(proxy, "POST", "/flush_cache", Host="api.example") == 403
    assert ask(proxy, "POST", "/flush_cache", Host="localhost") == 200


def test_a_key_proves_more_than_a_host(cluster: Cluster) -> None:
    """So that something in front, which passes on the Host that it was asked for, works."""
    proxy = cluster.proxy(text=False, api_key="secret")
    headers = {"Host": "api.example", **bearer("secret")}
    assert ask(proxy, "POST", "/generate", GENERATE, **headers) == 200
    assert ask(proxy, "POST", "/generate", GENERATE, Host="api.example") == 401
    for path in ("/openapi.json", "/docs"):
        assert ask(proxy, "GET", path) == 401
        assert ask(proxy, "GET", path, **bearer("secret")) == 200
    # Administration without an admin key is for programs of this host all the same.
    assert ask(proxy, "POST", "/flush_cache", **headers) == 403
    assert ask(proxy, "POST", "/flush_cache", **bearer("secret")) == 200


class TestCors:
    PAGE = "https://chat.example.org"

    def test_a_page_on_the_list_may_generate(self, cluster: Cluster) -> None:
        proxy = cluster.proxy(text=False, api_key="secret", cors_origins=[self.PAGE])
        url = f"{proxy.url}/generate"
        asked = {
            "Origin": self.PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        allowed = httpx.options(url, headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == self.PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        answer = httpx.post(url, json=GENERATE, headers={"Origin": self.PAGE, **bearer("secret")})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == self.PAGE
        # It may read refusals too, and nobody else gets either.
        refused = httpx.post(url, json=GENERATE, headers={"Origin": self.PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == self.PAGE
        other = asked | {"Origin": "https://evil.example"}
        assert "access-control-allow-origin" not in httpx.options(url, headers=other).headers
        stranger = {"Origin": "https://evil.example", **bearer("secret")}
        assert httpx.post(url, json=GENERATE, headers=stranger).status_code == 403

    def test_without_the_flag_no_page_may(self, keyless: ProxyThread) -> None:
        asked = {"Origin": self.PAGE, "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{keyless.url}/generate", headers=asked)
        assert "access-control-allow-origin" not in answer.headers

    def test_a_star_lets_in_all_but_not_to_administration(self, cluster: Cluster) -> None:
        proxy = cluster.proxy(text=False, cors_origins=["*"])
        assert ask(proxy, "POST", "/generate", GENERATE, Origin="http://any.example") == 200
        assert ask(proxy, "POST", "/flush_cache", Origin="http://any.example") == 403

    @pytest.mark.parametrize("origin", ["chat.example.org", "https://a.b/c", "null", "", "http://"])
    def test_what_is_no_origin_is_refused(self, cluster: Cluster, origin: str) -> None:
        with pytest.raises(UsageError, match="--cors-origins"):
            cluster.proxy(cors_origins=[origin])


# ---- keys


def test_an_inference_key_does_not_administrate(cluster: Cluster) -> None:
    proxy = cluster.proxy(text=False, api_key="user", admin_api_key="root")
    for method, path, body in ADMIN:
        assert ask(proxy, method, path, body) == 401, path
        assert ask(proxy, method, path, body, **bearer("user")) == 403, path
        assert ask(proxy, method, path, body, **bearer("wrong")) == 401, path
        assert ask(proxy, method, path, body, **bearer("root")) == 200, path
    for key, status in (("user", 200), ("root", 200), ("wrong", 401)):
        assert ask(proxy, "POST", "/generate", GENERATE, **bearer(key)) == status
    assert ask(proxy, "POST", "/generate", GENERATE) == 401


def test_open_paths_are_open_with_a_slash_too_and_no_others(cluster: Cluster) -> None:
    proxy = cluster.proxy(text=False, api_key="user")
    for path in OPEN_PATHS:
        assert ask(proxy, "GET", path) == 200
        assert ask(proxy, "GET", f"{path}/") == 200
    for path in (
        "/",
        "//",
        "/v1/models/",
        "/health//",
        "/health/x",
        "//health",
        "/workers/",
        "/a/health/",
    ):
        answer = httpx.get(f"{proxy.url}{path}", follow_redirects=True)
        assert answer.status_code == 401, path


def test_an_admin_key_alone_leaves_generating_open(cluster: Cluster) -> None:
    proxy = cluster.proxy(text=False, admin_api_key="root")
    assert ask(proxy, "POST", "/generate", GENERATE) == 200
    for method, path, body in ADMIN:
        assert ask(proxy, method, path, body) == 403, path
        assert ask(proxy, method, path, body, **bearer("root")) == 200, path


def test_without_an_admin_key_only_programs_of_this_host_administrate(cluster: Cluster) -> None:
    proxy = cluster.proxy(text=False, api_key="user")
    for method, path, body in ADMIN:
        for passed_on in ("X-Forwarded-For", "Forwarded", "Via"):
            headers = {passed_on: "127.0.0.1", **bearer("user")}
            assert ask(proxy, method, path, body, **headers) == 403, path
        assert ask(proxy, method, path, body) == 401, path
        assert ask(proxy, method, path, body, **bearer("user")) == 200, path


def test_another_hosts_programs_do_not_administrate() -> None:
    access = Access([], key_required=False, on_loopback=False)
    scope: dict[str, Any] = {
        "headers": [(b"host", b"localhost")],
        "state": {"caller": Caller()},
        "method": "POST",
    }
    for client in (("10.0.0.7", 1), ("::ffff:10.0.0.7", 1), ("", 0), None):
        with pytest.raises(ForbiddenError, match="only programs on the server's host"):
            access.check_admin(scope | {"client": client})
    for client in (("127.0.0.1", 1), ("::1", 1), ("::ffff:127.0.0.1", 1)):
        access.check_admin(scope | {"client": client})


class TestKeyFile:
    def test_a_line_is_a_role_a_key_and_maybe_a_name(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# ours\nadmin  a-key  ops\n\ninference b-key # a team\n")
        keys = load_api_keys(file)
        assert keys == [ApiKey("a-key", "admin", "ops"), ApiKey("b-key", "inference")]
        assert "a-key" not in repr(keys)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "holds no key"),
            ("# nothing\n", "holds no key"),
            ("inference a\nroot b-secret\n", "line 2"),
            ("admin\n", "line 1"),
            ("admin b-secret name more\n", "line 1"),
            ("admin b-secret\ninference b-secret\n", "twice"),
        ],
    )
    def test_what_cannot_be_used_is_named_without_the_key(
        self, tmp_path: Path, text: str, says: str
    ) -> None:
        file = tmp_path / "keys"
        file.write_text(text)
        with pytest.raises(UsageError, match=says) as error:
            load_api_keys(file)
        assert "b-secret" not in error.value.message

    def test_a_file_that_all_can_read_is_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "keys"
        file.write_text("admin a-key\n")
        for mode, warned in ((0o600, False), (0o644, True)):
            file.chmod(mode)
            caplog.clear()
            load_api_keys(file)
            assert ("chmod 600" in caplog.text) == warned

    def test_all_keys_of_the_file_count(self, cluster: Cluster) -> None:
        keys = [ApiKey("a", "inference"), ApiKey("b", "inference"), ApiKey("c", "admin")]
        proxy = cluster.proxy(text=False, api_keys=keys)
        for key, status in (("a", 200), ("b", 200), ("c", 200), ("d", 401)):
            assert ask(proxy, "POST", "/generate", GENERATE, **bearer(key)) == status
        assert ask(proxy, "GET", "/workers", **bearer("a")) == 403
        assert ask(proxy, "GET", "/workers", **bearer("c")) == 200


def test_refusals_are_in_one_shape(keyless: ProxyThread) -> None:
    answer = httpx.post(f"{keyless.url}/generate", json={}, headers={"Origin": "null", **JSON})
    assert answer.status_code == 403
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "--cors-origins" in answer.json()["error"]["message"]
