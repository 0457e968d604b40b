#!/usr/bin/env bash
# Resolve the locked requirements anew. lock.txt is everything for development, tests and the demo; service.txt is
# what the service and training machines need, where there is no Airflow; airflow.txt an Airflow without torch. No index
# lines, no machine's paths: a lock file must work for everybody. torch is pinned without its local label, so that each
# index gives its own build. Pins that still fit are kept; UPGRADE=1 resolves all to the newest.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/lock.txt)
compile() {
    "$uv" pip compile --quiet --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
        ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$@"
}
sed '/^torch==/d' requirements/lock.txt >requirements/lock.new # what the output file names already, uv prefers
compile ${UPGRADE:+--upgrade} --extra dev --constraint <(echo "torch==${TORCH:-${torch:-2.13.0}}") pyproject.toml \
    --output-file requirements/lock.new >/dev/null
sed 's/^\(torch==[0-9.]*\)+.*/\1/' requirements/lock.new >requirements/lock.txt
rm requirements/lock.new
"${PYTHON:-.venv/bin/python}" - <<'PYTHON' >requirements/service.in
import tomllib
for requirement in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    if not requirement.startswith(("apache-airflow", "pendulum", "plotly")):
        print(requirement)
PYTHON
compile --constraint requirements/lock.txt requirements/service.in >requirements/service.txt
rm requirements/service.in
# Airflow with the provider on PostgreSQL, as in docker/.
echo "apache-airflow-providers-postgres" | compile --constraint requirements/lock.txt pyproject.toml - >requirements/airflow.txt
