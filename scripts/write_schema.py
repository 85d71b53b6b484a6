#!/usr/bin/env python3
"""Write the files that are generated from the models of the configuration file.

    python scripts/write_schema.py

writes `schemas/logmirror.config.schema.json` and, between two marks, the tables of keys in
`docs/configuration.md`. A test fails if a committed file differs from the generated one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from logmirror.config.settings import json_schema

ROOT: Final = Path(__file__).resolve().parent.parent
SCHEMA: Final = ROOT / "schemas" / "logmirror.config.schema.json"
PAGE: Final = ROOT / "docs" / "configuration.md"
BEGIN: Final = "<!-- keys: written by `make schema` -->"
END: Final = "<!-- end of keys -->"

SECTIONS: Final = (
    ("", "The file"),
    ("Mirror", "`mirrors[]`"),
    ("Source", "`mirrors[].source`"),
    ("Filesystem", "`mirrors[].destinations[]`, `type: filesystem`"),
    ("Kafka", "`mirrors[].destinations[]`, `type: kafka`"),
    ("S3", "`mirrors[].destinations[]`, `type: s3`"),
    ("Credentials", "`credentials`"),
    ("Identity", "`credentials.write`, `credentials.read`"),
    ("Column", "`keys`, `values`"),
    ("Groups", "`mirrors[].groups`"),
    ("Until", "`mirrors[].until`"),
    ("Flush", "`flush`"),
    ("Daily", "`flush.daily`"),
    ("SharedFilesystem", "`destination`, `type: filesystem`"),
    ("SharedKafka", "`destination`, `type: kafka`"),
    ("SharedS3", "`destination`, `type: s3`"),
    ("Limits", "`limits`"),
    ("Spark", "`spark`"),
    ("Broker", "`broker`"),
    ("ArchiveBucket", "`broker.archive[]`"),
)
"""Each mapping of the file and its heading, in the order of the page."""


def schema_text() -> str:
    """Return the JSON Schema as it is committed."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def page_text(page: str) -> str:
    """Return `page` with its generated part replaced.

    Raises:
        ValueError: The page lacks one of its marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        message = f"{PAGE.name} lacks the marks {BEGIN!r} and {END!r}"
        raise ValueError(message)
    return f"{before}{BEGIN}\n\n{tables(json_schema())}\n{END}{after}"


def tables(schema: dict[str, Any]) -> str:
    """Return one section for each mapping of the file."""
    missing = schema["$defs"].keys() - {name for name, _ in SECTIONS}
    if missing:
        message = f"SECTIONS lacks {sorted(missing)}"
        raise ValueError(message)
    parts = []
    for name, heading in SECTIONS:
        mapping = schema["$defs"][name] if name else schema
        parts.append(f"### {heading}\n\n{mapping['description']}\n\n{_table(mapping, schema)}")
    return "\n".join(parts)


def _table(mapping: dict[str, Any], schema: dict[str, Any]) -> str:
    required = mapping.get("required", ())
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, value in mapping["properties"].items():
        default = f"`{value['default']}`" if _is_simple(value.get("default")) else ""
        if isinstance(value.get("default"), bool):
            default = f"`{str(value['default']).lower()}`"
        default = "required" if key in required else default
        shape = schema["$defs"].get(value.get("$ref", "").rpartition("/")[2], {})
        meaning = value.get("description", shape.get("description", "")).replace("|", "\\|")
        lines.append(f"| `{key}` | {_kind(value)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _is_simple(default: object) -> bool:
    return isinstance(default, str | int)


def _kind(value: dict[str, Any]) -> str:  # noqa: PLR0911  # one return for each kind of schema
    """Return the kind of a value in a few words."""
    if "anyOf" in value:
        choices = [choice for choice in value["anyOf"] if choice.get("pattern") != r"\$\{"]
        return " or ".join(dict.fromkeys(_kind(choice) for choice in choices))
    if "$ref" in value:
        return "mapping"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    if value["type"] == "integer":
        return "whole number"
    if value["type"] == "object":
        return "mapping of texts" if "additionalProperties" in value else "mapping"
    return {"string": "text", "boolean": "`true`, `false`", "array": "list"}[value["type"]]


def main() -> None:
    """Write both files."""
    SCHEMA.parent.mkdir(exist_ok=True)
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
