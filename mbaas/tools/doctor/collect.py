"""Collects the facts for `mbaas doctor`, on this machine and, by one small task each, on the nodes of a cluster."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import psutil
import ray
from pyarrow.fs import FileInfo, FileSelector, FileType
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas.base.units import seconds
from mbaas.dataset import Dataset
from mbaas.dataset.base import read_encoded
from mbaas.dataset.storage.faults import dataset_errors
from mbaas.dataset.storage.location import Location, join, locate, locate_shards
from mbaas.errors import MbaasError, last_line
from mbaas.ray_cluster import resources
from mbaas.tools.doctor.facts import Facts, FeedFacts, NodeFacts, StorageFacts

NODE_TIMEOUT_S = 20.0
"""Time for all nodes together; a busy node takes seconds to start a process."""

FEED_TIMEOUT_S = 2.0
"""Time for the status of a feed."""

LIST_TIMEOUT_S, READ_S = 30.0, 2.0
"""Time limits for listing the data, and for the reads of all threads together."""

READS, READ_BYTES, READERS = 64, 64 << 20, 8
"""Limits of the reads: number, bytes and threads."""

FOLDERS, ENTRIES = 64, 10_000
"""Folders that are listed to find files below a path, and entries of each local one."""

PACKAGES = ("ray", "mbaas", "torch", "nvidia-dali-cuda120")

_T = TypeVar("_T")
_Limits = tuple[float | None, int | None]


def facts_here() -> Facts:
    """Return the facts of this machine, without a cluster."""
    name = socket.gethostname()
    # A GPU's driver or a dead file server may not answer.
    found = within(NODE_TIMEOUT_S, partial(node_facts, name))
    if found is None:
        node = NodeFacts(node=name, error=_late())
    else:
        node = replace(found, ray_cpus=resources.default_cpus(), store_bytes=resources.default_store_bytes())
    return _of_program(Facts(nodes=(node,)))


def within(limit_s: float, call: Callable[[], _T]) -> _T | None:
    """Return the result of a call, which is not None, or raise its error; None if it does not end in time.

    A call that does not end is left to its daemon thread.
    """
    found: list[_T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="mbaas-doctor", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    return found[0] if found else None


def _late() -> str:
    return f"it did not answer within {seconds(NODE_TIMEOUT_S)}"


def facts_of_cluster() -> Facts:
    """Return the facts of the cluster that this program has joined."""
    context = ray.get_runtime_context()
    return _of_program(Facts(nodes=_nodes(), address=context.gcs_address, feeds=tuple(_feeds())))


def _of_program(facts: Facts) -> Facts:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    open_token = ""
    with suppress(OSError):
        open_token = str(path) if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) else ""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    return replace(facts, auth_mode=mode, has_token=resources.has_token(), open_token=open_token)


# ---- a machine ----


def node_facts(name: str) -> NodeFacts:
    """Return the facts of this machine, except the counts and sizes that Ray reports."""
    shm = _usage("/dev/shm")
    quota, limit = cgroup_limits()
    memory = psutil.virtual_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = resources.temp_folder()
    temp = _usage(_existing(folder))
    gpus, version, cuda_error = _cuda()
    return NodeFacts(
        node=name,
        shm_bytes=None if shm is None else shm[0],
        shm_free_bytes=0 if shm is None else shm[1],
        memfd_error=_memfd_error(),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        memory_limit_bytes=limit,
        cpus=os.cpu_count() or 1,
        affinity_cpus=len(os.sched_getaffinity(0)),
        quota_cpus=quota,
        open_files=_limit(soft),
        most_open_files=_limit(hard),
        versions=tuple(_versions()),
        temp_folder=folder,
        temp_error=_write_error(_existing(folder)),
        temp_free_bytes=0 if temp is None else temp[1],
        gpu_files=len([*Path("/dev").glob("nvidia[0-9]*")]),
        gpus=gpus,
        cuda_error=cuda_error,
        cuda_version=version,
        dali_error=_dali_error(),
    )


def _usage(folder: str) -> tuple[int, int] | None:
    """Return the size and the free bytes of a file system; None if the folder does not exist."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return None
    return found.total, found.free


def _limit(value: int) -> int:
    return 2**63 - 1 if value == resource.RLIM_INFINITY else value


def _memfd_error() -> str:
    try:
        os.close(os.memfd_create("mbaas-doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        return f"memfd_create fails: {error}"
    return ""


def cgroup_limits(top: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> _Limits:
    """Return the CPU quota and the memory limit in bytes of this process's cgroups, each None without a limit.

    Limits of all parent groups apply; a container sees its own group as the top.
    """
    quotas: list[float] = []
    limits: list[int] = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for kind in controllers.split(",") if controllers else ("",):
                for folder in _groups(top / kind, path):
                    with suppress(OSError, ValueError, IndexError):
                        quotas += _quota(folder)
                    with suppress(OSError, ValueError, IndexError):
                        limits += _memory_limit(folder)
    return min(quotas, default=None), min(limits, default=None)


def _groups(top: Path, path: str) -> Iterator[Path]:
    folder = top / path.strip("/")
    while folder != top and top in folder.parents:
        yield folder
        folder = folder.parent
    yield top


def _quota(folder: Path) -> list[float]:
    if (file := folder / "cpu.max").is_file():  # version 2
        most, per = file.read_text().split()
        return [] if most == "max" else [int(most) / int(per)]
    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return [quota / period] if quota > 0 else []


def _memory_limit(folder: Path) -> list[int]:
    file = folder / "memory.max"
    text = (file if file.is_file() else folder / "memory.limit_in_bytes").read_text().strip()
    # Version 1 writes the largest multiple of a page for "no limit".
    return [] if text == "max" or int(text) >= 2**60 else [int(text)]


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _existing(folder: str) -> str:
    path = Path(folder)
    return str(next((each for each in (path, *path.parents) if each.is_dir()), path))


def _write_error(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"mbaas")
            file.flush()
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return ""


def _dali_error() -> str:
    try:
        import nvidia.dali  # noqa: F401
    except Exception as error:  # also a shared library that is missing
        return f"{type(error).__name__}: {error}"
    return ""


def _cuda() -> tuple[tuple[str, ...], tuple[int, int] | None, str]:
    """Return the names of the GPUs, the CUDA version of the driver, and why it fails; all empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (), None, ""
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if code := driver.cuInit(0):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        return (), None, f"cuInit: {text.value.decode() if text.value else f'error {code}'}"
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for number in range(count.value):
        driver.cuDeviceGetName(name, len(name), number)
        names.append(name.value.decode())
    return tuple(names), (version.value // 1000, version.value % 1000 // 10), ""


# ---- a cluster ----


def timed_facts(name: str) -> tuple[NodeFacts, float]:
    """Return the facts of a node, and its clock at the end; the task that runs on each node."""
    return node_facts(name), time.time()


def _nodes() -> tuple[NodeFacts, ...]:
    task = ray.remote(num_cpus=0, max_retries=0)(timed_facts)
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = _names([node["NodeManagerHostname"] for node in alive], [node["NodeID"] for node in alive])
    running = {}
    for node, name in zip(alive, names, strict=True):
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        running[task.options(scheduling_strategy=where).remote(name)] = node, name
    found, left, end = {}, [*running], time.monotonic() + NODE_TIMEOUT_S
    while left:
        done, left = ray.wait(left, timeout=max(0.0, end - time.monotonic()))
        if not done:
            break
        now = time.time()
        for ref in done:
            node, name = running[ref]
            found[name] = _with_ray(_answer(ref, name, now), node["Resources"])
    return tuple(found.get(name) or NodeFacts(node=name, error=_late()) for name in names)


def _names(hosts: Sequence[str], ids: Sequence[str]) -> list[str]:
    """Return the names of hosts, with the start of the node's id where several nodes run on one host."""
    return [host if hosts.count(host) == 1 else f"{host}/{node[:6]}" for host, node in zip(hosts, ids, strict=True)]


def _answer(ref: Any, name: str, now: float) -> NodeFacts:
    try:
        facts, clock = ray.get(ref)
    except Exception as error:  # any: Ray's, or one that unpickling raised on the node
        return NodeFacts(node=name, error=last_line(error))
    # Includes the few milliseconds that the answer took.
    return replace(facts, clock_ahead_s=clock - now)


def _with_ray(node: NodeFacts, known: dict[str, float]) -> NodeFacts:
    return replace(node, ray_cpus=known.get("CPU", 0.0), store_bytes=int(known.get("object_store_memory", 0)))


def _feeds() -> Iterator[FeedFacts]:
    import mbaas
    from mbaas.coordinator.registry import check_version, server_of

    for feed in mbaas.feeds():
        whose = ""
        logging.disable(logging.ERROR)  # Ray logs an answer that it cannot unpickle, with a stack trace
        try:
            server = server_of(feed.name)
            whose = "" if server is None else str(server)
            check_version(feed.name)
            status = feed.status(timeout_s=FEED_TIMEOUT_S)
        except MbaasError as error:
            yield FeedFacts(name=feed.name, server=whose, error=str(error))
        except Exception as error:  # another version of mbaas may answer in another form
            yield FeedFacts(name=feed.name, server=whose, error=f"its status cannot be read: {last_line(error)}")
        else:
            yield FeedFacts(name=feed.name, server=whose, consumers=len(status.consumers))
        finally:
            logging.disable(logging.NOTSET)


# ---- the data ----

_Read = tuple[str, Callable[[], int]]
"""Name of a file or sample, and a function that reads it and returns the number of bytes."""


def storage_of_feed(where: str, read: Callable[[], Dataset]) -> StorageFacts:
    """List the data of a feed file, and read some samples that are spread over them."""
    began = time.monotonic()
    try:
        dataset = within(LIST_TIMEOUT_S, read)
    except MbaasError as error:
        return StorageFacts(where=where, list_s=time.monotonic() - began, error=str(error))
    list_s = time.monotonic() - began
    if dataset is None:
        return StorageFacts(where=where, list_s=list_s, was_listed=False)
    dataset = dataset.stored
    reader, ids = dataset.reader(), np.unique(np.linspace(0, len(dataset) - 1, READS).astype(np.int64))

    def read_one(sample_id: int) -> int:
        return len(read_encoded(dataset, reader, sample_id))

    from mbaas.tools.analysis.measuring.storage import local_spans

    facts = StorageFacts(where=where, list_s=list_s, samples=len(dataset), total_bytes=dataset.total_bytes)
    reads = [(dataset.uri(number), partial(read_one, number)) for number in ids.tolist()]
    return _timed(replace(facts, from_memory=_made_cold(local_spans(dataset, ids.tolist()))), reads)


def storage_of_path(path: str) -> StorageFacts:
    """Read some files below a path or URI, or named by a pattern with braces."""
    began = time.monotonic()
    try:
        found = within(LIST_TIMEOUT_S, partial(_files_of, path))
    except MbaasError as error:
        return StorageFacts(where=path, error=str(error))
    if found is None:
        late = f"it was not listed within {seconds(LIST_TIMEOUT_S)}"
        return StorageFacts(where=path, list_s=time.monotonic() - began, error=late)
    where, files = found
    facts = StorageFacts(where=where.root, list_s=time.monotonic() - began)

    def read_one(file: str) -> int:
        with dataset_errors(f"cannot read {file}"), where.filesystem.open_input_file(file) as opened:
            return len(opened.read(READ_BYTES // READERS))

    if where.is_local:
        from mbaas.tools.analysis.measuring.storage import Span

        spans = [Span(file, 0, READ_BYTES // READERS) for file in files]
        facts = replace(facts, from_memory=_made_cold(spans))
    return _timed(facts, [(file, partial(read_one, file)) for file in files])


def _made_cold(spans: Sequence[Any]) -> float:
    """Drop files from the page cache; return the fraction that stays there."""
    from mbaas.tools.analysis.measuring.storage import drop, resident_share

    def work() -> float:
        drop(spans)
        return resident_share(spans) or 0.0

    return within(READ_S, work) or 0.0  # opening a file of a dead server may not end


def _files_of(path: str) -> tuple[Location, list[str]]:
    if "{" in path:
        where, names = locate_shards(path, None)
        where, files = where.for_listing(), [join(where.base, name) for name in names]
    else:
        where = locate(path, None).for_listing()
        files = _files_below(where)
    return where, files[:: max(1, len(files) // READS)][:READS]


def _files_below(where: Location) -> list[str]:
    """Return up to `READS` files, from at most `FOLDERS` folders; raise DatasetError if they cannot be listed."""
    with dataset_errors(f"cannot list {where.root}"):
        kind = where.filesystem.get_file_info(where.base).type
        if kind == FileType.NotFound:
            raise FileNotFoundError("it does not exist")
        if kind == FileType.File:
            return [where.base]
        files: list[str] = []
        folders = [where.base]
        for number in range(FOLDERS):
            if number >= len(folders) or len(files) >= READS:
                break
            for entry in _entries(where, folders[number]):
                if entry.type == FileType.Directory:
                    folders.append(entry.path)
                elif entry.is_file and entry.size:
                    files.append(entry.path)
    return files


def _entries(where: Location, folder: str) -> list[FileInfo]:
    if not where.is_local:
        found: list[FileInfo] = where.filesystem.get_file_info(FileSelector(folder))
        return found
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in islice(entries, ENTRIES)]
    return list(where.filesystem.get_file_info(paths))


def _timed(facts: StorageFacts, reads: Sequence[_Read]) -> StorageFacts:
    """Do the reads in several threads until a limit is reached, and add their times to the facts."""
    end = time.monotonic() + READ_S
    times: list[float] = []
    sizes: list[int] = []
    errors: list[MbaasError] = []
    running: dict[int, str] = {}  # thread -> its read
    todo = iter(reads)

    def work() -> None:
        thread = threading.get_ident()
        for name, read in todo:
            if time.monotonic() > end or sum(sizes) > READ_BYTES:
                return
            began, running[thread] = time.perf_counter(), name
            try:
                nbytes = read()
            except MbaasError as error:
                errors.append(error)
                continue
            finally:
                del running[thread]
            times.append(time.perf_counter() - began)
            sizes.append(nbytes)

    began = time.perf_counter()
    # Daemons, because a read from a dead server may never return.
    threads = [threading.Thread(target=work, name="mbaas-doctor", daemon=True) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + READ_S - time.monotonic()))
    took, late = time.perf_counter() - began, tuple(sorted(running.copy().values()))
    return replace(
        facts,
        error=str(errors[0]) if errors else "",
        failed=len(errors),
        late=late,
        files=len(times),
        read_bytes=sum(sizes),
        read_s=took,
        latency_s=median(times) if times else 0.0,
    )
