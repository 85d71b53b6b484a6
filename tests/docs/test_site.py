"""The site of docs/: a strict build passes, and the site loads nothing from other hosts.

Method: `mkdocs build` runs once, as `make docs` does, into a temporary folder. A strict build fails
on broken links and anchors, and on pages that are in no menu. The pages are then read as HTML.
Their structure is compared with that of a second Markdown parser, markdown-it, which follows
CommonMark as GitHub does: MkDocs' parser needs deeper indentation in lists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from markdown_it import MarkdownIt

import logmirror

ROOT: Final = Path(__file__).resolve().parents[2]
API: Final = ROOT / "docs" / "reference" / "api.md"
"""Its content comes from docstrings."""
PAGES: Final = {
    path: path.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README", "index")
    for path in sorted((ROOT / "docs").rglob("*.md"))
} | {
    ROOT / "README.md": "index.html",
    ROOT / "ARCHITECTURE.md": "architecture.html",
    ROOT / "CHANGELOG.md": "changelog.html",
}
"""Each page of the repository, and its place on the site."""

pytestmark = [
    pytest.mark.gate("builds the site, which takes ten seconds"),
    pytest.mark.xdist_group("site"),  # one build for all
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "--site-dir", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def article(page: Path) -> str:
    """Return a page's content, without menus."""
    html = page.read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


def test_the_readme_is_the_start_page(site):
    start = article(site / "index.html")

    assert "<h1" in start
    assert 'href="errors.html"' in start
    assert 'href="docs/' not in start


def test_the_api_page_documents_every_public_name(site):
    page = article(site / "reference" / "api.html")
    names = [f"logmirror.{name}" for name in getattr(logmirror, "__all__", ())]

    assert [name for name in names if f'id="{name}"' not in page] == []
    assert 'id="logmirror.testing.MemoryStore"' in page
    assert 'id="logmirror.dataframes.LogmirrorArchive"' in page


def test_the_site_loads_nothing_from_other_hosts(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source|object)\b[^>]*\b(?:src|srcset|data)=[\"']?(?:https?:)?//[^>]*>"
        r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
        r"|url\([\"']?(?:https?:)?//[^)]*\)|@import\b[^;]*;"
    )
    found = [
        (path.relative_to(site).as_posix(), match[0])
        for pattern in ("*.html", "*.css", "*.svg")
        for path in site.rglob(pattern)
        for match in loads.finditer(path.read_text(encoding="utf-8"))
    ]

    assert list(site.rglob("*.css")) != []
    assert found == []


@pytest.mark.parametrize(
    "page", sorted(PAGES.keys() - {API}), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_a_page_has_the_same_structure_as_on_github(site, page):
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    on_github = parser.render(page.read_text(encoding="utf-8"))

    assert structure(article(site / PAGES[page])) == structure(on_github)


def structure(html: str) -> dict[str, int]:
    """Return how many lists, list items, table rows and code blocks there are."""
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in ("ul", "ol", "li", "tr", "pre")}


@pytest.mark.parametrize(
    ("link", "builds"),
    [
        ("[a page](other.md)", True),
        ("[an anchor](other.md#part)", True),
        ("[a page](missing.md)", False),
        ("[an anchor](other.md#missing)", False),
        ("[an anchor](#missing)", False),
        ("[a file](../missing.yaml)", False),
    ],
)
def test_a_broken_link_fails_the_build(tmp_path, link, builds):
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = settings[settings.index("\nvalidation:") : settings.index("\nnav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: links\n{validation}", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{link}\n", encoding="utf-8")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n", encoding="utf-8")

    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")

    assert (done.returncode == 0) == builds, done.stderr
    assert builds or "missing" in done.stderr
