"""The outside of pd is what the snapshot says, and a change of any part of it would be noticed."""

from __future__ import annotations

import argparse
import copy
import json
import re
from typing import Annotated, Any

import msgspec
import pytest
from outside.collect import SNAPSHOT, collect_outside
from outside.commands import FlagTypes, describe_commands, describe_parser
from outside.comparison import find_differences, render
from outside.openapi import describe_openapi
from outside.wire import describe_structs

# Operators write this command into their settings, so it belongs to the outside.
REMOTE_WORKER = "python3 -m pd.bench.load.worker"


@pytest.fixture(scope="module")
def snapshot() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(SNAPSHOT.read_text())
    return recorded


def test_the_outside_is_what_the_snapshot_says(snapshot: dict[str, Any]) -> None:
    differences = find_differences(snapshot, collect_outside())
    assert not differences, "\n".join(
        ["If this is meant: python -m tests.outside.collect --write", *differences]
    )


def test_the_snapshot_has_every_section(snapshot: dict[str, Any]) -> None:
    programs = snapshot["commands"]["programs"]
    assert {"pd-launch proxy", "pd-launch prefill", "pd-launch batch", "pd-bench"} <= set(programs)
    assert "--port" in programs["pd-launch decode"]["parser"]["flags"]
    assert "POST /v1/chat/completions" in snapshot["openapi"]["operations"]
    assert set(snapshot["metrics"]) == {"proxy", "prefill", "decode", "unified", "elastic"}
    assert all(snapshot["metrics"].values())
    assert all(snapshot["routes"].values())
    assert snapshot["answers"]["proxy"]["GET /no-such-path"]["status"] == 404
    assert "Generate" in snapshot["messages"]["by tag"]
    assert snapshot["messages"]["without tag"]
    assert "queue_full" in snapshot["errors"]["travelling"]


def test_the_snapshot_names_no_modules() -> None:
    text = SNAPSHOT.read_text().replace(REMOTE_WORKER, "")
    assert not re.findall(r"\bpd\.[a-z]\w+\.\w+", text)


def test_the_snapshot_is_written_as_the_command_writes_it(snapshot: dict[str, Any]) -> None:
    assert SNAPSHOT.read_text() == render(snapshot)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["metrics", "proxy", "pd_proxy_requests"], "counter(endpoint)"),
        (["errors", "codes", "queue_full"], ["status 503"]),
        (["commands", "programs", "pd-launch", "exit statuses", "--no-such-flag"], 1),
        (["answers", "proxy", "GET /no-such-path", "status"], 400),
    ],
)
def test_a_changed_fact_is_found(snapshot: dict[str, Any], path: list[str], value: Any) -> None:
    changed = copy.deepcopy(snapshot)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (difference,) = find_differences(snapshot, changed)
    assert difference.startswith(" > ".join(path))


def _parser(**changes: Any) -> argparse.ArgumentParser:
    flag = {"type": int, "default": 30000, "choices": None, "nargs": None} | changes
    name = flag.pop("name", "--port")
    parser = argparse.ArgumentParser()
    parser.add_argument(name, **flag)
    return parser


def _number_of_port(text: str) -> int:
    return int(text) % 65536


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "--ports"},
        {"default": 30001},
        {"default": 30000.0},
        {"type": float},
        {"type": _number_of_port},
        {"choices": [30000]},
        {"nargs": "+"},
        {"required": True},
        {"dest": "number"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_flag_is_found(changes: dict[str, Any]) -> None:
    before, after = (describe_parser(_parser(**each), FlagTypes()) for each in ({}, changes))
    assert find_differences(before, after)


def test_other_words_about_a_flag_are_no_difference() -> None:
    before = describe_parser(_parser(help="one text"), FlagTypes())
    assert not find_differences(before, describe_parser(_parser(help="another"), FlagTypes()))


def test_flags_and_statuses_of_subcommands_are_described() -> None:
    def program(arguments: list[str]) -> int:
        parser = argparse.ArgumentParser()
        command = parser.add_subparsers(required=True).add_parser("serve")
        command.add_argument("--port", type=lambda text: int(text) % 10)
        try:
            parser.parse_args(arguments)
        except KeyboardInterrupt:
            return 130
        except OSError:
            return 1
        return 0

    described = describe_commands({"tool": program})
    assert set(described["programs"]) == {"tool", "tool serve"}
    flag = described["programs"]["tool serve"]["parser"]["flags"]["--port"]
    assert "65536 → 6" in described["types of flags"][flag["type"]]
    assert described["programs"]["tool serve"]["exit statuses"]["--no-such-flag"] == 2
    assert described["programs"]["tool"]["exit statuses"]["interrupted"] == 130


def _document(name: str = "Body", **bounds: Any) -> dict[str, Any]:
    count = {"type": "integer", "title": "Count", "description": "how many", **bounds}
    schema = {
        "title": name,
        "type": "object",
        "properties": {"title": count, "inner": {"$ref": f"#/components/schemas/{name}"}},
        "required": ["title"],
    }
    body = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
    return {
        "paths": {"/count": {"post": {"operationId": f"{name}_post", "requestBody": body}}},
        "components": {"schemas": {name: schema}},
    }


def test_a_changed_bound_of_a_body_is_found() -> None:
    before, after = describe_openapi(_document()), describe_openapi(_document(minimum=1))
    assert find_differences(before, after) == [
        "operations > POST /count > requestBody > content > application/json > schema > properties "
        "> title > minimum: 1 is new"
    ]


def test_another_name_of_a_schema_is_no_difference() -> None:
    before, after = describe_openapi(_document()), describe_openapi(_document("Renamed"))
    assert not find_differences(before, after)


class Inner(msgspec.Struct):
    text: str


class RenamedInner(msgspec.Struct):
    text: str


class Sent(msgspec.Struct, tag="sent"):
    count: Annotated[int, msgspec.Meta(ge=0)]
    inner: Inner
    more: list[int] = []


class Renamed(msgspec.Struct, tag="sent"):
    count: Annotated[int, msgspec.Meta(ge=0)]
    inner: RenamedInner
    more: list[int] = []


class OtherTag(msgspec.Struct, tag="gone"):
    count: Annotated[int, msgspec.Meta(ge=0)]
    inner: Inner
    more: list[int] = []


class OtherOrder(msgspec.Struct, tag="sent"):
    inner: Inner
    count: Annotated[int, msgspec.Meta(ge=0)]
    more: list[int] = []


class OtherBound(msgspec.Struct, tag="sent"):
    count: int
    inner: Inner
    more: list[int] = []


class OtherDefault(msgspec.Struct, tag="sent"):
    count: Annotated[int, msgspec.Meta(ge=0)]
    inner: Inner
    more: list[int] = msgspec.field(default_factory=lambda: [1])


@pytest.mark.parametrize("changed", [OtherTag, OtherOrder, OtherBound, OtherDefault])
def test_a_changed_message_is_found(changed: type) -> None:
    assert find_differences(describe_structs([Sent]), describe_structs([changed]))


def test_another_name_of_a_message_class_is_no_difference() -> None:
    assert not find_differences(describe_structs([Sent]), describe_structs([Renamed]))
