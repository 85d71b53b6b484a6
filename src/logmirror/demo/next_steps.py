"""The commands that the demo prints for further steps. They work as printed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Final

_DUCKDB: Final = """\
{python} -c "import duckdb; duckdb.sql('''
  SELECT decode(value) ->> 'carrier' AS carrier, count(*) AS flights,
         round(avg((decode(value) ->> 'arr_delay')::INT), 1) AS minutes_late
  FROM '{folder}/archive/flights-parquet/*/*.parquet'
  GROUP BY ALL ORDER BY minutes_late DESC''').show()"
"""

_TEXT: Final = """
Try next

1. Query the Parquet files with DuckDB:{duckdb_hint}

{duckdb}
2. Damage one object, and let `verify` find it:

printf x >> {object}
{logmirror} verify --deep --mirror flights-native -c {config}

3. Restart the brokers, and show the position of each replica:

{logmirror} broker --log-dir {folder}/broker --listen {address} & a=$!
{logmirror} broker --log-dir {folder}/standby --listen {standby} & b=$!
sleep 5; until {logmirror} status -c {config}; do sleep 1; done; kill $a $b

All files are in {folder}; to delete them: rm -r {folder}"""


def text(folder: Path, address: str, standby: str) -> str:
    """Return the commands, with the paths of this run."""
    damaged = min((folder / "archive" / "flights-native" / "0").glob("*.batches"))
    python = _shown(Path(sys.executable))
    has_duckdb = importlib.util.find_spec("duckdb") is not None
    quoted = shlex.quote(str(folder))
    return _TEXT.format(
        duckdb=_DUCKDB.format(python=python, folder=folder),
        duckdb_hint="" if has_duckdb else f"\n\n{python} -m pip install duckdb",
        object=shlex.quote(str(damaged)),
        logmirror=_program(python),
        config=shlex.quote(str(folder / "demo.yaml")),
        folder=quoted,
        address=address,
        standby=standby,
    )


def _program(python: str) -> str:
    script = Path(sys.executable).parent / "logmirror"
    return _shown(script) if os.access(script, os.X_OK) else f"{python} -m logmirror"


def _shown(path: Path) -> str:
    """Return the path, relative if it is below the working directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
