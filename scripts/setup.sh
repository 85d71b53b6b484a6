#!/bin/sh
# Prepare this clone. Needs Python 3.11 or later, make, and a package manager.
#
#     scripts/setup.sh          .venv with the locked packages, and Java
#     scripts/setup.sh tests    the same, and the tools of the tests: Maven, a Java compiler, npm, kcat,
#                               Prometheus, shells
#
# Missing programs are installed with the package manager, as root or with sudo without a password.
# Without either, the script stops and prints what to install. Completed steps are skipped. Each step
# prints its duration.
set -eu
cd "$(dirname "$0")/.."

stop() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# step WHAT COMMAND...: run a command, and print what it does and how many seconds it took.
step() {
    printf 'setup: %s ...' "$1" >&2
    shift
    began=$(date +%s)
    if "$@"; then printf ' %d s\n' $(($(date +%s) - began)) >&2
    else status=$?; printf ' failed\n' >&2; return $status
    fi
}

# ---- Package manager -----------------------------------------------------------------------------

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then sudo -n "$@"
    else return 1
    fi
}

# install_first NAME...: install the first of these packages that is available.
install_first() {
    for name in "$@"; do
        case $manager in
            apt-get) as_root env DEBIAN_FRONTEND=noninteractive \
                         apt-get install -y -q --no-install-recommends "$name" ;;
            dnf) as_root dnf install -y -q "$name" ;;
            brew) brew install --quiet "$name" ;;
            *) return 1 ;;
        esac >>"$setup_log" 2>&1 </dev/null && return 0
    done
    return 1
}

install_or_update() {
    install_first "$@" && return 0
    [ "$manager" = apt-get ] && as_root apt-get update -q >>"$setup_log" 2>&1 </dev/null &&
        install_first "$@"
}

# provide WHAT APT DNF BREW: install WHAT. Each other argument lists package names, best first.
provide() {
    what=$1
    case $manager in
        apt-get) names=$2 ;;
        dnf) names=$3 ;;
        brew) names=$4 ;;
        *) names= ;;
    esac
    fix="install it and run this command again"
    if [ -n "$names" ]; then
        # shellcheck disable=SC2086  # a list of names
        step "installing ${names%% *} with $manager: $what" install_or_update $names && return 0
        tail -n 12 "$setup_log" >&2
        fix="try: $manager install ${names%% *}"
    fi
    stop "$what is missing and could not be installed; $fix"
}

manager=
for candidate in apt-get dnf brew; do
    if command -v $candidate >/dev/null 2>&1; then manager=$candidate; break; fi
done
setup_log=$(mktemp)
trap 'rm -f "$setup_log"' EXIT

# ---- Python and the locked packages --------------------------------------------------------------

is_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

# The tests run on 3.11. The locked packages have wheels for all of these.
find_python() {
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if is_python "$candidate"; then command -v "$candidate"; return 0; fi
    done
    return 1
}

make_environment() {
    python=$(find_python) ||
        stop "no Python 3.11 to 3.14 found; install one, or: make install PYTHON=/path/python3"
    packages=$(cksum <requirements.lock; "$python" --version)
    if [ "$(cat .venv/packages 2>/dev/null)" != "$packages" ]; then
        if ! "$python" -c 'import ensurepip' 2>/dev/null; then
            version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            provide "Python's venv module" "python$version-venv python3-venv" \
                python3-pip python3
        fi
        rm -rf .venv
        step "creating .venv with $("$python" --version)" "$python" -m venv .venv
        # uv needs a third of pip's time. It is locked too, and so are the build tools of the two
        # packages that have no wheels.
        locked uv >.venv/uv.lock
        locked setuptools wheel packaging >.venv/builders.lock
        step "installing uv" pip_install --require-hashes -r .venv/uv.lock
        step "installing $(grep -c '^[a-z]' requirements.lock) Python packages" install_packages
        printf '%s' "$packages" >.venv/packages
    fi
    project=$(cksum <pyproject.toml)
    if [ "$(cat .venv/project 2>/dev/null)" != "$project" ]; then
        step "installing logmirror" pip_install --no-deps --no-build-isolation --editable .
        step "compiling kernels" \
            .venv/bin/python -c 'from logmirror.engine import executor; executor.warm_up()'
        printf '%s' "$project" >.venv/project
    fi
}

# locked NAME...: the entries of these packages in requirements.lock, with their hashes.
locked() {
    names=$(printf '%s|' "$@")
    awk -v names="^(${names%|})==" '/^[a-z]/ { wanted = $0 ~ names } wanted' requirements.lock
}

# uv does not read pip's configuration; where it cannot reach the packages, pip may.
install_packages() {
    uv_install -r .venv/builders.lock && uv_install --no-build-isolation -r requirements.lock ||
        { pip_install --require-hashes -r .venv/builders.lock &&
            pip_install --require-hashes --no-build-isolation -r requirements.lock; }
}

uv_install() {
    .venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes "$@" \
        >>"$setup_log" 2>&1
}

# Modules are compiled at their first import; most are never imported. Images often forbid this, and
# every start of a process would compile them again.
unset PYTHONDONTWRITEBYTECODE
pip_install() {
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile "$@"
}

# ---- Java, for Spark and Apache Kafka ------------------------------------------------------------

# is_java HOME: whether HOME has a runtime of version 17 or later.
is_java() {
    [ -x "$1/bin/java" ] || return 1
    major=$("$1/bin/java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
    [ "${major:-0}" -ge 17 ]
}

find_java() {
    on_path=$(command -v java 2>/dev/null || true)
    if [ -n "$on_path" ]; then
        on_path=$(dirname "$(dirname "$(readlink -f "$on_path")")")
    fi
    for home in "${JAVA_HOME:-}" "$on_path" \
        /usr/lib/jvm/* /opt/java/* /opt/jdk* \
        /Library/Java/JavaVirtualMachines/*/Contents/Home \
        /opt/homebrew/opt/openjdk* /usr/local/opt/openjdk* \
        "$HOME"/.sdkman/candidates/java/current; do
        if [ -n "$home" ] && is_java "$home"; then printf '%s' "$home"; return 0; fi
    done
    return 1
}

need_java() {
    if ! java_home=$(find_java); then
        provide "Java 17 or later" \
            "openjdk-21-jre-headless openjdk-17-jre-headless openjdk-25-jre-headless" \
            "java-21-openjdk-headless java-17-openjdk-headless java-latest-openjdk-headless" \
            "openjdk@21 openjdk"
        java_home=$(find_java) || stop "Java was installed but is not found; set JAVA_HOME"
    fi
    printf '%s' "$java_home" >.venv/java-home
}

# ---- Prometheus, for tests of metrics, rules and dashboard ----------------------------------------

# Debian's package would start a service on logmirror's metrics port. So it is unpacked next to the
# other downloads of the tests, which also needs no root.
need_prometheus() {
    tools=${LOGMIRROR_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/logmirror-tests}/prometheus
    [ -x "$tools/usr/bin/promtool" ] && return
    command -v promtool >/dev/null 2>&1 && command -v prometheus >/dev/null 2>&1 && return
    if [ "$manager" != apt-get ]; then
        provide "Prometheus (for tests)" "" \
            "golang-github-prometheus prometheus2 prometheus" prometheus
        return
    fi
    mkdir -p "$tools"
    step "downloading Prometheus" fetch_or_update || {
        tail -n 12 "$setup_log" >&2
        stop "Prometheus could not be downloaded; install prometheus and promtool and run this again"
    }
}

fetch_or_update() {
    fetch_prometheus || { as_root apt-get update -q >>"$setup_log" 2>&1 && fetch_prometheus; }
}

fetch_prometheus() {
    (
        cd "$tools" && rm -f ./*.deb && apt-get download -q prometheus &&
            dpkg-deb -x ./prometheus_*.deb . && rm -f ./*.deb
    ) >>"$setup_log" 2>&1 </dev/null
}

# ---- Programs in Go, for tests -------------------------------------------------------------------

# The locked Go builds what the machine's own, if there is one, is too old for. If that fails, the
# test that needs the program reports the reason.
finish_go_builds() {
    [ -z "${builds:-}" ] || wait "$builds" || true
    PATH="$PWD/.venv/bin:$PATH" PYTHONPATH=tests .venv/bin/python -B -m kit.servers.go \
        >>"$setup_log" 2>&1 </dev/null
}

# ---- Main ----------------------------------------------------------------------------------------

# Build the Go programs of the tests in the background: the first build takes minutes of one core.
if [ "${1:-}" = tests ] && command -v go >/dev/null 2>&1 && python=$(find_python); then
    PYTHONPATH=tests "$python" -B -m kit.servers.go >/dev/null 2>&1 </dev/null &
    builds=$!
fi
make_environment
need_java
if [ "${1:-}" = tests ]; then
    command -v mvn >/dev/null 2>&1 ||
        provide "Maven (for tests)" maven maven maven
    command -v kcat >/dev/null 2>&1 ||
        provide "kcat (for tests)" "kcat kafkacat" kcat kcat
    command -v npm >/dev/null 2>&1 ||
        provide "Node.js and npm (for tests)" npm npm node
    command -v javac >/dev/null 2>&1 ||
        provide "a Java compiler (for tests)" \
            "openjdk-21-jdk-headless openjdk-17-jdk-headless openjdk-25-jdk-headless" \
            "java-21-openjdk-devel java-17-openjdk-devel java-latest-openjdk-devel" \
            "openjdk@21 openjdk"
    for shell in zsh fish; do
        command -v $shell >/dev/null 2>&1 ||
            provide "$shell (for tests)" $shell $shell $shell
    done
    [ "$(uname)" != Linux ] || command -v systemd-analyze >/dev/null 2>&1 ||
        provide "systemd-analyze (for tests)" systemd systemd ""
    need_prometheus
    step "building the programs of the tests with Go" finish_go_builds || true
fi
