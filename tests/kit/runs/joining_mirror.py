"""A mirror with a planted bug: an archive is continued without a comparison with its source.

    python -m kit.runs.joining_mirror CONFIG [--until-now]

So a second history of the source is copied behind the first one.
"""

from __future__ import annotations

from logmirror.to_archive import transfer
from logmirror.torture import mirror_process

if __name__ == "__main__":
    transfer.check_tail = lambda *_: None
    mirror_process.main()
