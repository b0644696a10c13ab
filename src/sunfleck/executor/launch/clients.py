"""Requests of clients (CLI, API), as the controller answers them. `client` is the other end.

A request is a msgpack map {id, method, params}, its answer {id, result} or {id, error: {kind, message}}, where
`kind` is the name of a class in core.errors. The answer may come much later and from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from sunfleck.core.errors import InvalidRequest, SunfleckError

log = logging.getLogger(__name__)

Reply = Callable[[Any], None]
"""Takes the result (anything msgpack can hold, or structs), or an exception. Thread-safe; once only."""
OnRequest = Callable[[str, dict[str, Any], Reply], None]


class Request(Struct, frozen=True):
    id: str
    method: str
    params: dict[str, Any] = {}


class Failure(Struct, frozen=True):
    kind: str
    message: str


class Answer(Struct, frozen=True, omit_defaults=True):
    id: str
    result: Any = None
    error: Failure | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Request)


class Clients:
    """Reads requests in the fabric's thread, and brings the answers back to it."""

    def __init__(self, on_request: OnRequest | None, post: Callable[[Callable[[], None]], None]) -> None:
        self._on_request, self._post = on_request, post
        self.socket: zmq.Socket[bytes] | None = None

    def receive(self, limit: int = 100) -> None:
        assert self.socket is not None
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = _decoder.decode(frames[-1])
            except msgspec.DecodeError as error:
                log.warning("dropped a request that is none: %s", error)
                continue
            self._handle(frames[0], request)

    def _handle(self, route: bytes, request: Request) -> None:
        reply = self._reply_to(route, request)
        if self._on_request is None:
            reply(InvalidRequest("this pool takes no requests"))
            return
        try:
            self._on_request(request.method, request.params, reply)
        except Exception as error:
            reply(error)

    def _reply_to(self, route: bytes, request: Request) -> Reply:
        done = False

        def reply(result: Any) -> None:
            nonlocal done
            if done:
                log.warning("second reply to %s ignored", request.method)
                return
            done = True
            data = _encode(request, result)
            self._post(lambda: self._send(route, data))

        return reply

    def _send(self, route: bytes, data: bytes) -> None:
        assert self.socket is not None
        try:
            self.socket.send_multipart([route, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("client is gone: %s", error)


def _encode(request: Request, result: Any) -> bytes:
    if not isinstance(result, BaseException):
        try:
            return _encoder.encode(Answer(request.id, result))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            result = error
    if isinstance(result, SunfleckError):
        failure = Failure(type(result).__name__, str(result))
    else:  # a bug of ours: the client gets one line, the log everything
        log.error("request %s failed", request.method, exc_info=result)
        failure = Failure("SunfleckError", f"{request.method} failed inside the controller: {result!r}")
    return _encoder.encode(Answer(request.id, error=failure))
