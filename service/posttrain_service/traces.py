"""Traces by OpenTelemetry, where POSTTRAIN_TRACES asks for them: a request, and what became of the job that it made.

A job's trace is that of its request. Its spans (queue, launch, attempt) are sent when each is over, by whichever server
process moved the job, so they need nothing but the job's row and outlive any process. An attempt's span has an id that
follows from run and attempt: its processes are told it (TRACEPARENT) long before the span is sent. Without the extra
`otel` nothing here is imported.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from posttrain_service.errors import InvalidSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Span

TRACE = "trace"
"""Key of a job's spec under which the trace context of its request stands, as W3C's traceparent."""
TRACEPARENT = "TRACEPARENT"
"""Variable by which processes are told their trace context."""
CLOSE_S = 3.0
"""Longest time that the last spans may take to be sent when the server ends."""

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_next_id: ContextVar[int | None] = ContextVar("posttrain_next_span_id", default=None)
_current: ContextVar[str | None] = ContextVar("posttrain_traceparent", default=None)

Value = str | int | float | bool


def current() -> str | None:
    """The trace context in which the caller works, as W3C's traceparent; None outside of a traced request."""
    return _current.get()


def environment(traceparent: object, run_id: str, attempt: int) -> dict[str, str]:
    """Variables that put the processes of an attempt into its job's trace, below the attempt's span; none without a trace."""
    match = _FORM.fullmatch(traceparent) if isinstance(traceparent, str) else None
    return {} if match is None else {TRACEPARENT: f"00-{match[1]}-{_attempt_span(run_id, attempt):016x}-{match[3]}"}


class Traces:
    """Makes spans.

    Args:
        exporter: Where they go.
        at_once: Send each span when it ends; otherwise in batches, by a thread.
    """

    def __init__(self, exporter: SpanExporter, *, at_once: bool = False) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        named = Resource({SERVICE_NAME: "posttrain"}).merge(Resource.create())
        if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # OTEL_SERVICE_NAME says nothing
            named = named.merge(Resource({SERVICE_NAME: "posttrain"}))
        self._provider: TracerProvider = TracerProvider(resource=named, id_generator=_ids())
        self._provider.add_span_processor(SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("posttrain_service")

    @contextmanager
    def request(self, method: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """The span of a request, below that of a caller who sends one; current inside."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(method, context=_context(headers.get("traceparent")), kind=SpanKind.SERVER)
        token = _current.set(_traceparent(span))
        try:
            yield span
        finally:
            _current.reset(token)
            span.end()

    def span(
        self, name: str, traceparent: object, began: float, ended: float, attributes: Mapping[str, Value], *, error: str | None = None
    ) -> None:
        """A span that is over already.

        Args:
            name: What it was.
            traceparent: The context it belongs to; nothing is made without one.
            began: When, in seconds since the epoch.
            ended: The same.
            attributes: What is known of it.
            error: Why it failed; None = it didn't.
        """
        context = _context(traceparent)
        if context is None:
            return
        from opentelemetry.trace import Status, StatusCode

        span = self._tracer.start_span(name, context=context, start_time=_ns(began), attributes=attributes)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(max(began, ended)))

    @contextmanager
    def told_before(self, run_id: str, attempt: int) -> Iterator[None]:
        """The next span that is made inside is the attempt's: it has the id that its processes were told."""
        token = _next_id.set(_attempt_span(run_id, attempt))
        try:
            yield
        finally:
            _next_id.reset(token)

    def close(self) -> None:
        """Send what is left, for at most CLOSE_S: a collector that is away doesn't hold up the server's end."""
        closing = threading.Thread(target=self._provider.shutdown, name="posttrain-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def make(kind: Literal["off", "otlp"]) -> Traces | None:
    """What the setting asks for.

    Raises:
        InvalidSettings: The packages are not installed.
    """
    if kind == "off":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return Traces(OTLPSpanExporter())
    except ImportError as error:
        raise InvalidSettings(f"traces need packages that are not installed ({error.name}): pip install 'posttrain[otel]'") from error


def _attempt_span(run_id: str, attempt: int) -> int:
    digest = hashlib.sha256(f"{run_id}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


def _ids() -> IdGenerator:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random ids, but for a span whose id was told before."""

        def generate_span_id(self) -> int:
            return _next_id.get() or super().generate_span_id()

    return Ids()


def _context(traceparent: object) -> Context | None:
    """The context that a traceparent names; None for anything that is none."""
    match = _FORM.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    from opentelemetry import trace

    parent = trace.SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(match[3], 16)))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def _traceparent(span: Span) -> str:
    made = span.get_span_context()
    return f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags):02x}"


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
