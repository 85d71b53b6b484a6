#!/bin/sh
# Install logmirror from this clone, with exactly the packages that it is tested with, into a virtual
# environment. Build tools, and those of Spark's jars that no mirror loads, are not kept there. It may
# be owned by root and read-only afterwards.
#
#     deploy/install.sh /opt/logmirror
#     /opt/logmirror/bin/logmirror --version
#
# Needs Python 3.11 or later with its venv module; the tests run on 3.11. PYTHON selects another one
# than `python3`.
set -eu
target=${1:?usage: deploy/install.sh DIRECTORY}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The build tools come from the lock for developers, and are deleted with the work directory.
awk '/^[a-z]/ {
    wanted = /^(hatchling|packaging|pathspec|pluggy|setuptools|tomlkit|trove-classifiers|wheel)==/
} wanted' "$here/requirements.lock" >"$work/builders.lock"
"$python" -m venv "$work/tools"
pip() { "$work/tools/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --no-compile --require-hashes -r "$work/builders.lock"
pip wheel --require-hashes --no-deps --no-build-isolation --wheel-dir "$work/wheels" \
    -r "$here/deploy/requirements.lock"
pip wheel --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$here"

"$python" -m venv --without-pip "$target"
pip --python "$target/bin/python" install --no-index --no-deps "$work"/wheels/*.whl

# What a mirror never loads from Spark: Hive, Derby, MLlib, GraphX, Spark Connect and RocksDB.
for jars in "$target"/lib/python3*/site-packages/pyspark/jars; do
    for name in algebra breeze cats-kernel datanucleus derby hive- rocksdbjni spark-connect_ \
        spark-graphx spark-hive spark-mllib spire; do
        rm -f "$jars/$name"*.jar
    done
done
