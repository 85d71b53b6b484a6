"""Faults at a destination: each is a clear error of the right kind, and nothing is lost.

One small archive is written once; each test damages a copy of it and runs the commands on it. Exit
codes: 65 corruption, 2 usage (the user can fix it), 75 unavailable (try again later).
"""

import json
import shutil

import pytest

from kit.fakes.disk import small_disk
from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source, object_names
from kit.runs.commands import EXTENSIONS, FORMATS, logmirror, mirror, write_config
from kit.runs.inline_run import run_now

pytestmark = [pytest.mark.xdist_group("e2e-folders"), pytest.mark.timeout(900)]

TOPIC = "folders"


@pytest.fixture(scope="module")
def finished(cli_broker, tmp_path_factory):
    """An archive of all formats, complete."""
    root = tmp_path_factory.mktemp("finished")
    cli_broker.create_topic(TOPIC)
    batches = {"batch.num.messages": 20, "linger.ms": 5}
    produce(cli_broker.bootstrap, TOPIC, odd_messages(400, seed=1), config=batches)
    result = run_now(configure(cli_broker, root))
    assert result.returncode == 0, result.stderr
    return root


@pytest.fixture
def archive(finished, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(finished, tmp_path / "archive")


def configure(broker, root, forms=FORMATS):
    mirrors = [mirror(TOPIC, broker.bootstrap, root, form=f, max_bytes=20_000) for f in forms]
    return write_config(root.parent / f"{root.name}.json", *mirrors)


def files(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def add_foreign(folder):
    (folder / "notes.txt").write_text("who put this here?")
    return "notes.txt", "unknown object in the chain"


def add_overlap(folder):
    name = object_names(folder)[1]
    first, rest = int(name[:20]), name[20:]
    (folder / f"{first - 1:020d}{rest}").write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    return f"{first - 1:020d}{rest}", "overlap in the chain"


def add_gap(folder):
    gone, after = object_names(folder)[1:3]
    (folder / gone).unlink()
    return after, "gap in the chain"


@pytest.mark.parametrize("damage", [add_foreign, add_overlap, add_gap])
@pytest.mark.mirror_v3("E2E-07")
def test_an_invalid_chain_stops_every_command(cli_broker, archive, damage):
    config = configure(cli_broker, archive, ["ndjson"])
    name, message = damage(archive / "ndjson" / "0")
    before = files(archive)

    verified = logmirror("verify", "-c", config, "--format", "json")
    status = logmirror("status", "-c", config, "--format", "json")
    ran = run_now(config)

    (report,) = json.loads(verified.stdout)
    (problem,) = report["problems"]
    assert verified.returncode == 65
    assert (problem["kind"], problem["message"]) == ("corruption", message)
    assert problem["facts"]["name"].endswith(name)
    assert problem["hint"]
    assert status.returncode == 1
    assert json.loads(status.stdout)[0]["error"]["kind"] == "corruption"
    assert ran.returncode == 65, ran.stderr
    assert f"error (corruption): {message}" in ran.stderr
    assert name in ran.stderr
    assert "hint: " in ran.stderr
    assert files(archive) == before


def cut_short(data):
    return data[: len(data) * 2 // 3]


def flip_a_bit(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit])
def test_verify_deep_finds_the_damaged_objects_and_no_others(cli_broker, archive, damage):
    damaged = {}
    for form in FORMATS:
        damaged[form] = object_names(archive / form / "0")[1]
        path = archive / form / "0" / damaged[form]
        path.write_bytes(damage(path.read_bytes()))
    config = configure(cli_broker, archive)

    names_alone = logmirror("verify", "-c", config)
    result = logmirror("verify", "--deep", "-c", config, "--format", "json")

    assert names_alone.returncode == 0
    assert result.returncode == 65, result.stdout
    for report in json.loads(result.stdout):
        (problem,) = report["problems"]
        assert problem["kind"] == "corruption"
        assert problem["facts"]["name"].endswith(damaged[report["mirror"]])
        assert report["objects"] == len(object_names(archive / report["mirror"] / "0"))


def test_a_record_that_was_changed_together_with_its_checksums_is_found_against_the_source(
    cli_broker, archive
):
    path = archive / "ndjson" / "0" / object_names(archive / "ndjson" / "0")[1]
    lines = path.read_text().splitlines()
    changed = json.loads(lines[3])
    changed["key"] = "Zm9yZ2Vk"
    lines[3] = json.dumps(changed, separators=(",", ":"), ensure_ascii=False)
    path.write_text("\n".join(lines) + "\n")
    for claim in (archive / ".logmirror" / "claims" / "ndjson").rglob("*"):
        if claim.is_file() and claim.name == path.name[:20]:
            claim.unlink()  # it knew the digest
    config = configure(cli_broker, archive, ["ndjson"])

    deep = logmirror("verify", "--deep", "-c", config)
    result = logmirror("verify", "--against-source", "-c", config, "--format", "json")

    assert deep.returncode == 0
    assert result.returncode == 65
    (problem,) = json.loads(result.stdout)[0]["problems"]
    assert "differs from the source" in problem["message"]
    assert problem["facts"]["name"] == path.name
    assert problem["hint"]


def test_a_read_only_folder_is_a_usage_error(cli_broker, archive):
    config = configure(cli_broker, archive)
    produce(cli_broker.bootstrap, TOPIC, odd_messages(5, seed=2))
    folders = [archive, *(path for path in archive.rglob("*") if path.is_dir())]
    before = files(archive)
    for folder in folders:
        folder.chmod(0o555)

    try:
        result = run_now(config, as_plain_user=True)
        status = logmirror("status", "-c", config, as_plain_user=True)
    finally:
        for folder in folders:
            folder.chmod(0o755)

    assert result.returncode == 2, result.stderr
    assert "error (usage): not allowed to " in result.stderr
    assert "reason: Permission denied" in result.stderr
    assert str(archive) in result.stderr
    assert "hint: grant this user write permission there" in result.stderr
    assert status.returncode == 0
    assert files(archive) == before


@pytest.mark.usefixtures("finished")
def test_a_root_below_a_file_is_a_usage_error(cli_broker, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    config = write_config(
        tmp_path / "config.json",
        mirror(TOPIC, cli_broker.bootstrap, tmp_path / "file" / "archive"),
    )

    result = run_now(config)

    assert result.returncode == 2, result.stderr
    assert "error (usage): cannot " in result.stderr
    assert "reason: Not a directory" in result.stderr
    assert "hint: choose another root" in result.stderr


def test_a_full_disk_loses_nothing_and_the_next_run_resumes(cli_broker, finished, tmp_path):
    topic = cli_broker.create_topic("full-disk")
    produce(cli_broker.bootstrap, topic, odd_messages(1500, seed=3))
    with small_disk(tmp_path, 300_000) as disk:
        mirrors = [
            mirror(topic, cli_broker.bootstrap, disk.folder, form=form, max_bytes=50_000)
            for form in FORMATS
        ]
        config = write_config(tmp_path / "config.json", *mirrors)

        full = run_now(config, environment=disk.environment)
        proven = logmirror("verify", "--deep", "--against-source", "-c", config)
        disk.grow(20_000_000)
        again = run_now(config, environment=disk.environment)

        assert full.returncode == 75, full.stderr
        assert "flow waits" in full.stderr
        assert "error (unavailable): could not " in full.stderr
        assert "reason: No space left on device" in full.stderr
        assert "hint: check the disk and its free space" in full.stderr
        assert proven.returncode == 0, proven.stdout
        assert again.returncode == 0, again.stderr
        source = Source(cli_broker.bootstrap, topic)
        for form in FORMATS:
            assert source.anomalies(disk.folder, form) == [], form
        staged = (disk.folder / ".logmirror" / "staged").rglob("*")
        assert not [path for path in staged if path.suffix in EXTENSIONS.values()]
