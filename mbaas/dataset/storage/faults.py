"""Classifies storage errors as transient or final, and configures retries of S3 clients.

Separate from `mbaas.dataset.storage.retry`, because prep workers and cache nodes need this module, but not tenacity.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa
import pyarrow.fs

from mbaas.errors import DatasetError, MbaasError, StorageError

# Python exception classes and errno values that make a retry useless. A missing file may come back (`FileReader`
# checks whether its folder exists), but that is handled elsewhere.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_FINAL_ERRNO = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP)
_STATUS = re.compile(r"HTTP status (\d{3})")
_CODE = re.compile(r"AWS Error ([A-Z0-9_]+)")
_PASSING_STATUS = (408, 425, 429)  # request timeout, too early, too many requests
# AWS SDK names of permanent errors. All others count as transient: throttling with an unknown name must not spoil
# samples, and a wrong guess here only costs time.
_FINAL_CODES = frozenset(
    [
        "ACCESS_DENIED", "AUTH_FAILURE", "CLIENT_SIGNING_FAILURE", "EXPIRED_TOKEN", "INCOMPLETE_SIGNATURE",
        "INVALID_ACCESS_KEY_ID", "INVALID_ACTION", "INVALID_CLIENT_TOKEN_ID", "INVALID_OBJECT_STATE",
        "INVALID_PARAMETER_COMBINATION", "INVALID_PARAMETER_VALUE", "INVALID_QUERY_PARAMETER",
        "INVALID_SIGNATURE", "MALFORMED_QUERY_STRING", "MISSING_ACTION", "MISSING_AUTHENTICATION_TOKEN",
        "MISSING_PARAMETER", "NO_SUCH_BUCKET", "NO_SUCH_KEY", "NOT_INITIALIZED", "OPT_IN_REQUIRED",
        "RESOURCE_NOT_FOUND", "SIGNATURE_DOES_NOT_MATCH", "UNRECOGNIZED_CLIENT", "USER_AGENT_REQUIRED",
        "VALIDATION",
    ]
)  # fmt: skip


def may_pass(error: BaseException) -> bool:
    """Return whether a retry of the same read may succeed a little later.

    An HTTP status in the message decides: 5xx, 408, 425 and 429 are transient. Otherwise the AWS SDK's error name
    decides. Any other `OSError`, such as a reset or a timeout, is transient, unless the file is missing, forbidden or
    not a file. A reader with better information raises `StorageError`.
    """
    if isinstance(error, StorageError):
        return not error.is_missing
    # Anything other than an OSError means a bug or bad bytes, and is final.
    if not isinstance(error, OSError) or isinstance(error, _FINAL) or error.errno in _FINAL_ERRNO:
        return False
    if status := _STATUS.search(str(error)):
        return int(status[1]) >= 500 or int(status[1]) in _PASSING_STATUS
    code = _CODE.search(str(error))
    return code is None or code[1] not in _FINAL_CODES


def message_of(error: BaseException) -> str:
    """Return the message of any exception of a file system, in one line."""
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, pa.ArrowException)) or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if text.isprintable() else ascii(text)


@contextmanager
def dataset_errors(doing: str) -> Iterator[None]:
    """Convert an exception of a file system, which may have any class, to a DatasetError that begins with ``doing``."""
    try:
        yield
    except MbaasError:
        raise
    except Exception as error:
        raise DatasetError(f"{doing}: {message_of(error)}") from error


def s3_attempts(filesystem: pyarrow.fs.FileSystem, attempts: int) -> pyarrow.fs.FileSystem:
    """Limit the attempts of an S3 file system's AWS SDK; return other file systems unchanged.

    Retries of mbaas and of the SDK would multiply, to minutes per sample, so each caller chooses one level. Reads retry
    themselves and allow the SDK one attempt. A listing, one call with many requests, relies on the SDK.
    """
    # Some builds of pyarrow lack S3; no file system is an instance of ().
    if not isinstance(filesystem, getattr(pyarrow.fs, "S3FileSystem", ())):
        return filesystem
    # The pickled state is the only access to the options of a file system.
    options = cast("dict[str, Any]", filesystem.__reduce__()[1][0])
    strategy = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=attempts)
    return pyarrow.fs.S3FileSystem(**options, retry_strategy=strategy)
