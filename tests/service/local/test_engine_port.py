"""The engine port is the only door to what runs: every test with a ``world`` fails when the service goes past it."""

from __future__ import annotations

from elasticflow_airflow.runtime.protocol import read_json


def test_who_opens_a_file_of_a_job_past_the_port_is_seen(world, opened_files):
    job = world.submit(within=600, steps=20, scaling_curve={1: 10.0})
    assert world.ended(job).state == "succeeded"
    file = world.incarnation_dir(job) / "own.json"
    file.write_text("{}")  # A test may.
    assert opened_files.wrong == []
    past_the_port = {"__name__": "elasticflow_airflow.service.somewhere", "read_json": read_json}
    exec("def look(path): return read_json(path)", past_the_port)
    assert past_the_port["look"](file) == {}
    assert opened_files.wrong == [f"elasticflow_airflow.service.somewhere: open {file}"]
    opened_files.wrong.clear()
