"""deploy/ matches the program, and the installed program runs on a read-only file system.

Method: Dockerfile, manifests and unit are read as text and compared with the program's constants
and with each other; the image is not built. Manifests are validated by the schemas of Kubernetes,
the unit by systemd. The wheel is built as deploy/install.sh builds it, and run from a read-only
directory. At night `tests/e2e/test_installed.py` runs what the script installs.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kubernetes_validate
import pytest
import yaml

from kit.runs.commands import logmirror, mirror, write_config
from kit.servers.machine import program
from logmirror.cli.commands import VERSION
from logmirror.config.environment import ProcessEnvironment, read_environment
from logmirror.config.settings import load
from logmirror.errors import (
    CorruptionError,
    FencedError,
    InternalError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.monitoring import http

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
DEPLOY: Final = ROOT / "deploy"
MANIFESTS: Final = DEPLOY / "kubernetes"
KUBERNETES: Final = ("1.28", "1.34")
"""The oldest and the newest release whose schemas the manifests must fit."""
USER: Final = 10001
CONFIG: Final = "/etc/logmirror/mirror.yaml"
SECRETS: Final = "/run/secrets/logmirror"
PAGES: Final = set(http.PATHS)


# -- the image -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each on one line, without comments."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def final_stage() -> dict[str, str]:
    found = instructions()
    begin = max(at for at, (name, _) in enumerate(found) if name == "FROM")
    return dict(found[begin:])


def test_the_dockerfile_selects_an_unprivileged_user():
    stage = final_stage()

    assert stage["USER"] == f"{USER}:{USER}"
    assert f"useradd --uid {USER} " in stage["RUN"]


def test_the_dockerfile_leaves_build_tools_out():
    packages = final_stage()["RUN"].partition("--no-install-recommends")[2].partition("&&")[0]

    assert sorted(packages.split()) == [
        "ca-certificates",
        "default-jre-headless",
        "python3",
        "tini",
    ]
    assert final_stage()["COPY"] == "--from=build /opt/logmirror /opt/logmirror"


def test_the_dockerfiles_port_and_probe_match_the_program():
    stage = final_stage()
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", stage["HEALTHCHECK"]).groups()

    assert stage["EXPOSE"] == str(ProcessEnvironment().metrics_port) == port
    assert path in PAGES


def test_the_metrics_port_is_reached_from_outside_of_a_container_only():
    everywhere = {"LOGMIRROR_METRICS_HOST": "0.0.0.0"}  # in a container, what is published decides
    image = dict(one.split("=", 1) for one in final_stage()["ENV"].split())
    pod = {one["name"]: one["value"] for one in CONTAINER["env"]}

    assert image.items() >= everywhere.items()
    assert pod == everywhere
    assert read_environment(everywhere).metrics_host == "0.0.0.0"
    assert read_environment({}).metrics_host == "127.0.0.1"


def test_the_program_accepts_the_dockerfiles_command():
    entry = yaml.safe_load(final_stage()["ENTRYPOINT"])
    command = yaml.safe_load(final_stage()["CMD"])

    assert entry == ["tini", "--", "logmirror"]
    assert command == ["run", "-c", CONFIG]


def test_the_dockerfiles_sources_exist_and_are_not_ignored():
    copied = [
        name
        for instruction, words in instructions()
        if instruction == "COPY" and not words.startswith("--from")
        for name in words.split()[:-1]
    ]
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    let_through = [line[1:] for line in ignored.splitlines() if line.startswith("!")]

    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert sorted(copied) == sorted(let_through)


def test_the_version_is_the_same_everywhere():
    pages = [*DEPLOY.rglob("*.yaml"), DEPLOY / "docker/Dockerfile", *ROOT.glob("docs/deploy/*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    named = re.findall(r"(?:logmirror:|newTag: )(\d[\w.]*)", "\n".join(texts))

    assert len(named) >= 4
    assert set(named) == {VERSION}


# -- what is installed -----------------------------------------------------------------------------


def locked(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z][\w.-]*)==([^\s;]+)", text, re.MULTILINE))


def test_runtime_packages_are_locked_as_tested():
    runs, tested = locked(DEPLOY / "requirements.lock"), locked(ROOT / "requirements.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.match(r"[\w-]+", line)[0].lower() for line in project["dependencies"]}

    assert wanted <= runs.keys()
    assert {name: runs[name] for name in runs if tested.get(name) != runs[name]} == {}
    assert runs.keys().isdisjoint({"pytest", "ruff", "mypy", "moto", "duckdb"})
    text = (DEPLOY / "requirements.lock").read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") >= len(runs)


def test_build_packages_are_locked():
    script = (DEPLOY / "install.sh").read_text(encoding="utf-8")
    wanted = re.search(r"/\^\(([\w|-]+)\)==/", script)[1].split("|")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]

    assert set(wanted) <= locked(ROOT / "requirements.lock").keys()
    assert {re.match(r"\w+", name)[0] for name in requires} <= set(wanted)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Iterator[Path]:
    """The wheel, unpacked in a read-only directory."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels", ROOT]
    subprocess.run([*pip, *build], check=True, timeout=200)
    (wheel,) = (folder / "wheels").iterdir()
    unpack = ["install", "--no-deps", "--no-compile", "--target", folder / "site", wheel]
    subprocess.run([*pip, *unpack], check=True, timeout=200)
    change_modes(folder, stat.S_IWUSR, give=False)
    yield folder / "site"
    change_modes(folder, stat.S_IWUSR, give=True)


def change_modes(folder: Path, bits: int, *, give: bool) -> None:
    for path in [folder, *folder.rglob("*")]:
        mode = path.stat().st_mode
        path.chmod(mode | bits if give else mode & ~bits)


def test_the_wheel_holds_the_whole_program(installed):
    def files(folder: Path) -> set[str]:
        return {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    assert files(installed / "logmirror") == files(ROOT / "src" / "logmirror")


@pytest.mark.jvm
def test_the_wheel_runs_read_only_and_without_a_home(installed, tmp_path):
    """Only looking: the first copy compiles for a minute, which nights do with all of it."""
    config = write_config(tmp_path / "mirror.yaml", mirror("orders", "localhost:1", tmp_path))
    tmp_path.chmod(0o555)
    environment = {"PYTHONPATH": str(installed), "HOME": "/nonexistent"}

    def run(*command: str | Path) -> str:
        done = logmirror(*command, environment=environment, as_plain_user=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    assert run("validate", "-c", config).startswith("OK: 1 mirror(s)")
    assert run("--version") == f"logmirror {VERSION}\n"
    entry_points = "import importlib.metadata as m; print(*m.entry_points(group='console_scripts'))"
    seen = subprocess.run(
        [sys.executable, "-c", entry_points],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "value='logmirror.cli.main:main'" in seen.stdout
    tmp_path.chmod(0o755)


# -- Kubernetes ------------------------------------------------------------------------------------


def manifests() -> dict[str, dict[str, Any]]:
    """Each manifest that is always applied, by its kind."""
    found = {}
    for path in sorted(MANIFESTS.glob("*.yaml")):
        if path.name not in {"kustomization.yaml", "mirror.yaml", "egress.yaml"}:
            (document,) = yaml.safe_load_all(path.read_text(encoding="utf-8"))
            found[document["kind"]] = document
    return found


MANIFEST: Final = manifests()
KUSTOMIZATION: Final = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text("utf-8"))
POD: Final = MANIFEST["Deployment"]["spec"]["template"]
CONTAINER: Final = POD["spec"]["containers"][0]
ITS_OWN: Final = ("PodMonitor",)
"""Kinds that Kubernetes itself does not know."""


@pytest.mark.parametrize("release", KUBERNETES)
@pytest.mark.parametrize("kind", sorted(MANIFEST.keys() - set(ITS_OWN)))
def test_a_manifest_fits_the_schema_of_kubernetes(kind, release):
    kubernetes_validate.validate(MANIFEST[kind], release, strict=True)


def test_a_manifest_with_a_misspelt_key_does_not_fit():
    wrong = {**MANIFEST["Deployment"], "spec": {**MANIFEST["Deployment"]["spec"], "replica": 2}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_kustomize_lists_the_existing_files():
    files = {path.name for path in MANIFESTS.iterdir()}
    (generated,) = KUSTOMIZATION["configMapGenerator"]

    assert files == {
        *KUSTOMIZATION["resources"],
        *generated["files"],
        "kustomization.yaml",
        "podmonitor.yaml",
        "egress.yaml",
    }
    assert KUSTOMIZATION["namespace"] == MANIFEST["Namespace"]["metadata"]["name"]
    assert KUSTOMIZATION["images"][0]["name"] == CONTAINER["image"]
    mounted = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert mounted["config"]["configMap"]["name"] == generated["name"]


def test_the_pod_matches_the_program_and_the_dockerfile():
    spec = POD["spec"]
    probes = [CONTAINER[name]["httpGet"] for name in CONTAINER if name.endswith("Probe")]
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}

    assert CONTAINER["ports"] == [
        {"name": "metrics", "containerPort": ProcessEnvironment().metrics_port}
    ]
    assert len(probes) == 3
    assert {probe["path"] for probe in probes} == {"/livez", "/readyz"} <= PAGES
    assert {probe["port"] for probe in probes} == {"metrics"}
    assert {spec["securityContext"][key] for key in ("runAsUser", "runAsGroup")} == {USER}
    assert CONTAINER["args"][:3] == yaml.safe_load(final_stage()["CMD"])
    assert mounts == {"config": str(Path(CONFIG).parent), "secrets": SECRETS, "tmp": "/tmp"}


def test_the_pod_is_unprivileged_and_single():
    deployment, container = MANIFEST["Deployment"]["spec"], CONTAINER["securityContext"]

    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    assert POD["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["spec"]["automountServiceAccountToken"] is False
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_pods_space_on_disk_is_requested_and_holds_its_directory():
    def gibibytes(text: str) -> int:
        return int(text.removesuffix("Gi"))

    resources = CONTAINER["resources"]
    (tmp,) = [volume["emptyDir"] for volume in POD["spec"]["volumes"] if volume["name"] == "tmp"]
    request, limit = (
        gibibytes(resources[which]["ephemeral-storage"]) for which in ("requests", "limits")
    )
    assert 0 < request <= gibibytes(tmp["sizeLimit"]) < limit


@pytest.mark.parametrize("release", KUBERNETES)
def test_the_example_for_egress_fits_the_schema_and_the_mirror(release):
    (policy,) = yaml.safe_load_all((MANIFESTS / "egress.yaml").read_text("utf-8"))
    names, brokers, bucket = policy["spec"]["egress"]
    source = yaml.safe_load((MANIFESTS / "mirror.yaml").read_text("utf-8"))["mirrors"][0]["source"]
    host, port = source["bootstrap-servers"].split(":")

    kubernetes_validate.validate(policy, release, strict=True)
    assert policy["spec"]["policyTypes"] == ["Egress"]
    assert policy["spec"]["podSelector"]["matchLabels"] == POD["metadata"]["labels"]
    assert {one["port"] for one in names["ports"]} == {53}
    assert [one["port"] for one in brokers["ports"]] == [int(port)]
    (to,) = brokers["to"]
    namespace = to["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert host.endswith(f".{namespace}")
    assert [one["port"] for one in bucket["ports"]] == [443]


def test_the_page_runs_commands_in_the_pod_as_the_image_has_them():
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text(encoding="utf-8")
    command = page.partition("kubectl exec ")[2].partition("```")[0]

    name = MANIFEST["Deployment"]["metadata"]["name"]
    assert f"deployment/{name} -- " in command
    assert f"logmirror status -c {CONFIG}" in command
    assert final_stage()["ENV"].startswith("PATH=/opt/logmirror/bin:")


def test_all_selectors_match_the_pod():
    labels = POD["metadata"]["labels"]
    selectors = [
        MANIFEST["Deployment"]["spec"]["selector"],
        MANIFEST["PodDisruptionBudget"]["spec"]["selector"],
        MANIFEST["NetworkPolicy"]["spec"]["podSelector"],
        MANIFEST["PodMonitor"]["spec"]["selector"],
    ]

    assert [selector["matchLabels"] for selector in selectors] == [labels] * 4
    (endpoint,) = MANIFEST["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == CONTAINER["ports"][0]["name"]
    assert endpoint["path"] in PAGES


def test_the_mirror_of_the_manifests_is_valid_and_its_secrets_exist(tmp_path):
    text = (MANIFESTS / "mirror.yaml").read_text(encoding="utf-8")
    named = set(re.findall(rf"{SECRETS}/([\w.-]+)", text))
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text(encoding="utf-8")
    for name in named:
        (tmp_path / name).write_text("not a real secret\n", encoding="utf-8")
    config = tmp_path / "mirror.yaml"
    config.write_text(text.replace(SECRETS, str(tmp_path)), encoding="utf-8")

    assert [mirror.name for mirror in load(config).mirrors] == ["orders"]
    assert set(re.findall(r"--from-file=([\w.-]+)", page)) == named


# -- systemd ---------------------------------------------------------------------------------------


def unit() -> list[tuple[str, str, str]]:
    """Section, key and value of each line."""
    found, section = [], ""
    for line in (DEPLOY / "systemd" / "logmirror.service").read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.append((section, key, value))
    return found


def test_the_units_stop_and_restart_settings_match_the_program():
    service = {key: value for section, key, value in unit() if section == "Service"}
    no_use = {
        error.exit_code for error in (UsageError, CorruptionError, PositionError, FencedError)
    }

    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == no_use
    assert {UnavailableError.exit_code, InternalError.exit_code}.isdisjoint(no_use)
    assert service["ExecStart"] == f"/opt/logmirror/bin/logmirror run -c {CONFIG}"
    assert "MemoryDenyWriteExecute" not in service
    grace = POD["spec"]["terminationGracePeriodSeconds"]
    assert int(service["TimeoutStopSec"]) == grace


def test_the_units_paths_match_its_directories():
    service = {key: value for section, key, value in unit() if section == "Service"}
    page = (ROOT / "docs" / "deploy" / "systemd.md").read_text(encoding="utf-8")

    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    assert service["Environment"] == f"NUMBA_CACHE_DIR=/var/cache/{service['CacheDirectory']}"
    name, _, path = service["LoadCredential"].partition(":")
    assert f"${{file:/run/credentials/logmirror.service/{name}}}" in page
    for place in (path, CONFIG, "/opt/logmirror"):
        assert place in page


if sys.platform == "linux":  # systemd is nowhere else

    def test_systemd_accepts_the_unit(tmp_path):
        """With an existing program in place of logmirror, which may not be installed here."""
        text = (DEPLOY / "systemd" / "logmirror.service").read_text(encoding="utf-8")
        path = tmp_path / "logmirror.service"
        path.write_text(text.replace("/opt/logmirror/bin/logmirror", "/bin/sh"), encoding="utf-8")
        done = subprocess.run(
            [program("systemd-analyze"), "verify", path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert (done.returncode, done.stderr) == (0, "")
