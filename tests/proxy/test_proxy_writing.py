"""Streams are written while a node's message is read: a fault in one of them stays there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from processes import Stream, wait_until

from pd.core.messages import Finish, Output, StepOutputs
from pd.proxy.web import JobResponse

if TYPE_CHECKING:
    import pytest
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


def test_a_stream_that_cannot_be_written_ends_and_others_of_the_message_go_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    write = JobResponse._write_news

    def write_or_raise(response: JobResponse, *arguments: object) -> bool:
        tried.append(response._job.rid)
        if response._job.rid == "broken":
            raise OSError("as scripted")
        return write(response, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(JobResponse, "_write_news", write_or_raise)
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    names = ("before", "broken", "behind")
    streams = {name: Stream(proxy.url, [5, 6], 3, rid=name) for name in names}
    node.wait_generate(3)
    requests = {request.rid: request for request in node.generates}

    def say(token: int, position: int, finish: Finish | None = None) -> None:
        outputs = [output(requests[name], token, position, finish) for name in names]
        sender = requests["before"].sender
        node.send(sender, StepOutputs(to="", sender="", outputs=outputs))

    say(7, 0)
    wait_until(lambda: all(stream.output == [7] for stream in streams.values()), 20)
    say(8, 1)
    assert streams["broken"].join(20).error is not None
    assert not streams["broken"].done
    node.wait_abort(requests["broken"].room)
    wait_until(lambda: streams["before"].output == streams["behind"].output == [7, 8], 20)
    say(9, 2, Finish("length"))
    for name in ("before", "behind"):
        assert streams[name].join(20).succeeded_as([7, 8, 9])
    assert set(tried) == set(names)


def output(request: Generate, token: int, position: int, finish: Finish | None) -> Output:
    return Output(room=request.room, index=0, token_ids=[token], position=position, finish=finish)
