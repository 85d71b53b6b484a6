"""Run the embedded broker, as `logmirror broker` does, with every option: they come as JSON."""

import json
import logging
import sys
from pathlib import Path

from logmirror.broker.options import BrokerOptions, ClientAuth, Listener, SecurityProtocol
from logmirror.broker.server import serve

options = json.loads(sys.argv[1])
ready = Path(options.pop("ready"))
options["log_dir"] = Path(options["log_dir"])
options["more_log_dirs"] = tuple(map(Path, options.get("more_log_dirs", ())))
options["listeners"] = tuple(
    Listener(**{**one, "protocol": SecurityProtocol(one["protocol"])})
    for one in options.get("listeners", ())
)
for name in ("tls_certificate", "tls_key", "tls_client_ca"):
    options[name] = Path(options[name]) if options.get(name) else None
options["tls_client_auth"] = ClientAuth(options.get("tls_client_auth", "none"))
logging.basicConfig(level=logging.INFO)
settings = BrokerOptions(**options)


def on_ready(host: str, port: int) -> None:
    """Write the address for the test."""
    ready.write_text(f"{host}:{port}")


if settings.bucket:
    from logmirror.app.broker import serve_bucket

    serve_bucket(settings, settings.log_dir, on_ready)
else:
    serve(settings, on_ready=on_ready)
