"""Encrypts what ``secret_env`` holds, and keeps secrets out of what is shown.

The key is a 0600 file in the state directory; nothing here is ever logged.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow_airflow.api import Command
from elasticflow_airflow.api.insight import REDACTED
from elasticflow_airflow.bounds import METRICS_DEPTH

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

_SENSITIVE = re.compile(r"apikey|authorization|credentials?|key|pass(?:phrase|wd|word)|pwd|secrets?|token", re.I)
"""Last words of the names of options whose values are secrets; ``--password-file`` and ``--max-tokens`` have none."""
_OPTION = re.compile(r"(?P<dashes>[-+]{0,2})(?P<name>[A-Za-z][\w.-]*)(?P<value>=.*)?", re.DOTALL)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")

_SHORTEST = 4


class SecretError(Exception):
    """Secrets cannot be stored, or stored ones not be read."""


class SecretBox:
    """Fernet with a key of its own; the library is loaded when the first secret comes."""

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file

    def seal(self, secrets: Mapping[str, str]) -> bytes | None:
        """Encrypt; None for no secrets at all. Raises SecretError when the key file holds no key."""
        if not secrets:
            return None
        return self._fernet(create=True).encrypt(json.dumps(dict(secrets)).encode())

    def open(self, sealed: bytes | None) -> dict[str, str]:
        """Decrypt. Raises SecretError when the key is not the one that it was sealed with."""
        if sealed is None:
            return {}
        from cryptography.fernet import InvalidToken

        try:
            opened = json.loads(self._fernet(create=False).decrypt(sealed))
        except (InvalidToken, FileNotFoundError) as error:
            raise SecretError(
                f"the stored secrets cannot be decrypted: {self._key_file} is not the key they were encrypted with;"
                " submit the job again"
            ) from error
        return {str(name): str(value) for name, value in opened.items()}

    def _fernet(self, *, create: bool) -> Fernet:
        from cryptography.fernet import Fernet

        try:
            key = self._key_file.read_bytes()
        except FileNotFoundError:
            if not create:
                raise
            key = self._make_key()
        try:
            return Fernet(key)
        except ValueError as error:
            raise SecretError(
                f"{self._key_file} holds no key: put the file back from a backup, or remove it, and submit the jobs"
                " with secrets again"
            ) from error

    def _make_key(self) -> bytes:
        """Make the key, and return the one that counts: others may be doing the same, in any thread or process."""
        from cryptography.fernet import Fernet

        # A name that nobody else has, and a link, which fails where there is a key: it is there whole or not at all.
        descriptor, temporary = tempfile.mkstemp(dir=self._key_file.parent, prefix=f".{self._key_file.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(Fernet.generate_key())
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # Another was faster: then that one counts.
                os.link(temporary, self._key_file)
        finally:
            os.unlink(temporary)
        return self._key_file.read_bytes()


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Replace every secret value in a text (a failing script may have printed one)."""
    for value in worth_hiding(secrets.values()):
        text = text.replace(value, REDACTED)
    return text


def worth_hiding(values: Iterable[str]) -> list[str]:
    """Those that are long enough, the longest first: shorter ones would tear ordinary words apart."""
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


def redact_all(value: Any, secrets: Mapping[str, str], depth: int = METRICS_DEPTH + 2) -> Any:
    """Replace every secret in the texts of a JSON value, names of objects included; deeper than ``depth`` nothing."""
    if isinstance(value, str):
        return redact(value, secrets)
    if depth and isinstance(value, Mapping):
        return {redact(str(name), secrets): redact_all(one, secrets, depth - 1) for name, one in value.items()}
    if depth and isinstance(value, list | tuple):
        return [redact_all(one, secrets, depth - 1) for one in value]
    return value


def hidden_values(box: SecretBox, command: Command, sealed: bytes | None) -> dict[str, str]:
    """What must not show up in texts of a job. Without the key no environment was given to the workers.

    Raises what reading a stored submission raises that nobody can read.
    """
    in_args = secrets_in_args(command.args, command.args_shown)
    try:
        return {**in_args, **box.open(sealed)}
    except SecretError:
        return in_args


def shown_args(args: Sequence[str], as_told: Sequence[str] | None) -> list[str]:
    """The arguments of a script for people. ``as_told``: as their submitter shows them, who may know more secrets.

    Beside those, the values of options that are called like secrets, and passwords in URLs, are left out.
    """
    shown: list[str] = []
    hides_next = False
    for arg in as_told or args:
        option = _OPTION.fullmatch(arg)
        sensitive = option is not None and _is_sensitive(option["name"])
        if hides_next and not arg.startswith("-"):
            shown.append(REDACTED)
        elif option is not None and sensitive and option["value"]:
            shown.append(f"{option['dashes']}{option['name']}={REDACTED}")
        else:
            shown.append(_PASSWORD_IN_URL.sub(rf"\1:{REDACTED}@", arg))
        hides_next = option is not None and sensitive and arg.startswith("-") and not option["value"]
    return shown


def secrets_in_args(args: Sequence[str], as_told: Sequence[str] | None) -> dict[str, str]:
    """The values that the submitter does not show, by a name of their own: a failing script may print its arguments."""
    found: dict[str, str] = {}
    for arg, shown in zip(args, as_told or args, strict=True):
        if arg == shown:
            continue
        for value in _hidden(arg, shown) or (arg,):
            found[f"argument {len(found)}"] = value
    return found


def _hidden(text: str, shown: str) -> list[str]:
    """What stands in a text where ``***`` is shown; nothing when it is another text. Linear in their lengths."""
    first, *rest = shown.split(REDACTED)
    if not rest or not text.startswith(first) or not text.endswith(rest[-1]):
        return []
    found, at, end = [], len(first), len(text) - len(rest[-1])
    for piece in rest[:-1]:
        next_at = text.find(piece, at + 1, end) if piece else at
        if next_at < 0:
            return []
        found.append(text[at:next_at])
        at = next_at + len(piece)
    return [part for part in (*found, text[at:end]) if part] if at <= end else []


def _is_sensitive(name: str) -> bool:
    words = _WORD.findall(name)
    return bool(words) and _SENSITIVE.fullmatch(words[-1]) is not None
