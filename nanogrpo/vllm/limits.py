"""Limits on the time and size of a request's headers, for uvicorn, vLLM's HTTP server.

In: connections, also those of strangers. Out: requests with complete headers; auth.py limits their
bodies. uvicorn alone would wait forever for the rest of a request's headers, store any number of
their bytes and of such connections, and not answer a POST that asks for a websocket. serve.py
passes OPTIONS to uvicorn. Read before: auth.py. Read next: server.py.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

# From the start of a connection, or the end of an answer, to the end of the next headers.
HEADER_SECONDS = 10.0
READ_SECONDS = 0.1  # added, to read bytes that have arrived in time but were not read yet
HEADER_BYTES = 1 << 16  # for all headers of a request
HEADERS = 100  # of a request, because each takes up more memory than its bytes
UNFINISHED = 512  # connections without a request, of all clients; then the oldest is closed


class Limited(HttpToolsProtocol):
    """HTTP as in uvicorn, but a request's headers must arrive within limits of time and size."""

    unfinished: ClassVar[dict[Limited, None]] = {}  # without a request in progress, oldest first
    timer: asyncio.TimerHandle | None = None  # runs while no request is in progress
    headers_seen = 0  # of the request
    received = 0  # bytes since the timer was started, without those of bodies

    def connection_made(self, transport):
        super().connection_made(transport)
        self.wait()

    def connection_lost(self, exc):
        self.stop()
        super().connection_lost(exc)

    def data_received(self, data):
        super().data_received(data)
        self.received += len(data)
        if self.received > HEADER_BYTES:
            self.end(431)

    def on_message_begin(self):
        self.headers_seen = 0
        super().on_message_begin()

    def on_header(self, name, value):
        self.headers_seen += 1
        if self.headers_seen > HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400 and closes the connection
        super().on_header(name, value)

    def on_body(self, body):
        # What remains are headers, but also the sizes of chunks, and the headers after them.
        self.received -= len(body)
        super().on_body(body)

    def on_headers_complete(self):
        self.stop()
        super().on_headers_complete()

    def on_response_complete(self):
        super().on_response_complete()
        # If the response is not complete, self.cycle is the client's next request already.
        if self.cycle.response_complete and not self.transport.is_closing():
            self.wait()

    def wait(self) -> None:
        self.received = 0
        self.timer = self.loop.call_later(HEADER_SECONDS, self.late)
        self.unfinished[self] = None
        if len(self.unfinished) > UNFINISHED:
            next(iter(self.unfinished)).end(503)

    def late(self) -> None:
        # If this process was busy or suspended, bytes may have arrived in time but not been read.
        self.timer = self.loop.call_later(READ_SECONDS, self.end, 408)

    def stop(self) -> None:
        self.unfinished.pop(self, None)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def end(self, status: int) -> None:
        """Close the connection, with an answer unless a request is in progress."""
        waiting = self.timer is not None
        self.stop()
        if not self.transport.is_closing():
            if waiting:
                self.transport.write(STATUS_LINE[status] + b"connection: close\r\n\r\n")
            self.transport.close()


# ws="none": uvicorn passes requests for a websocket on like all others, and auth.py refuses them.
OPTIONS = {"http": Limited, "ws": "none"}
