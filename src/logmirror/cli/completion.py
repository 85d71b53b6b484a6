"""`logmirror completion`: the completion script for bash, zsh or fish.

The script asks the command for completions through an environment variable, so it knows the options
of later versions, too. Where the command has none (a folder, a number), the shell completes by
itself.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer
from typer.completion import get_completion_inspect_parameters

_BASH: Final = """\
_logmirror_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
        _LOGMIRROR_COMPLETE=complete_bash "$1" 2>/dev/null))
}
complete -o default -F _logmirror_completion logmirror
"""
_ZSH: Final = """\
#compdef logmirror
_logmirror_completion() {
    eval "$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \\
        _LOGMIRROR_COMPLETE=complete_zsh "${words[1]}" 2>/dev/null)"
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _logmirror_completion "$@"
else
    compdef _logmirror_completion logmirror
fi
"""
_FISH: Final = """\
function __logmirror_completion
    env _TYPER_COMPLETE_FISH_ACTION=$argv[1] _TYPER_COMPLETE_ARGS=(commandline -cp) \\
        _LOGMIRROR_COMPLETE=complete_fish logmirror 2>/dev/null
end
complete --command logmirror --no-files --condition "__logmirror_completion is-args" \\
    --arguments "(__logmirror_completion get-args)"
"""
_SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def prepare() -> None:
    """Enable typer's completion requests, without its `--install-completion` options."""
    get_completion_inspect_parameters()


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(help="The shell.", show_default=False),
    ],
) -> None:
    """Print a completion script for commands, options and configuration files.

    bash reads it in ~/.bashrc, zsh in a folder of its fpath, fish in ~/.config/fish/completions.
    """
    typer.echo(_SCRIPTS[shell], nl=False)
