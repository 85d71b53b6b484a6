"""What the start of an executor costs: it stands before every run, and again after each crash."""

import importlib.util
import subprocess
import sys

START = """
import sys
from logmirror.engine import executor
executor.warm_up()
print("pandas" in sys.modules)
"""


def test_the_executor_does_not_import_pandas():
    assert importlib.util.find_spec("pandas"), "nothing is tested without it"
    started = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=120
    )
    assert started.stdout == "False\n"


def test_the_daemon_ends_with_spark_while_it_loads():
    daemon = subprocess.Popen(
        [sys.executable, "-m", "logmirror.engine.executor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    out, _ = daemon.communicate(timeout=120)  # closes its input at once
    assert out == b"", "it has loaded, and listens for tasks"
    assert daemon.returncode == 1
