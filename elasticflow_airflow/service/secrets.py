"""Encrypts ``secret_env``, and keeps secrets out of everything that is shown.

Its keys are configured, or its only key is a 0600 file in the state directory. Nothing here is ever logged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow_airflow.api.insight import REDACTED
from elasticflow_airflow.bounds import METRICS_DEPTH
from elasticflow_airflow.service.settings import is_fernet_key
from elasticflow_airflow.service.store.documents.columns import Unreadable
from elasticflow_airflow.service.store.documents.submission import StoredSubmission

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

_SENSITIVE = re.compile(r"apikey|authorization|credentials?|key|pass(?:phrase|wd|word)|pwd|secrets?|token", re.I)
"""Matches the last word of option names with secret values; ``--password-file`` and ``--max-tokens`` have none."""
_OPTION = re.compile(r"(?P<dashes>[-+]{0,2})(?P<name>[A-Za-z][\w.-]*)(?P<value>=.*)?", re.DOTALL)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")

_SHORTEST = 4


class SecretError(Exception):
    """Secrets cannot be stored, or stored secrets cannot be read."""


class SecretBox:
    """Fernet encryption with keys of its own; the library is loaded when the first secret is handled.

    The first of ``keys`` encrypts, and all of them decrypt. Without any, the key is that in ``key_file``, which is made
    when it is first needed. A key file that exists decrypts in any case: what was stored before keys were configured
    stays readable.
    """

    def __init__(self, key_file: Path, keys: Sequence[str] = ()) -> None:
        """``keys`` are Fernet keys, as the settings have checked them."""
        self._key_file, self._configured = key_file, tuple(key.encode() for key in keys)

    @property
    def key_id(self) -> str:
        """Identify the key that encrypts, without telling it. Raises SecretError when the key file holds no key."""
        return self.key_ids[0]

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Identify all keys, that which encrypts first. Raises SecretError when the key file holds no key."""
        return tuple(map(_id_of, self._keys(create=True)))

    def seal(self, secrets: Mapping[str, str]) -> bytes | None:
        """Encrypt secrets; returns None if there are none. Raises SecretError when the key file holds no key."""
        if not secrets:
            return None
        return self._fernet(create=True).encrypt(json.dumps(dict(secrets)).encode())

    def open(self, sealed: bytes | None) -> dict[str, str]:
        """Decrypt secrets. Raises SecretError when none of the keys is the one that they were sealed with."""
        if sealed is None:
            return {}
        from cryptography.fernet import InvalidToken

        try:
            opened = json.loads(self._fernet(create=False).decrypt(sealed))
        except (InvalidToken, FileNotFoundError) as error:
            why = f"{self._key_file} is not the key they were encrypted with"
            if self._configured:
                why = "they were encrypted with a key that ELASTICFLOW_SECRET_KEY, or its file, does not name any more"
            raise SecretError(f"the stored secrets cannot be decrypted: {why}; submit the job again") from error
        return {str(name): str(value) for name, value in opened.items()}

    def _fernet(self, *, create: bool) -> MultiFernet:
        from cryptography.fernet import Fernet, MultiFernet

        return MultiFernet([Fernet(key) for key in self._keys(create=create)])

    def _keys(self, *, create: bool) -> list[bytes]:
        """Return all keys. Raises SecretError, and FileNotFoundError when there is none and none is to be made."""
        try:
            key = self._key_file.read_bytes()
        except FileNotFoundError:
            if self._configured:
                return [*self._configured]
            if not create:
                raise
            key = self._make_key()
        if not is_fernet_key(key):
            raise SecretError(
                f"{self._key_file} holds no key: put the file back from a backup, or remove it, and submit the jobs"
                " with secrets again"
            )
        return [*self._configured, key]

    def _make_key(self) -> bytes:
        """Create the key, and return the key in effect: another thread or process may create one at the same time."""
        from cryptography.fernet import Fernet

        # A unique name, then a link, which fails if the key exists: the key file is complete or absent.
        descriptor, temporary = tempfile.mkstemp(dir=self._key_file.parent, prefix=f".{self._key_file.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(Fernet.generate_key())
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # Another one was faster: its key is used.
                os.link(temporary, self._key_file)
        finally:
            os.unlink(temporary)
        return self._key_file.read_bytes()


def _id_of(key: bytes) -> str:
    """Return what two services compare to see whether they have the same key; the key cannot be found from it."""
    return hmac.digest(base64.urlsafe_b64decode(key), b"elasticflow key id", hashlib.sha256).hex()[:16]


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Replace every secret value in a text (a failing script may have printed one)."""
    for value in worth_hiding(secrets.values()):
        text = text.replace(value, REDACTED)
    return text


def worth_hiding(values: Iterable[str]) -> list[str]:
    """Return the values that are long enough to hide, longest first; shorter ones would break ordinary words."""
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


def redact_all(value: Any, secrets: Mapping[str, str], depth: int = METRICS_DEPTH + 2) -> Any:
    """Replace every secret in the texts and object keys of a JSON value, down to ``depth`` levels."""
    if isinstance(value, str):
        return redact(value, secrets)
    if depth and isinstance(value, Mapping):
        return {redact(str(name), secrets): redact_all(one, secrets, depth - 1) for name, one in value.items()}
    if depth and isinstance(value, list | tuple):
        return [redact_all(one, secrets, depth - 1) for one in value]
    return value


def hidden_values(box: SecretBox, submission: StoredSubmission, sealed: bytes | None) -> dict[str, str]:
    """Return the secrets that must not appear in texts of a job, by name.

    If the key is missing, only those in arguments: the workers were then given no secret environment. Raises what
    reading an unreadable stored submission raises.
    """
    in_args = secrets_in_args(*_args_of(submission))
    try:
        return {**in_args, **box.open(sealed)}
    except SecretError:
        return in_args


def _args_of(submission: StoredSubmission) -> tuple[Sequence[str], Sequence[str] | None]:
    """Return the arguments and how they are shown, even if another part of the submission cannot be read."""
    if isinstance(submission, Unreadable):
        raw = submission.stored["command"]
        return raw["args"], raw.get("args_shown")
    return submission.command.args, submission.command.args_shown


def shown_args(args: Sequence[str], as_told: Sequence[str] | None) -> list[str]:
    """Return a script's arguments for display. ``as_told``: as the submitter shows them, who may know more secrets.

    In addition, the values of options with secret-like names, and passwords in URLs, are left out.
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
    """Return the values that the submitter hides, by generated names: a failing script may print its arguments."""
    found: dict[str, str] = {}
    for arg, shown in zip(args, as_told or args, strict=True):
        if arg == shown:
            continue
        for value in _hidden(arg, shown) or (arg,):
            found[f"argument {len(found)}"] = value
    return found


def _hidden(text: str, shown: str) -> list[str]:
    """Return the parts of a text shown as ``***``; empty if ``shown`` does not match. Linear in the lengths."""
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
