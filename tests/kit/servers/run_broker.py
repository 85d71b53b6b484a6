"""Run the embedded broker, as `logmirror broker` does, with every option: they come as JSON."""

import json
import logging
import sys
from pathlib import Path

from logmirror.broker.options import BrokerOptions
from logmirror.broker.server import serve

options = json.loads(sys.argv[1])
ready = Path(options.pop("ready"))
options["log_dir"] = Path(options["log_dir"])
logging.basicConfig(level=logging.INFO)
serve(BrokerOptions(**options), on_ready=lambda host, port: ready.write_text(f"{host}:{port}"))
