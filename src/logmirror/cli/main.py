"""The program `logmirror`: arguments in, results on stdout, logs on stderr, a meaningful exit code.

0 ok    1 a status row failed    2 usage    65 corruption
69 position or fenced    70 internal    75 unavailable, try again later

The commands are in `commands`. They take most of the time of loading, before which `run` must be
able to receive a signal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final, NoReturn

from logmirror.stopping import hold_signals

_COMPLETION: Final = "_LOGMIRROR_COMPLETE"
"""Set by a shell that asks for completions."""

_INTERRUPTED: Final = 130
"""128 plus the number of SIGINT, as after a program without a handler."""


def main() -> NoReturn:
    """Run the command line and exit."""
    with hold_signals() if sys.argv[1:2] == ["run"] else contextlib.nullcontext():
        _main()


def _main() -> NoReturn:
    from logmirror.cli import commands  # noqa: PLC0415  # see the module
    from logmirror.errors import LogmirrorError  # noqa: PLC0415  # see the module

    first_word = "".join(sys.argv[1:2])
    if _COMPLETION in os.environ:
        from logmirror.cli import completion  # noqa: PLC0415  # only a shell needs it

        completion.prepare()
        first_word = ""
    try:
        if _COMPLETION in os.environ or not commands.run_plain(sys.argv[1:]):
            commands.build(first_word)(prog_name="logmirror")  # also as `python -m logmirror`
    except LogmirrorError as error:
        from logmirror.cli.output import print_error  # noqa: PLC0415  # loads the configuration

        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)  # nothing that was acknowledged is in memory
    except BrokenPipeError:
        sys.exit(0)  # the reader of stdout has gone
    sys.exit(0)
