"""The base of all pydantic models of the configuration file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


def kebab(name: str) -> str:
    """Return the key of a field: `max_bytes` is written `max-bytes`."""
    return name.replace("_", "-")


class Model(BaseModel):
    """One mapping of the file: strict types, no unknown keys, no input values in errors."""

    model_config = ConfigDict(
        alias_generator=kebab,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        """Treat `key:`, and `key: ${VAR:-}` with an empty result, as if the key were absent."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {k: v for k, v in value.items() if v is not None or k not in known}
