"""Streams are written when a node's messages were read: once for all of them, and a fault in one
stream stays there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from processes import Stream, wait_until

from pd.core.messages import Finish, Output, StepOutputs
from pd.proxy.api.event_stream import EventStream
from pd.proxy.nodes.events import MessageReceived, MessagesRead

if TYPE_CHECKING:
    from proxy_cluster import Cluster

    from pd.core.messages import Generate


@pytest.mark.one_process("replaces a function of the proxy")
def test_a_stream_that_cannot_be_written_ends_and_others_of_the_message_go_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    write = EventStream.write_news

    def write_or_raise(writer: EventStream) -> bool:
        tried.append(writer._job.rid)
        if writer._job.rid == "broken":
            raise OSError("as scripted")
        return write(writer)

    monkeypatch.setattr(EventStream, "write_news", write_or_raise)
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


@pytest.mark.one_process("holds up the event loop of the proxy")
def test_messages_that_were_there_at_once_are_one_event(cluster: Cluster) -> None:
    node = cluster.node("unified", auto=False)
    proxy = cluster.proxy()
    stream = Stream(proxy.url, [5, 6], 5)
    request = node.wait_generate()
    inner = proxy.proxy
    assert inner is not None
    (handle,) = inner._pool.nodes

    def message(*tokens: tuple[int, int], finish: Finish | None = None) -> StepOutputs:
        outputs = [output(request, token, position, finish) for token, position in tokens]
        return StepOutputs(to="", sender="", outputs=outputs)

    async def receive(*messages: StepOutputs) -> None:
        for each in messages:
            inner._dispatcher.handle_event(MessageReceived(handle, each))
        inner._dispatcher.handle_event(MessagesRead())

    proxy.run(receive(message((7, 0))))
    wait_until(lambda: stream.output == [7], 20)
    proxy.run(receive(message((8, 1)), message((9, 2)), message((10, 3))))
    wait_until(lambda: stream.output == [7, 8, 9, 10], 20)
    proxy.run(receive(message((11, 4), finish=Finish("length"))))
    assert stream.join(20).succeeded_as([7, 8, 9, 10, 11])
    assert stream.sizes == [1, 3, 1]


def output(request: Generate, token: int, position: int, finish: Finish | None) -> Output:
    return Output(room=request.room, index=0, token_ids=[token], position=position, finish=finish)
