"""Which faults of storage may pass, and file systems that leave it to us to ask again.

Apart from `mbaas.dataset.retry`, because every prep worker and cache node needs this, and none of them its library.
"""

from __future__ import annotations

import errno
import re
from typing import Any, cast

import pyarrow as pa
import pyarrow.fs

from mbaas.errors import StorageError

# Errors of Python's own classes, and of the system's: asking again is of no use. That a file is missing may pass
# (`FileReader` looks whether its folder is there), but is none of the faults that are meant here.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_FINAL_ERRNO = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP)
_STATUS = re.compile(r"HTTP status (\d{3})")
_CODE = re.compile(r"AWS Error ([A-Z0-9_]+)")
_PASSING_STATUS = (408, 425, 429)  # request timeout, too early, too many requests
# The AWS SDK's names of answers that stay the same however often one asks. All others may pass: a store that throttles
# in words of its own must not spoil samples, and a wrong guess here costs no more than time.
_FINAL_CODES = frozenset(
    [
        "ACCESS_DENIED",
        "AUTH_FAILURE",
        "CLIENT_SIGNING_FAILURE",
        "EXPIRED_TOKEN",
        "INCOMPLETE_SIGNATURE",
        "INVALID_ACCESS_KEY_ID",
        "INVALID_ACTION",
        "INVALID_CLIENT_TOKEN_ID",
        "INVALID_OBJECT_STATE",
        "INVALID_PARAMETER_COMBINATION",
        "INVALID_PARAMETER_VALUE",
        "INVALID_QUERY_PARAMETER",
        "INVALID_SIGNATURE",
        "MALFORMED_QUERY_STRING",
        "MISSING_ACTION",
        "MISSING_AUTHENTICATION_TOKEN",
        "MISSING_PARAMETER",
        "NO_SUCH_BUCKET",
        "NO_SUCH_KEY",
        "NOT_INITIALIZED",
        "OPT_IN_REQUIRED",
        "RESOURCE_NOT_FOUND",
        "SIGNATURE_DOES_NOT_MATCH",
        "UNRECOGNIZED_CLIENT",
        "USER_AGENT_REQUIRED",
        "VALIDATION",
    ]
)


def may_pass(error: BaseException) -> bool:
    """Tell whether the same read may succeed a little later.

    If the error tells an HTTP status, that decides: 5xx, 408, 425 and 429 pass. Otherwise the name that the AWS SDK
    gives it decides. Any other `OSError` (a reset, a timeout, no route, an input error, a stale handle) may pass,
    except one that says that the file is missing, forbidden or no file. A reader that knows better raises
    `StorageError`. A single file that is missing may come back too, but is not worth waiting for.
    """
    if isinstance(error, StorageError):
        return not error.is_missing
    # Anything else than an OSError is a bug or a verdict on the bytes, and stays one.
    if not isinstance(error, OSError) or isinstance(error, _FINAL) or error.errno in _FINAL_ERRNO:
        return False
    if status := _STATUS.search(str(error)):
        return int(status[1]) >= 500 or int(status[1]) in _PASSING_STATUS
    code = _CODE.search(str(error))
    return code is None or code[1] not in _FINAL_CODES


def said(error: BaseException) -> str:
    """Write in one line what a file system raised, which may be of any class and say anything."""
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, pa.ArrowException)) or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if text.isprintable() else ascii(text)


def s3_attempts(filesystem: pyarrow.fs.FileSystem, attempts: int) -> pyarrow.fs.FileSystem:
    """Limit how often the AWS SDK of an S3 file system sends a request; return other file systems as they are.

    The SDK retries below us, and what it does unasked differs (pyarrow 26, measured): a file system made from a URI
    asks again every 200 ms for 6 s, one made by `S3FileSystem(...)`, or that went through a pickle, three times within
    3 s. Retries on two levels multiply, to minutes for one sample. So each caller chooses one level. Reads retry
    themselves and allow the SDK one attempt, because only then are all attempts and pauses counted against one limit. A
    listing, which is one call but many requests, leaves it to the SDK.
    """
    # Not every build of pyarrow has S3; no file system is an instance of ().
    if not isinstance(filesystem, getattr(pyarrow.fs, "S3FileSystem", ())):
        return filesystem
    # What a pickle would hold is the only way to learn a file system's options.
    options = cast("dict[str, Any]", filesystem.__reduce__()[1][0])
    strategy = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=attempts)
    return pyarrow.fs.S3FileSystem(**options, retry_strategy=strategy)
