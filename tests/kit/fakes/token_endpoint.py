"""A token endpoint on loopback, and settings with secrets that must be shown nowhere."""

from __future__ import annotations

import base64
import http.server
import json
import pickle
import threading
import time
import traceback

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.token_endpoint import Tokens

SECRET = "canary-s3cret"  # of no one
TOKEN = "canary-t0ken"  # of no one
QUERY = "canary-qu3ry"
GOOD = (200, {}, json.dumps({"access_token": TOKEN, "expires_in": 100}).encode())


class Endpoint(http.server.ThreadingHTTPServer):
    """Responds with `responses` in turn, the last one again and again; `asked` is what came."""

    def __init__(self, *responses):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.responses, self.asked, self.delay_s, self.lock = (
            [*responses],
            [],
            0.0,
            threading.Lock(),
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            one = self.server.responses
            status, headers, content = one.pop(0) if len(one) > 1 else one[0]
        time.sleep(self.server.delay_s)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):  # what a followed redirect would send
        self.do_POST()

    def log_message(self, *_):
        pass


def settings_for(url, **properties):
    oidc = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "mirror",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": url,
    }
    return connection_settings("h:1", {**oidc, **properties})


def url_of(server, scheme="http"):
    port = server if isinstance(server, int) else server.server_port
    return f"{scheme}://127.0.0.1:{port}/token?key={QUERY}"


def get(url, *, tokens=None, within_ms=10_000, clock=SYSTEM_CLOCK, **properties):
    deadline_ms = clock.monotonic_ms() + within_ms
    settings = settings_for(url, **properties)
    return (tokens or Tokens()).get(settings, clock, deadline_ms=deadline_ms)


def check_no_canary(error):
    """No secret is in what a log, a report or a pickled error would show."""
    shown = "".join(traceback.format_exception(error))
    shown += f"{error!r} {error} {error.facts} {error.hint} {pickle.dumps(error)!r}"
    encoded = base64.b64encode(f"mirror:{SECRET}".encode()).decode()
    assert [one for one in (SECRET, TOKEN, QUERY, encoded) if one in shown] == []
