"""An embedded broker as a process. Its options are one argument, as JSON.

python -m logmirror.torture.broker_process '{"log_dir": ..., "port": ..., "ready": ...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from logmirror.broker.options import BrokerOptions
from logmirror.broker.server import serve


def main() -> None:
    """Serve until the process is killed."""
    options = json.loads(sys.argv[1])
    ready = Path(options.pop("ready"))
    options["log_dir"] = Path(options["log_dir"])
    serve(BrokerOptions(**options), on_ready=lambda *_: ready.touch())


if __name__ == "__main__":
    main()
