#!/bin/bash
# Tell Airflow where the service is, with the token from its secret file, and become the command.
set -euo pipefail
token=$(</run/secrets/elasticflow_token)
export AIRFLOW_CONN_ELASTICFLOW_DEFAULT
AIRFLOW_CONN_ELASTICFLOW_DEFAULT=$(printf '{"conn_type": "elasticflow", "host": "elasticflow", "port": 8321, "password": "%s"}' "$token")
exec "$@"
