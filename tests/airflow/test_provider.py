"""What Airflow learns of the provider is valid by Airflow's own schema, names things that exist, and is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jsonschema

from elasticflow_airflow import get_provider_info


def test_provider_info_is_valid_and_names_what_exists():
    import airflow

    info = get_provider_info()
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                import_module(module)
    for path in [*(one["class-name"] for one in info["task-decorators"]), *info["notifications"], *info["extra-links"]]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name)), path
    for connection in info["connection-types"]:
        module, _, name = connection["hook-class-name"].rpartition(".")
        hook = getattr(import_module(module), name)
        assert hook.conn_type == connection["connection-type"]


def test_every_setting_is_declared_with_the_default_that_is_used():
    from elasticflow_airflow.settings import AirflowSettings, deferrable_by_default

    options = get_provider_info()["config"]["elasticflow"]["options"]
    settings = AirflowSettings.read()
    for name in AirflowSettings.__dataclass_fields__:
        if name == "snapshot_max_bytes":
            assert settings.snapshot_max_bytes == float(options["snapshot_max_mib"]["default"]) * 2**20
        elif name == "namespace":
            assert settings.namespace == options[name]["default"]
        else:
            assert getattr(settings, name) == float(options[name]["default"])
    assert str(deferrable_by_default()) == options["deferrable"]["default"]


def test_imports_stay_light():
    program = """
import sys
import elasticflow_airflow
assert not [m for m in ("airflow", "torch", "sqlalchemy", "httpx") if m in sys.modules], "package"
import elasticflow_airflow.client
assert not [m for m in ("airflow", "torch", "sqlalchemy", "fastapi") if m in sys.modules], "client"
import airflow.plugins_manager
before = set(sys.modules)
import elasticflow_airflow.plugin
new = {m.split(".")[0] for m in set(sys.modules) - before}
assert not new & {"torch", "fastapi", "sqlalchemy", "httpx", "pendulum"}, new
import elasticflow_airflow.operators.elastic_train
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_plugin_registers_the_listener():
    from elasticflow_airflow.plugin import ElasticFlowPlugin
    from elasticflow_airflow.task import acknowledging

    assert ElasticFlowPlugin().listeners == [acknowledging]
    assert hasattr(acknowledging.on_task_instance_success, "airflow_impl")
