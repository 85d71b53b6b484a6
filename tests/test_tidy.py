"""Rules about the code itself that no linter knows.

Method: every source file is parsed, every class of error is sent through pickle, every text is
searched. A rule that fails names the file and the line.
"""

from __future__ import annotations

import ast
import importlib
import pickle
import pkgutil
import re
import tokenize
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import logmirror
from logmirror import failpoints
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = sorted((ROOT / "src").rglob("*.py"))
CODE: Final = sorted(
    path
    for folder in ("src", "tests", "scripts", "bench")
    for path in (ROOT / folder).rglob("*.py")
)
TEXTS: Final = sorted(
    path
    for folder in (
        "src",
        "tests",
        "scripts",
        "bench",
        "docs",
        "deploy",
        "examples",
        "schemas",
        ".ci",
    )
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
) + sorted(path for path in ROOT.iterdir() if path.is_file() and path.name != ".coverage")

MAX_FUNCTION_LINES: Final = 70
MAX_MODULE_LINES: Final = 500


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def _lines(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield each line of text with its place."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # captured bytes
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield _place(path, number), line


def test_functions_fit_on_a_screen() -> None:
    long = [
        (_place(path, node.lineno), node.name)
        for path in CODE
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]

    assert long == []


def test_modules_stay_small() -> None:
    long = [
        str(path.relative_to(ROOT))
        for path in CODE
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_MODULE_LINES
    ]

    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT)) for path in CODE if not (ast.get_docstring(_tree(path)) or "")
    ]

    assert silent == []


def _is_a_front_door(tree: ast.Module) -> bool:
    """Whether a package's `__init__` holds nothing but its docstring, re-exports and `__all__`."""
    docstring, *rest = tree.body
    return isinstance(docstring, ast.Expr) and all(
        isinstance(node, ast.ImportFrom)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        for node in rest
    )


def test_a_package_s_init_holds_no_code() -> None:
    codes = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name == "__init__.py" and not _is_a_front_door(_tree(path))
    ]

    assert codes == []


def test_every_exception_to_a_rule_has_a_reason_in_words() -> None:
    exception = re.compile(r"#\s*(noqa|type:\s*ignore)\b")
    reasoned = re.compile(
        r"#\s*(noqa:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*|type:\s*ignore\[[\w, -]+\])\s+#\s+\w+"
    )
    naked = [
        place
        for place, line in _lines([path for path in CODE if path != Path(__file__).resolve()])
        if exception.search(line) and not reasoned.search(line)
    ]

    assert naked == []


def _error_classes() -> list[type[LogmirrorError]]:
    for module in pkgutil.walk_packages(logmirror.__path__, "logmirror."):
        if not module.name.endswith("__main__"):  # importing it would run the command
            importlib.import_module(module.name)
    found: list[type[LogmirrorError]] = []
    waiting = [LogmirrorError]
    while waiting:
        cls = waiting.pop()
        found.append(cls)
        waiting.extend(cls.__subclasses__())
    return found


def test_every_error_survives_the_way_from_executor_to_driver() -> None:
    for cls in _error_classes():
        error = cls("something is wrong", hint="do that", offset=7, name="x")

        copy = pickle.loads(pickle.dumps(error))

        assert type(copy) is cls
        assert (copy.message, copy.hint, copy.facts) == (error.message, error.hint, error.facts)
        assert str(copy) == str(error)
        assert copy.exit_code in {2, 65, 69, 70, 75}, cls


def test_every_crash_point_is_reached_somewhere_and_no_other() -> None:
    reached = {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("reach")
        and isinstance(node.args[0], ast.Constant)
    }

    assert reached == {
        *failpoints.POINTS,
        *failpoints.GROUP_POINTS,
        *failpoints.SNAPSHOT_POINTS,
        *failpoints.TAKEOVER_POINTS,
        *failpoints.MOVE_POINTS,
        *failpoints.COPY_POINTS,
        *failpoints.PLACE_POINTS,
        *failpoints.BUCKET_POINTS,
        *failpoints.MERGE_POINTS,
        *failpoints.COMPACT_POINTS,
    }


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")

    assert [place for place, line in _lines(TEXTS) if words.search(line)] == []


def test_no_text_names_one_machine_or_a_registry() -> None:
    # Written in halves so that this file passes its own rule.
    halves = [
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/home", "/"),
        ("/tmp/", "lab"),
        ("pypi", ".org"),
        ("python", "hosted"),
        ("repo", ".maven"),
        ("maven", ".org/maven2"),
        ("deb.", "debian"),
        ("registry", ".npmjs"),
    ]
    words = re.compile("|".join(re.escape(first + second) for first, second in halves))

    assert [place for place, line in _lines(TEXTS) if words.search(line)] == []


def test_the_changelog_begins_with_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    headings = re.findall(r"^## (\S+)", changelog, re.MULTILINE)

    assert headings[0] == project["project"]["version"]


def test_every_locked_package_has_its_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]

    assert len(entries) > 50
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


# ---- Words (docs/glossary.md) --------------------------------------------------------------------

GLOSSARY: Final = ROOT / "docs" / "glossary.md"
WORDED: Final = [path for path in CODE if path != Path(__file__).resolve()]
PAGES: Final = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
    if path != GLOSSARY
)


def _words() -> list[str]:
    """Return the words that the glossary's second table names."""
    table = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def _prose(text: str) -> str:
    """Blank what is quoted: fenced blocks, code spans. Lines keep their numbers."""
    fenced = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
    text = fenced.sub(lambda block: "\n" * block[0].count("\n"), text)
    return re.sub(r"``[^`]+``|`[^`\n]+(\n[^`\n]+)?`", lambda c: " " + "\n" * c[0].count("\n"), text)


def test_pages_use_the_words_of_the_glossary() -> None:
    words = re.compile(rf"\b({'|'.join(_words())})\b".replace(" ", r"\s+"), re.IGNORECASE)
    found = []
    for path in PAGES:
        text = _prose(path.read_text(encoding="utf-8"))
        found += [
            (_place(path, text.count("\n", 0, match.start()) + 1), match[0])
            for match in words.finditer(text)
        ]

    assert found == []


def test_messages_and_comments_use_the_words_of_the_glossary() -> None:
    words = re.compile(rf"\b({'|'.join(_words())})\b".replace(" ", r"\s+"), re.IGNORECASE)
    kinds = {tokenize.COMMENT, tokenize.STRING}
    found = []
    for path in WORDED:
        with path.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                is_key = token.type == tokenize.STRING and not re.search(r"\s", token.string)
                match = token.type in kinds and words.search(_prose(token.string))
                if match and not is_key:
                    found.append((_place(path, token.start[0]), match[0]))

    assert found == []


def test_identifiers_use_the_words_of_the_glossary() -> None:
    single = "|".join(word for word in _words() if " " not in word)
    words = re.compile(rf"(?<![a-z])({single})(?![a-z])")
    found = []
    for path in WORDED:
        with path.open("rb") as source:
            names = {
                (token.string, token.start[0])
                for token in tokenize.tokenize(source.readline)
                if token.type == tokenize.NAME
            }
        for name, line in sorted(names):
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
            if words.search(snake):
                found.append((_place(path, line), name))

    assert found == []
