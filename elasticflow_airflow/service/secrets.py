"""Encrypts what ``secret_env`` holds. The key is a 0600 file in the state directory; nothing here is ever logged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

REDACTED = "***"


class SecretError(Exception):
    """Stored secrets cannot be read."""


class SecretBox:
    """Fernet with a key of its own; the library is loaded when the first secret comes."""

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file

    def seal(self, secrets: Mapping[str, str]) -> bytes | None:
        """Encrypt; None for no secrets at all."""
        if not secrets:
            return None
        from cryptography.fernet import Fernet

        return Fernet(self._key(create=True)).encrypt(json.dumps(dict(secrets)).encode())

    def open(self, sealed: bytes | None) -> dict[str, str]:
        """Decrypt. Raises SecretError when the key is not the one that it was sealed with."""
        if sealed is None:
            return {}
        from cryptography.fernet import Fernet, InvalidToken

        try:
            opened = json.loads(Fernet(self._key(create=False)).decrypt(sealed))
        except (InvalidToken, FileNotFoundError) as error:
            raise SecretError(
                f"the stored secrets cannot be decrypted: {self._key_file} is not the key they were encrypted with;"
                " submit the job again"
            ) from error
        return {str(name): str(value) for name, value in opened.items()}

    def _key(self, *, create: bool) -> bytes:
        try:
            return self._key_file.read_bytes()
        except FileNotFoundError:
            if not create:
                raise
        from cryptography.fernet import Fernet

        temporary = self._key_file.with_name(f".{self._key_file.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, Fernet.generate_key())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(temporary, self._key_file)  # Fails if another was faster: then that one counts.
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        return self._key_file.read_bytes()


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Replace every secret value in a text (a failing script may have printed one)."""
    for value in sorted(secrets.values(), key=len, reverse=True):
        if len(value) >= 4:  # Shorter ones would tear ordinary words apart.
            text = text.replace(value, REDACTED)
    return text
