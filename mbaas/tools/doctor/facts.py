"""The input of the checks of `mbaas doctor`. Unknown values are None; fields named ``*_error`` contain a reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One machine, as seen by a process on it. Sizes in bytes, times in seconds.

    Attributes:
        node: its name in messages.
        error: why the facts of this node are missing; all others are then defaults.
        shm_bytes, shm_free_bytes: size and free part of /dev/shm.
        memfd_error: why shared memory without a file cannot be created; "" if it can.
        memory_bytes, memory_free_bytes: of the machine.
        memory_limit_bytes: limit of the process's cgroups.
        store_bytes: Ray's object store; without a cluster, the one that Ray would create.
        cpus: CPUs of the machine.
        affinity_cpus: CPUs that this process may use.
        quota_cpus: CPU time per second that the cgroups allow.
        ray_cpus: CPUs that Ray counts; without a cluster, the ones that it would count.
        open_files, most_open_files: soft and hard limit on open files.
        versions: package -> version, with "python"; a package that is not installed is missing.
        temp_folder: the folder for Ray's sockets, logs and spilled objects.
        temp_error: why this folder cannot be written; "" if it can.
        gpu_files: NVIDIA devices in /dev.
        gpus: names of the GPUs that CUDA finds.
        cuda_error: why CUDA cannot be used; "" if it can, or if no driver is installed.
        cuda_version: (major, minor) that the driver supports.
        dali_error: why DALI cannot be imported; "" if it can.
        clock_ahead_s: time by which its clock is ahead of the clock of the machine that runs `mbaas doctor`.
    """

    node: str
    error: str = ""
    shm_bytes: int | None = None
    shm_free_bytes: int = 0
    memfd_error: str = ""
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    memory_limit_bytes: int | None = None
    store_bytes: int | None = None
    cpus: int = 1
    affinity_cpus: int = 1
    quota_cpus: float | None = None
    ray_cpus: float | None = None
    open_files: int = 0
    most_open_files: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    temp_folder: str = ""
    temp_error: str = ""
    temp_free_bytes: int = 0
    gpu_files: int = 0
    gpus: tuple[str, ...] = ()
    cuda_error: str = ""
    cuda_version: tuple[int, int] | None = None
    dali_error: str = ""
    clock_ahead_s: float | None = None

    def version(self, package: str) -> str | None:
        """Return the version of a package on this machine, or None."""
        return dict(self.versions).get(package)


@dataclass(frozen=True, kw_only=True)
class FeedFacts:
    """A running feed.

    Attributes:
        server: the program that serves it; "" if unknown.
        error: why its coordinator gives no status; "" if it does.
        consumers: number of its consumers.
    """

    name: str
    server: str = ""
    error: str = ""
    consumers: int = 0


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """A bounded read of the data.

    Attributes:
        where: folder, file or URI, without credentials.
        error: why it could not be read, or the first failed read; "" without one.
        list_s: time that listing took, or the time limit.
        was_listed: whether the listing ended in time.
        samples, total_bytes: size of the dataset; None for a path without a feed file.
        files, failed: number of successful and failed reads of a file or sample.
        late: files or samples whose reads had not ended when the time was up.
        read_bytes, read_s: bytes read, and the seconds that all threads together took.
        latency_s: median time of one read.
        from_memory: fraction of the bytes that were in the page cache, so that their rate is not one of storage.
    """

    where: str
    error: str = ""
    list_s: float = 0.0
    was_listed: bool = True
    samples: int | None = None
    total_bytes: int | None = None
    files: int = 0
    failed: int = 0
    late: tuple[str, ...] = ()
    read_bytes: int = 0
    read_s: float = 0.0
    latency_s: float = 0.0
    from_memory: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts that `mbaas doctor` judges.

    Attributes:
        nodes: this machine, or all nodes of the cluster.
        address: of the cluster that was joined; "" without one.
        named_address: the address in --address or RAY_ADDRESS; "" without one.
        cluster_error: why a cluster was not joined.
        auth_mode: RAY_AUTH_MODE; "" if it is not set.
        has_token: whether this program has a token for clusters.
        open_token: file with the token, if other users can read it; "" otherwise.
        feeds: feeds of the cluster.
        storage: the data, if they were named.
    """

    nodes: tuple[NodeFacts, ...]
    address: str = ""
    named_address: str = ""
    cluster_error: str = ""
    auth_mode: str = ""
    has_token: bool = False
    open_token: str = ""
    feeds: tuple[FeedFacts, ...] = ()
    storage: StorageFacts | None = None
