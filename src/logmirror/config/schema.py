"""The JSON Schema of the configuration file, for editors and for everyone who generates files.

The schema knows keys, types, ranges and which of the two shapes a file has. Rules that compare
names or folders are beyond it; `logmirror validate` knows them all.
"""

from __future__ import annotations

from typing import Any, Final

from logmirror.config.model import ConfigModel

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_REFERENCE: Final = {"type": "string", "pattern": r"\$\{"}
"""A value that the environment gives; what it will be, no schema can know."""


def json_schema() -> dict[str, Any]:
    """The schema of the whole file, draft 2020-12; a new copy at each call."""
    schema = _tidy(ConfigModel.model_json_schema(by_alias=True))
    schema["$schema"] = DIALECT
    schema["title"] = "logmirror configuration"
    mirror = schema["$defs"]["Mirror"]
    mirror["oneOf"] = [{"required": ["partition"]}, {"required": ["partitions"]}]
    mirror["if"] = {"properties": {"destinations": _SOME_FILES}, "required": ["destinations"]}
    mirror["then"] = {"required": ["flush"]}
    one_of_all = {"not": {"anyOf": [{"required": [key]} for key in _OF_ONE_DESTINATION]}}
    own = {
        "required": ["destinations"],
        "not": {"required": ["destination-name-override"]},
    }
    schema["if"] = {"required": ["destination"]}
    schema["then"] = {"properties": {"mirrors": {"items": one_of_all}}}
    schema["else"] = {"properties": {"mirrors": {"items": own}}}
    return schema


_SOME_FILES: Final = {"contains": {"properties": {"type": {"enum": ["filesystem", "s3"]}}}}
_OF_ONE_DESTINATION: Final = (
    "destinations",
    "format",
    "compression",
    "encoding",
    "flush",
    "timestamp-mode",
)


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Say it as a person would: no titles, no nulls, short names, references allowed."""
    tidied: dict[str, Any] = {}
    for key, value in schema.items():
        if key in {"properties", "$defs"}:
            tidied[key] = {name.removesuffix("Model"): _tidy(item) for name, item in value.items()}
        elif key in {"items", "additionalProperties"} and isinstance(value, dict):
            tidied[key] = _tidy(value)
        elif key in {"anyOf", "oneOf"}:
            # Not oneOf: a type that the environment gives fits each of them.
            tidied["anyOf"] = [_tidy(item) for item in value if item != {"type": "null"}]
        elif key == "description":
            tidied[key] = " ".join(value.split())
        elif key == "$ref":
            tidied[key] = value.removesuffix("Model")
        elif key not in {"title", "discriminator"} and (key, value) != ("default", None):
            tidied[key] = value
    if len(tidied.get("anyOf", ())) == 1:
        tidied = {**tidied.pop("anyOf")[0], **tidied}
    return _or_reference(tidied)


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """Let `${VAR}` stand where the schema asks for a number, a truth value or certain words."""
    narrow = {"enum", "const", "pattern"} & schema.keys()
    if not narrow and schema.get("type") not in ("integer", "boolean"):
        return schema
    notes: dict[str, Any] = {
        key: schema.pop(key) for key in ("description", "default") if key in schema
    }
    return {"anyOf": [schema, dict(_REFERENCE)], **notes}
