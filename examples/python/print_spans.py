"""A collector of OpenTelemetry spans that prints them: one line each, as they come.

python print_spans.py [PORT]
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Printer(BaseHTTPRequestHandler):
    """Takes POST /v1/traces."""

    def do_POST(self) -> None:
        """Print the spans of one message."""
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
                events = ", ".join(event.name for event in span.events)
                trace = span.trace_id.hex()
                print(f"{trace} {names['service.name']:<17} {took_ms:9.1f} ms  {span.name}  {events}", flush=True)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing of the messages themselves."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 4318), Printer)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
