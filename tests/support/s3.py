"""A proxy that makes an S3 server slow and unreliable. It needs only the standard library.

The proxy speaks plain HTTP and uses nothing of S3 except the form of an error answer. So any server works: moto, MinIO
or a real one.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PIECE_BYTES = 16 << 10  # piece of a throttled body: small compared with the bytes of a second
_TIMEOUT_S = 30.0
_HOP_BY_HOP = ("connection", "expect", "keep-alive", "transfer-encoding")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s


class Fault(Enum):
    """Fault that replaces the answer to a request."""

    SLOW_DOWN = "503 SlowDown"
    INTERNAL_ERROR = "500 InternalError"
    FORBIDDEN = "403 AccessDenied"
    RESET = "a connection that is reset before the answer"
    TORN = "a connection that is reset in the middle of the body"


@dataclass(frozen=True)
class Request:
    """A request as the proxy saw it.

    Attributes:
        method: GET, HEAD and so on.
        path: path with query.
        answer: HTTP status sent, or the injected fault.
    """

    method: str
    path: str
    answer: int | Fault


@dataclass
class _Plan:
    """A fault for the next `times` requests whose path contains `part`."""

    part: str
    fault: Fault
    times: int
    method: str | None


class _Throttle:
    """Divides bytes per second among all connections: each piece gets the next free interval."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        if not self.bytes_per_s:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


class UnreliableProxy:
    """An HTTP proxy that delays and breaks a server's answers. Thread-safe.

    Attributes:
        port: on 127.0.0.1, for `endpoint_override`.
    """

    def __init__(self, upstream: tuple[str, int], *, bytes_per_s: float | None = None) -> None:
        """Start the proxy.

        Args:
            upstream: host and port of the server.
            bytes_per_s: limit for all answers' bodies together; None for no limit.
        """
        self._upstream = upstream
        self._throttle = _Throttle(bytes_per_s)
        self._lock = threading.Lock()
        self._plans: list[_Plan] = []
        self._requests: list[Request] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="mbaas-s3-proxy")
        self._thread.start()

    def fail(self, part: str, fault: Fault, *, times: int, method: str | None = None) -> None:
        """Inject `fault` into the next `times` requests whose path contains `part`.

        Faults for one path are injected in call order.

        Args:
            method: method of the requests; None for all.
        """
        with self._lock:
            self._plans.append(_Plan(part, fault, times, method))

    def throttle(self, bytes_per_s: float | None) -> None:
        """Change the limit, from the next piece of a body on."""
        self._throttle.bytes_per_s = bytes_per_s

    def requests(self, part: str = "") -> list[Request]:
        """Requests so far whose path contains `part`, oldest first."""
        with self._lock:
            return [request for request in self._requests if part in request.path]

    def forget(self) -> None:
        """Clear the list of requests and drop pending faults."""
        with self._lock:
            self._requests.clear()
            self._plans.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)

    def _take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for plan in self._plans:
                if plan.times and plan.part in path and plan.method in (None, method):
                    plan.times -= 1
                    return plan.fault
        return None

    def _log(self, method: str, path: str, answer: int | Fault) -> None:
        with self._lock:
            self._requests.append(Request(method, path, answer))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _TIMEOUT_S
            disable_nagle_algorithm = True  # otherwise each answer's body waits 40 ms for the header's ACK

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy._take_fault(self.command, self.path)
                if fault is None or fault is Fault.TORN:
                    self._forward(body, fault)
                else:
                    proxy._log(self.command, self.path, fault)
                    self._refuse(fault)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

            def _forward(self, body: bytes, fault: Fault | None) -> None:
                upstream = http.client.HTTPConnection(*proxy._upstream, timeout=_TIMEOUT_S)
                try:
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
                    upstream.request(self.command, self.path, body, headers)
                    answer = upstream.getresponse()
                    content = answer.read()
                finally:
                    upstream.close()
                proxy._log(self.command, self.path, fault or answer.status)
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in (*_HOP_BY_HOP, "content-length"):
                        self.send_header(name, value)
                told = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", told or str(len(content)))
                self.end_headers()
                self._send(content if fault is None else content[: len(content) // 2])
                if fault is not None:
                    self._reset()

            def _send(self, content: bytes) -> None:
                for start in range(0, len(content), _PIECE_BYTES):
                    piece = content[start : start + _PIECE_BYTES]
                    proxy._throttle.wait(len(piece))
                    self.wfile.write(piece)

            def _refuse(self, fault: Fault) -> None:
                if fault is Fault.RESET:
                    self._reset()
                    return
                status, code = fault.value.split()
                content = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
                self.send_response_only(int(status))
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def _reset(self) -> None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing to stderr: `requests()` has everything."""

        return Handler


@contextmanager
def unreliable(upstream: tuple[str, int], *, bytes_per_s: float | None = None) -> Iterator[UnreliableProxy]:
    """An `UnreliableProxy` that is closed at the end of the block."""
    proxy = UnreliableProxy(upstream, bytes_per_s=bytes_per_s)
    try:
        yield proxy
    finally:
        proxy.close()
