"""A server that collects noisy answers over HTTP and never sees a true one.

    python examples/local_server.py --options bus,car,bicycle --epsilon 1 --port 8000

GET /settings gives what clients need, POST /report takes one report, GET /estimate gives the
frequencies so far. Clients: examples/local_client.py. Everything the server stores is already
private, so the estimate can be asked for at any time at no further cost.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tacit.local import RandomizedResponse


class Collector(BaseHTTPRequestHandler):
    """Answers the three requests; `serve` sets the attributes of the class."""

    options: list[str]
    oracle: RandomizedResponse
    reports: list[int]

    def do_GET(self) -> None:
        """Give the settings, or the estimate."""
        if self.path == "/settings":
            self._send({"options": self.options, "epsilon": self.oracle.epsilon})
        elif self.path == "/estimate" and self.reports:
            found = self.oracle.estimate(self.reports)
            rows = zip(self.options, found.values, found.standard_errors, strict=True)
            self._send({name: [float(value), float(error)] for name, value, error in rows})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        """Take one report: a whole number below the number of options."""
        try:
            report = json.loads(
                self.rfile.read(max(0, min(int(self.headers["Content-Length"]), 100)))
            )
        except (TypeError, ValueError):
            return self.send_error(400)
        if type(report) is not int or not 0 <= report < len(self.options):
            return self.send_error(400)
        self.reports.append(report)
        self._send({"received": len(self.reports)})

    def log_message(self, format: str, *args: Any) -> None:
        """Keep no log: addresses and times would identify who sent which report."""

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(options: list[str], epsilon: float, port: int) -> ThreadingHTTPServer:
    """Return a server on this machine that is ready to run."""
    oracle = RandomizedResponse(epsilon=epsilon, n_options=len(options))
    settings = {"options": options, "oracle": oracle, "reports": []}
    return ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (Collector,), settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--options", required=True, help="answers, separated by commas")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    serve(given.options.split(","), given.epsilon, given.port).serve_forever()
