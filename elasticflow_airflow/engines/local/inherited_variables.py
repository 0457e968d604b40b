"""Selects the environment variables that a worker inherits from the service: few, by name. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = frozenset(
    {
        "AWS_CA_BUNDLE",
        "AWS_CONFIG_FILE",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_ROLE_ARN",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_CLOUD_PROJECT",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NO_PROXY",
        "PATH",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TORCH_HOME",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
        "no_proxy",
    }
)
_PREFIXES = ("CUBLAS_", "CUDA_", "CUDNN_", "HF_", "LC_", "NCCL_", "NVIDIA_", "PYTORCH_", "TORCH_NCCL_", "TRANSFORMERS_")
_NEVER = frozenset({"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_TOKEN_PATH"})
"""The engine sets the devices; a token is a secret and is passed in ``secret_env``, and so are the keys of a store."""


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed part of the service's environment."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _NEVER and (name in _NAMES or name.startswith(_PREFIXES))
    }


def worker_environment(environ: Mapping[str, str], job_env: Mapping[str, str], bridge: str) -> dict[str, str]:
    """Return the environment of all workers of a job, without secrets: inherited, then the job's, then ours."""
    job_path = job_env.get("PYTHONPATH")
    return {
        **inherited(environ),
        "PYTHONUNBUFFERED": "1",
        **job_env,
        "PYTHONPATH": f"{bridge}:{job_path}" if job_path else bridge,
    }
