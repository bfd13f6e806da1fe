"""Names of models and requests, paths and token ids in the spellings that clients send."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Any

import pytest
from fake_node import EOS
from test_proxy_chat import HELLO
from test_proxy_completions import says

from pd.core.messages import TokenLogprobs
from pd.proxy.api import logprobs
from pd.proxy.api.logprobs import TokenNames

if TYPE_CHECKING:
    from proxy_cluster import Cluster

BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HELLO},
    "/invocations": {"prompt": "a"},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
READ = ["/health", "/readiness", "/metrics", "/version", "/v1/models", "/v1/models/fake", "/docs"]


def test_an_empty_model_is_the_served_one(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    for path, body in BODIES.items():
        response = client.post(path, json=body | {"model": ""})
        assert response.status_code == 200, response.text
        assert response.json().get("model", "fake") == "fake"


def test_a_path_with_a_slash_at_its_end_is_the_path(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    client = cluster.client(api_key="s3cret", admin_api_key="adm1n")
    key = {"Authorization": "Bearer s3cret"}
    for path, body in BODIES.items():
        assert client.post(path + "/", json=body, headers=key).status_code == 200, path
        assert client.post(path + "/", json=body).status_code == 401, path
    for path in READ:
        response = client.get(path + "/", headers=key)
        assert response.status_code == 200, path
        without_key = client.get(path).status_code
        assert client.get(path + "/").status_code == without_key, path
    for method, path in (("GET", "/workers"), ("DELETE", "/workers/nobody"), ("POST", "/workers")):
        assert client.request(method, path + "/", headers=key).status_code in (403, 415), path
    admin = {"Authorization": "Bearer adm1n"}
    assert client.delete("/workers/nobody/", headers=admin).status_code == 404


def test_every_answer_has_a_request_id(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    asked = {"prompt": "a"}
    responses = [
        client.post("/v1/completions", json=asked),
        client.post("/v1/completions", json=asked | {"stream": True}),
        client.post("/v1/completions", json={}),
        client.post("/v1/completions", json=asked | {"model": "none"}),
        client.post("/v1/completions", content=b"{"),
        client.get("/v1/models"),
        client.get("/nothing"),
        client.post("/tokenize", json=asked),
    ]
    names = [response.headers["X-Request-Id"] for response in responses]
    assert all(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("given", "answered"),
    [
        (b"trace-7", "trace-7"),
        (b"a trace, with spaces", "a trace, with spaces"),
        ("tränk 1".encode(), "tr%C3%A4nk 1"),
        (b"tr\xe4nk", "tr%EF%BF%BDnk"),
        (b"a\tb", "a%09b"),
        (b"x" * 300, "x" * 256),
    ],
)
def test_a_request_id_of_any_spelling_is_answered(
    cluster: Cluster, given: bytes, answered: str
) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": ""}):
        response = client.post("/v1/completions", json=body, headers={b"X-Request-Id": given})
        assert response.headers["X-Request-Id"] == answered
        if response.status_code == 200 and not body.get("stream"):
            assert response.json()["id"] == answered


@pytest.mark.parametrize("given", [b"", b"  "])
def test_an_empty_request_id_is_none(cluster: Cluster, given: bytes) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
    body = b'{"prompt": "a"}'
    headers: dict[str, str | bytes] = {"Content-Type": "application/json", "X-Request-Id": given}
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["X-Request-Id"].startswith("cmpl-")
    connection.close()


def test_a_rid_that_no_header_holds_is_answered(cluster: Cluster) -> None:
    cluster.pair(says("x"))
    client = cluster.client()
    for rid in ("ein Name", "名前", "a\nb: c", " a "):
        response = client.post("/generate", json={"text": "a", "rid": rid})
        assert response.json()["meta_info"]["id"] == rid
        assert response.headers["X-Request-Id"].isascii()
        assert response.headers["X-Request-Id"]
        assert "b" not in response.headers


@pytest.mark.parametrize("key", ["05", "00", "+5", "-1", "5.0", " 5", "\u0665", "5_0"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_token_id_of_logit_bias_has_one_spelling(cluster: Cluster, path: str, key: str) -> None:
    cluster.pair(says("x"))
    bias = {"logit_bias": {"5": 1, key: 2}}
    body = BODIES[path] | ({"sampling_params": bias} if path == "/generate" else bias)
    response = cluster.client().post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "leading zeros" in error["message"]
    assert error["param"].endswith("logit_bias")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "messages": HELLO}, "messages"),
        ({"text": "a", "messages": HELLO}, "messages"),
        ({"prompt": "a", "text": "b"}, "text"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_tokenize_ignores_nothing_of_what_it_is_given(
    cluster: Cluster, fields: dict[str, Any], param: str
) -> None:
    cluster.pair()
    client = cluster.client()
    for path in ("/tokenize", "/v1/tokenize"):
        error = client.post(path, json=fields).json()["error"]
        assert error["param"] == param
    assert client.post("/tokenize", json={"prompt": "a", "messages": None}).status_code == 200


class _SameTexts:
    """A model to which tokens 5, 6 and 7 are the same text."""

    def decode_token(self, token: int) -> str:
        return "a" if token in (5, 6, 7) else f"t{token}"


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (5, {"a": -0.5, "token_id:6": -0.6, "t8": -0.8}),
        (6, {"token_id:5": -0.5, "a": -0.6, "t8": -0.8}),
        (7, {"token_id:5": -0.5, "token_id:6": -0.6, "t8": -0.8, "a": -9.0}),
        (8, {"a": -0.5, "token_id:6": -0.6, "t8": -0.8}),
        (9, {"a": -0.5, "token_id:6": -0.6, "t8": -0.8, "t9": -9.0}),
    ],
)
def test_tokens_of_the_same_text_are_all_among_the_likeliest(
    own: int, named: dict[str, float]
) -> None:
    chosen = {5: -0.5, 6: -0.6, 8: -0.8}.get(own, -9.0)
    entry = TokenLogprobs(own, chosen, [5, 6, 8], [-0.5, -0.6, -0.8])
    names = TokenNames(_SameTexts(), 3)  # type: ignore[arg-type]  # the part that is needed
    shown = logprobs.render_for_completion(names, [entry], [0])
    assert shown["top_logprobs"] == [named]
    # A client finds the token of the answer by its name.
    assert named[shown["tokens"][0]] == shown["token_logprobs"][0]


def test_likeliest_tokens_without_a_tokenizer_are_all_there(cluster: Cluster) -> None:
    cluster.pair(lambda _prompt, _index: [10, 11, EOS])
    client = cluster.client(text=False)
    body = client.post("/v1/completions", json={"prompt": [5], "logprobs": 3}).json()
    assert [len(top) for top in body["choices"][0]["logprobs"]["top_logprobs"]] == [3, 3, 3]
