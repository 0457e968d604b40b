"""What the page about the HTTP API shows works as it stands, with curl and without our client."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/api.md").read_text()
TOKEN = "a token of this test, long enough"


@pytest.fixture(scope="module")
def endpoint(shared_daemons):
    return shared_daemons.served(TOKEN)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine: apt-get install curl")
def test_a_job_is_submitted_with_curl(endpoint, open_client, tmp_path):
    found = re.search(r"^## Submit a job\n.*?^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    script = found[1].replace("http://gpu-machine:8321", endpoint.base_url)
    (tmp_path / "train.py").write_text("print('it trains')\n")
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "ELASTICFLOW_TOKEN": TOKEN, "no_proxy": "*"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer = json.loads(done.stdout)
    assert answer["claim"] == 1, answer
    job = answer["job"]
    assert job["identity"]["dag_id"] == "nightly"
    assert open_client(endpoint).status(job["job_id"]).deadline_at == job["deadline_at"]
    renewed = httpx.post(
        f"{endpoint.base_url}/v1/jobs/{job['job_id']}/lease",
        json={"claim": 1},
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
    )
    assert renewed.status_code == 200, renewed.text


@pytest.mark.parametrize(("content", "status"), [("{", 422), ('{"claim": "x"}', 422), ('{"unknown": 1}', 422)])
def test_malformed_and_invalid_bodies_have_the_status_of_the_page(endpoint, content, status):
    answer = httpx.post(
        f"{endpoint.base_url}/v1/jobs/nobody-0123456789abcdef/lease",
        content=content,
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        trust_env=False,
    )
    assert answer.status_code == status, answer.text
    assert f"| {status} | malformed JSON" in PAGE
