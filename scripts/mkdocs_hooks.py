"""A hook of `mkdocs build`: puts files from outside docs/ on the site, and rewrites links to them.

Links are written for GitHub: `docs/metrics.md` in README.md, `../examples/kafka.yaml` in a guide.
On the site, README.md is the start page, and files that are not Markdown are shown in one page per
directory (`SHOWN`). A link to a file that is not on the site stays as it is, so that a strict build
reports it.
"""
# ruff: noqa: INP001  # loaded by its path

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
}
"""Markdown outside docs/, and its page on the site."""
SHOWN: Final = {
    "examples": ("examples.md", "Example configurations", "Configuration files to start from."),
    "deploy": ("deploy-files.md", "Deployment files", "What the pages about operations refer to."),
}
"""Directories outside docs/, and the page that shows their files."""
COPIED: Final = ("LICENSE", "schemas/logmirror.config.schema.json", "deploy/requirements.lock")
"""Files outside docs/ that are copied to the site."""
_LONGEST: Final = 200
"""Lines. Longer files are copied, not shown."""
_LANGUAGES: Final = {
    "Dockerfile": "docker",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "sh",
    ".service": "ini",
}
"""By suffix; by name if there is none."""
_LINKS: Final = re.compile(
    r"(?P<before>\]\(|(?:src|srcset|href)=\"|^\[[^\]\n]+\]:[ ])(?P<target>[^\s)\"#]+)", re.MULTILINE
)
_CODE: Final = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:  # noqa: ANN401  # typed by MkDocs
    """Add the pages of `PAGES` and `SHOWN` and the files of `COPIED`."""
    contents = {page: _text(source) for source, page in PAGES.items()}
    contents |= {page: _directory_page(name) for name, (page, *_) in SHOWN.items()}
    copied = {*COPIED, *(name for directory in SHOWN for name in _files(directory) if _long(name))}
    contents |= {f"files/{name}": _text(name) for name in sorted(copied)}
    for page, content in contents.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:  # noqa: ANN401  # MkDocs
    """Rewrite the links of one page, outside code."""
    here = page.file.src_uri
    sources = {uri: name for name, uri in PAGES.items()}
    source = sources.get(here, f"docs/{here}")

    def rewritten(match: re.Match[str]) -> str:
        target = _on_site(posixpath.dirname(source), match["target"])
        if target is None:
            return match[0]
        return match["before"] + posixpath.relpath(target, posixpath.dirname(here) or ".")

    parts = _CODE.split(markdown)
    parts[::2] = [_LINKS.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)


def _on_site(directory: str, target: str) -> str | None:
    """Return a link target's place on the site, relative to docs/, or None to leave the link.

    Args:
        directory: The directory of the page in the repository.
        target: The link's target, without an anchor, relative to `directory`.
    """
    if re.match(r"[a-z]+:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(directory, target))
    top = path.partition("/")[0]
    if path in PAGES:
        return PAGES[path]
    if top == "docs":
        inside = path.removeprefix("docs/")
        return f"{inside}/README.md" if (ROOT / path / "README.md").is_file() else inside
    if path in COPIED or (top in SHOWN and (ROOT / path).is_file() and _long(path)):
        return f"files/{path}"
    if top in SHOWN and (ROOT / path).exists():
        return SHOWN[top][0] + ("" if path == top else f"#{_anchor(path)}")
    return None


def _directory_page(directory: str) -> str:
    """Return a page that shows the files of a directory, each under its path."""
    _, title, about = SHOWN[directory]
    parts = [f"# {title}\n\n{about}\n"]
    parents: set[str] = {directory}
    for name in _files(directory):
        parent = posixpath.dirname(name)
        if parent not in parents:
            parents.add(parent)
            parts.append(f"## {parent} {{#{_anchor(parent)}}}\n")
        heading = "##" if parent == directory else "###"
        parts.append(f"{heading} {posixpath.basename(name)} {{#{_anchor(name)}}}\n")
        if _long(name):
            parts.append(f"[{name}](files/{name})\n")
        else:
            language = _LANGUAGES.get(Path(name).suffix or Path(name).name, "text")
            parts.append(f"````{language}\n{_text(name).rstrip()}\n````\n")
    return "\n".join(parts)


def _files(directory: str) -> list[str]:
    """Return the paths of a directory's files, directory by directory."""
    found = [
        Path(folder, name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / directory)
        for name in names
        if not name.startswith(".")
    ]
    return sorted(found, key=lambda name: (posixpath.dirname(name), name))


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.lower())


def _long(name: str) -> bool:
    return name in COPIED or _text(name).count("\n") > _LONGEST


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
