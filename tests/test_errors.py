"""docs/errors.md: every kind and name of an error has its section, and what it quotes is real.

Method: the source is parsed for classes of errors and for named reasons; the page's headings and
quoted messages are compared with what is found.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from logmirror import errors
from logmirror.cli.output import place_in_docs, print_error
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
KINDS: Final = {
    found.kind: found
    for found in vars(errors).values()
    if isinstance(found, type) and "kind" in vars(found) and found is not LogmirrorError
}


@cache
def trees() -> list[ast.Module]:
    """The source."""
    return [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]


def anchors(page: str) -> list[str]:
    """What GitHub makes of the headings."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def named_classes() -> dict[str, str]:
    """The base of each class of errors that is derived from a kind."""
    bases = {
        node.name: base.id
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    kinds = {LogmirrorError.__name__, *(kind.__name__ for kind in KINDS.values())}

    def is_error(name: str) -> bool:
        return name == LogmirrorError.__name__ or (name in bases and is_error(bases[name]))

    return {name: base for name, base in bases.items() if is_error(name) and name not in kinds}


def named_reasons() -> set[str]:
    """`reason="SourceTrimmed"` and its like."""
    return {
        word.value.value
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "reason"
        and isinstance(word.value, ast.Constant)
        and re.fullmatch(r"([A-Z][a-z]+){2,}", str(word.value.value))
    }


def literals() -> Iterator[str]:
    """All text in the source; of text with places to fill, the parts between them."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def section(anchor: str) -> str:
    """The text between the heading of a kind and the next one of its level."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[anchor]


def test_each_kind_has_a_section_with_its_exit_code():
    assert set(KINDS) <= set(anchors(PAGE))
    for kind, found in KINDS.items():
        assert section(kind).strip().startswith(f"Exit code {found.exit_code}.")
        row = rf"^\| {found.exit_code} \|[^|]*\[{kind}\]\(#{kind}\)"
        assert re.search(row, PAGE, re.MULTILINE), kind


def test_each_named_error_has_a_section():
    classes = named_classes()
    reasons = named_reasons()
    inner = {name for name, base in classes.items() if base == LogmirrorError.__name__}

    assert len(reasons) >= 9
    assert len(classes) >= 12
    shown = reasons | classes.keys() - inner
    assert {name for name in shown if name.lower() not in anchors(PAGE)} == set()
    # These are translated before they are reported.
    assert {name for name in inner if f"`{name}`" not in section("internal")} == set()


def test_a_section_exists_once():
    assert sorted(anchors(PAGE)) == sorted(set(anchors(PAGE)))


def test_no_section_is_about_an_error_that_is_gone():
    known = {name.lower() for name in named_classes().keys() | named_reasons()}
    headings = re.findall(r"^### (([A-Z][a-z]+){2,})$", PAGE, re.MULTILINE)

    assert {heading for heading, _ in headings if heading.lower() not in known} == set()


def test_each_message_of_the_page_is_one_that_the_source_has():
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"^error \(([a-z-]+)\): (.+)$", "".join(blocks), re.MULTILINE)
    known = {part for text in literals() for part in re.split(": |:$", text) if part.strip()}

    begun = [text for text in known if text.endswith(" ") and len(text) > 4]

    def is_known(text: str) -> bool:
        return text in known or any(text.startswith(b) and text[len(b) :] in known for b in begun)

    assert len(quoted) >= 30
    assert {kind for kind, _ in quoted} <= KINDS.keys()
    for _, message in quoted:
        parts = re.sub(r" within \d+ ms:", ":", message).split(": ")
        assert [part for part in parts if not is_known(part)] == [], message


@pytest.mark.parametrize("kind", KINDS)
def test_the_terminal_names_the_section_of_a_kind(kind, capsys):
    print_error(KINDS[kind]("something is wrong", hint="look"))

    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error ({kind}): something is wrong"
    assert lines[-1] == f"  see docs/errors.md#{kind}"


def test_the_terminal_names_the_section_of_a_name():
    named = errors.PositionError("objects are gone", reason="DestinationDrift")
    other = errors.UsageError("a broker said no", reason="Authentication failed")
    inner = type("ReplacesError", (errors.UsageError,), {})("it replaces")

    assert place_in_docs(named) == "docs/errors.md#destinationdrift"
    assert place_in_docs(other) == "docs/errors.md#usage"
    assert place_in_docs(inner) == "docs/errors.md#replaceserror"


def test_links_between_the_pages_lead_somewhere():
    pages = [ROOT / "docs" / "errors.md", *sorted((ROOT / "docs" / "deploy").glob("*.md"))]
    for page in pages:
        for link in re.findall(r"\]\((?!https:)([^)]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), (page.name, link)
            if anchor:
                assert anchor in anchors(target.read_text(encoding="utf-8")), (page.name, link)


def test_a_copied_error_has_its_own_facts():
    shared = errors.UnavailableError("no response", hint="wait", broker=1)
    one = shared.copy(topic="a", broker=2)

    assert type(one) is errors.UnavailableError
    assert (one.message, one.hint) == ("no response", "wait")
    assert one.facts == {"topic": "a", "broker": 1}
    assert shared.facts == {"broker": 1}
