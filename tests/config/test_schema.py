"""The committed JSON Schema, the reference page and the examples match the program.

Method: committed files are compared with newly generated ones; every example is loaded.
"""

import importlib.util
import json
import re
from pathlib import Path

import jsonschema  # comes with kubernetes-validate
import pytest
import yaml

from kit.runs.configs import mirror, settings_of, with_files
from logmirror.app.acls import needed_acls
from logmirror.app.specs import mirror_specs
from logmirror.config.settings import (
    FilesystemDestination,
    KafkaDestination,
    S3Destination,
    json_schema,
    load_text,
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location(
        "write_schema", ROOT / "scripts" / "write_schema.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.mirror_v3("CFG-39")
def test_the_committed_schema_is_the_generated_one(writer):
    assert writer.SCHEMA.read_text(encoding="utf-8") == writer.schema_text(), "run `make schema`"


def test_the_reference_page_has_the_generated_tables(writer):
    page = writer.PAGE.read_text(encoding="utf-8")
    assert page == writer.page_text(page), "run `make schema`"


def test_a_page_without_its_marks_is_an_error(writer):
    with pytest.raises(ValueError, match="lacks the marks"):
        writer.page_text("# no marks")


def test_every_key_of_the_schema_is_explained(writer):
    schema = json_schema()
    mappings = [schema, *schema["$defs"].values()]
    keys = {key for mapping in mappings for key in mapping["properties"]}
    page = writer.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]* \| (.+) \|$", page, re.MULTILINE)
    assert {key for key, meaning in rows if meaning.endswith(".")} == keys


def test_the_defaults_of_the_schema_are_those_of_the_settings():
    settings = settings_of(mirror())
    defaults = {
        key: value["default"]
        for key, value in json_schema()["$defs"]["Mirror"]["properties"].items()
        if "default" in value
    }
    assert defaults == {
        key: getattr(settings.mirrors[0], key)
        for key in ("enabled", "format", "compression", "encoding")
    }
    assert json_schema()["$defs"]["Spark"]["properties"]["master"]["default"] == (
        settings.spark.master
    )


@pytest.fixture
def example_settings(tmp_path):
    """Load an example; only the files that it refers to exist."""

    def load_example(example):
        text = with_files(example, tmp_path).read_text(encoding="utf-8")
        return load_text(text, environ={}, name=example.name)

    return load_example


@pytest.mark.mirror_v3("CFG-40")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_and_can_run(example, example_settings):
    settings = example_settings(example)
    specs = mirror_specs(settings)
    assert [spec.name for spec in specs] == [one.name for one in settings.mirrors if one.enabled]
    assert all(spec.destinations for spec in specs)
    assert needed_acls(settings)
    first = example.read_text(encoding="utf-8").partition("\n")[0]
    assert first == "# yaml-language-server: $schema=../schemas/logmirror.config.schema.json"


@pytest.fixture(scope="module")
def schema_problems(writer):
    """Validates a file's text by the committed schema; returns the paths of what it refuses."""
    schema = json.loads(writer.SCHEMA.read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    return lambda text: [e.json_path for e in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_editor_with_the_schema_accepts_every_example(example, schema_problems):
    assert schema_problems(example.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("    topic:", "    topics:", "$.mirrors[0]"),
        ("partition: 0", "partition: -1", "$.mirrors[0]"),
        ("format: parquet", "format: parqet", "$.mirrors[0].format"),
        ("max-bytes:", "max-byte:", "$.mirrors[0].flush"),
    ],
)
def test_an_editor_with_the_schema_marks_what_is_wrong(old, new, path, schema_problems):
    text = (ROOT / "examples" / "parquet.yaml").read_text(encoding="utf-8")
    assert old in text
    found = schema_problems(text.replace(old, new))
    assert found
    assert all(one.startswith(path) for one in found), found


def test_the_examples_show_every_format_destination_and_both_shapes(example_settings):
    mirrors = [one for path in EXAMPLES for one in example_settings(path).mirrors]
    assert {one.format for one in mirrors} == {"parquet", "native", "ndjson"}
    kinds = {type(destination) for one in mirrors for destination in one.destinations}
    assert kinds == {FilesystemDestination, KafkaDestination, S3Destination}
    assert any(one.partitions is None for one in mirrors)
    assert any(one.source.properties for one in mirrors)
    assert any(len(one.destinations) > 2 for one in mirrors)
    texts = [path.read_text(encoding="utf-8") for path in EXAMPLES]
    assert any("\ndestination:" in text for text in texts)
    assert any("${file:" in text for text in texts)


def test_the_file_on_the_reference_page_is_valid(writer):
    page = writer.PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert load_text(block, environ={}).mirrors[0].name == "orders"
