"""The verdicts of `mbaas doctor`: pure functions of collected facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mbaas.base.units import counted, exact, percent, rate, seconds, size
from mbaas.memory.budgets import STORE_SHARE
from mbaas.tools.doctor.facts import Facts, FeedFacts, NodeFacts, StorageFacts

LEAST_STORE = 10**9
"""Object store in bytes below which a feed of ordinary images has little room: its default staging alone is 1 GiB."""

LEAST_OPEN_FILES, FEW_OPEN_FILES = 1024, 8192
"""Open files below which connections fail, and the number that Ray recommends."""

RAY_OPEN_FILES = 65_536
"""Upper bound on the soft limit that Ray sets."""

LEAST_TEMP_BYTES = 10**9
"""Free bytes of the temporary folder below which logs and spilled objects soon fill it."""

MOST_TEMP_PATH = 43
"""Characters of the temporary folder's path: Linux limits a socket's path to 107, and Ray appends up to 64."""

CLOCK_NOTE_S, CLOCK_PROBLEM_S = 2.0, 300.0
"""Clock differences at which logs of nodes no longer fit together, and at which object stores soon refuse signatures
(S3 does at 15 min)."""

SLOW_READ_S, SLOW_RATE = 0.2, 20e6
"""Limits for a note on slow storage: seconds of one read, and bytes/s of several threads."""

RAY = (2, 53), (3, 0)
"""The oldest version of Ray with which mbaas works, and the first with which it does not."""

DALI_CUDA = (12, 0)
"""CUDA version that the driver must support for the DALI package that mbaas requires."""

NAMED = 5
"""Number of unread files named in a finding."""

CPU_SLACK = 0.5
"""CPUs by which counts may differ, because Ray counts only whole ones."""


class Verdict(str, Enum):
    """Severity of a finding: a note may matter, a problem prevents a feed or makes it much slower."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """A verdict.

    Attributes:
        check: name of the check.
        found: the facts.
        wanted: the required facts; "" if they are right.
        remedy: a command or a change that fixes it; "" if nothing must be fixed.
        node: the machine; "" for the cluster, this program or the data.
    """

    check: str
    verdict: Verdict
    found: str
    wanted: str = ""
    remedy: str = ""
    node: str = ""


def findings(facts: Facts) -> list[Finding]:
    """Return the verdict of each check, in the order of the report."""
    found = [cluster(facts), token(facts), versions(facts)]
    present = [node for node in facts.nodes if not node.error]
    found += [unreachable(node) for node in facts.nodes if node.error]
    for check in NODE_CHECKS:
        found += [check(node) for node in present]
    if facts.address and len(present) > 1:
        found += [clock(node) for node in present]
    found += feeds(facts)
    if facts.storage is not None:
        found += storage(facts.storage)
    return found


def worst(found: list[Finding]) -> Verdict:
    """Return the most serious verdict."""
    order = [*Verdict]
    return max((each.verdict for each in found), key=order.index, default=Verdict.OK)


# ---- the cluster and this program ----


def cluster(facts: Facts) -> Finding:
    """Judge the cluster that a feed would use."""
    name = "cluster"
    if facts.address:
        nodes = counted(len(facts.nodes), "node")
        return Finding(name, Verdict.OK, f"joined the one at {facts.address}, {nodes}")
    if facts.named_address or facts.cluster_error:
        remedy = "unset RAY_ADDRESS" if facts.named_address else "see the error, or start one with: ray start --head"
        where = f"{facts.named_address}: " if facts.named_address not in facts.cluster_error else ""
        wanted = "an address at which a cluster answers, or none"
        return Finding(name, Verdict.PROBLEM, f"{where}{facts.cluster_error}", wanted, remedy)
    return Finding(name, Verdict.OK, "none is running here; mbaas serve starts one on this machine")


def token(facts: Facts) -> Finding:
    """Judge Ray's token, without its value."""
    name, mode = "token", facts.auth_mode or "not set"
    has = "a token" if facts.has_token else "no token"
    if facts.auth_mode == "token" and not facts.has_token:
        wanted, remedy = "a token in mode token", "ray get-auth-token --generate"
        return Finding(name, Verdict.PROBLEM, f"RAY_AUTH_MODE is {mode}, but this program has no token", wanted, remedy)
    if facts.open_token:
        wanted, remedy = "a file that only you can read", f"chmod 600 {facts.open_token}"
        return Finding(name, Verdict.NOTE, f"other users can read {facts.open_token}", wanted, remedy)
    return Finding(name, Verdict.OK, f"RAY_AUTH_MODE is {mode}, {has}")


def versions(facts: Facts) -> Finding:
    """Judge the versions of Ray, Python and mbaas on all nodes."""
    name = "versions"
    here = [node for node in facts.nodes if not node.error]
    shown = ", ".join(f"{package} {_several(here, package)}" for package in ("ray", "python", "mbaas"))
    for node in here:
        found = node.version("ray")
        if found is None or not _works(found):
            got = f"ray {found or 'is not installed'}"
            oldest, beyond = (".".join(map(str, version)) for version in RAY)
            remedy = f'pip install "ray[default,tune]>={oldest},<{beyond}"'
            return Finding(name, Verdict.PROBLEM, got, f"ray from {oldest} on, below {beyond}", remedy, node.node)
    for package in ("ray", "python", "mbaas"):
        if len({_release(node.version(package), package) for node in here}) > 1:
            remedy = "install the same versions on all nodes, for example with one container image"
            return Finding(name, Verdict.PROBLEM, shown, f"one version of {package} on all nodes", remedy)
    return Finding(name, Verdict.OK, shown)


def _works(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and RAY[0] <= (int(found[1]), int(found[2])) < RAY[1]


def _release(version: str | None, package: str) -> str:
    # Ray requires the same minor version of Python only.
    return ".".join((version or "").split(".")[:2]) if package == "python" else version or ""


def _several(nodes: list[NodeFacts], package: str) -> str:
    return " and ".join(sorted({node.version(package) or "not installed" for node in nodes}))


def unreachable(node: NodeFacts) -> Finding:
    """Report a node whose facts are missing."""
    wanted = "a node that runs a small task"
    if "No module named" in node.error:
        return Finding("node", Verdict.PROBLEM, node.error, "mbaas on every node", "pip install mbaas", node.node)
    return Finding("node", Verdict.PROBLEM, node.error, wanted, "see ray status, and the node's logs", node.node)


def feeds(facts: Facts) -> list[Finding]:
    """Judge each running feed; they share memory and CPUs with a new one."""
    if not facts.feeds:
        return [Finding("feeds", Verdict.OK, "none is running")] if facts.address else []
    return [_feed(feed) for feed in facts.feeds]


def _feed(feed: FeedFacts) -> Finding:
    served = f"{feed.name!r}" + (f", served by {feed.server}" if feed.server else "")
    if feed.error:
        return Finding(
            "feeds", Verdict.NOTE, f"{served}: {feed.error}", "a feed that answers", f"mbaas stop {feed.name}"
        )
    consumers = counted(feed.consumers, "consumer")
    return Finding("feeds", Verdict.OK, f"{served}, {consumers}; it shares memory and CPUs with a new feed")


# ---- machines ----


def shared_memory(node: NodeFacts) -> Finding:
    """Judge /dev/shm, where Ray keeps its object store, against the size of the store."""
    name = "shared memory"
    if node.shm_bytes is None:
        wanted, remedy = "a tmpfs at /dev/shm", "mount -t tmpfs -o size=50% tmpfs /dev/shm"
        return Finding(name, Verdict.PROBLEM, "there is no /dev/shm", wanted, remedy, node.node)
    found = f"/dev/shm has {size(node.shm_bytes)}, {size(node.shm_free_bytes)} free"
    store = max(node.store_bytes or 0, LEAST_STORE)
    remedy = f"docker run --shm-size={_gib(store)}g ..., or: mount -o remount,size={_gib(store)}G /dev/shm"
    if node.shm_bytes < store:
        kept = f"at least {size(store)}, the object store; otherwise Ray keeps minibatches on disk"
        return Finding(name, Verdict.PROBLEM, found, kept, remedy, node.node)
    if node.shm_free_bytes < LEAST_STORE:
        wanted, remedy = f"at least {size(LEAST_STORE)} free", "ls -lS /dev/shm, and end the programs that fill it"
        return Finding(name, Verdict.NOTE, found, wanted, remedy, node.node)
    return Finding(name, Verdict.OK, found, node=node.node)


def _gib(nbytes: int) -> int:
    return -(-nbytes * 11 // 10 // 2**30)  # rounded up, with a tenth more than needed


def memfd(node: NodeFacts) -> Finding:
    """Judge whether workers can share memory that has no file."""
    if node.memfd_error:
        wanted = "memfd_create; without it, each minibatch takes an additional copy through the object store"
        remedy = "run on Linux 5.4 or later, in a sandbox that allows memfd_create"
        return Finding("memfd", Verdict.NOTE, node.memfd_error, wanted, remedy, node.node)
    return Finding("memfd", Verdict.OK, "works", node=node.node)


def memory(node: NodeFacts) -> Finding:
    """Judge a container's memory limit, which includes shared memory, against the object store."""
    name, limit, store = "memory", node.memory_limit_bytes, node.store_bytes or 0
    most = min(node.memory_bytes, limit or node.memory_bytes)
    limited = f", the container's limit is {size(limit)}" if limit is not None and limit < node.memory_bytes else ""
    found = f"{size(node.memory_bytes)}, {size(node.memory_free_bytes)} free{limited}"
    remedy = f"ray start --object-store-memory={most * 3 // 10}, or a higher limit"
    if store >= most:
        wanted = f"more than the object store of {size(store)}, which counts as this memory"
        return Finding(name, Verdict.PROBLEM, found, wanted, remedy, node.node)
    if store > 0.6 * most:
        wanted = f"more room for processes: the object store of {size(store)} takes {percent(store / most)}"
        return Finding(name, Verdict.NOTE, found, wanted, remedy, node.node)
    return Finding(name, Verdict.OK, found, node=node.node)


def object_store(node: NodeFacts) -> Finding:
    """Judge the size of Ray's object store."""
    name = "object store"
    if node.store_bytes is None:
        return Finding(name, Verdict.NOTE, "its size is unknown", "a known size", "ray status -v", node.node)
    room = f"{size(node.store_bytes)}; feeds take up to {size(STORE_SHARE * node.store_bytes)}"
    if node.store_bytes < LEAST_STORE:
        wanted = f"at least {size(LEAST_STORE)} for prepared minibatches and caches"
        remedy = f"ray start --object-store-memory={4 * LEAST_STORE}"
        return Finding(name, Verdict.NOTE, room, wanted, remedy, node.node)
    return Finding(name, Verdict.OK, room, node=node.node)


def cpus(node: NodeFacts) -> Finding:
    """Compare the CPUs that Ray counts with the usable ones."""
    name, usable = "CPUs", min(node.cpus, node.affinity_cpus, node.quota_cpus or node.cpus)
    parts = [f"{exact(round(usable, 2))} usable"]
    if usable < node.cpus:
        cause = "cgroup quota" if node.quota_cpus is not None and usable == node.quota_cpus else "CPU affinity"
        parts.append(f"{node.cpus} in the machine ({cause})")
    if node.ray_cpus is not None:
        parts.append(f"Ray counts {exact(node.ray_cpus)}")
    found, counted_by_ray = ", ".join(parts), node.ray_cpus
    start = f"ray start --num-cpus={max(1, int(usable))}"
    if counted_by_ray is not None and counted_by_ray > usable + CPU_SLACK:
        wanted = "at most as many as are usable; Ray's tasks would have to share them"
        return Finding(name, Verdict.PROBLEM, found, wanted, start, node.node)
    if usable < 2:
        wanted = "at least 2 usable CPUs: one for prep, one for a trial"
        return Finding(name, Verdict.NOTE, found, wanted, "a larger machine or limit", node.node)
    # A head without CPUs for tasks is a usual choice.
    if counted_by_ray and counted_by_ray < usable - CPU_SLACK:
        return Finding(name, Verdict.NOTE, found, "all usable CPUs counted by Ray", start, node.node)
    return Finding(name, Verdict.OK, found, node=node.node)


def open_files(node: NodeFacts) -> Finding:
    """Judge the limit on open files; Ray raises its soft limit up to the hard one."""
    name, hard = "open files", node.most_open_files
    reached = max(node.open_files, min(hard, RAY_OPEN_FILES))
    shown = "unlimited" if hard >= 2**31 else f"{hard:,}"
    found = f"limit {node.open_files:,}, which may be raised to {shown}"
    remedy = f"ulimit -n {RAY_OPEN_FILES} before ray start; docker run --ulimit nofile={RAY_OPEN_FILES}"
    if reached < FEW_OPEN_FILES:
        verdict = Verdict.PROBLEM if reached < LEAST_OPEN_FILES else Verdict.NOTE
        return Finding(name, verdict, found, f"at least {FEW_OPEN_FILES:,}", remedy, node.node)
    return Finding(name, Verdict.OK, found, node=node.node)


def temp_folder(node: NodeFacts) -> Finding:
    """Judge the folder for Ray's sockets, logs and spilled objects."""
    name, folder = "temporary folder", node.temp_folder
    remedy = "export RAY_TMPDIR=/a/short/path with room, that you may write, before Ray starts"
    if node.temp_error:
        return Finding(name, Verdict.PROBLEM, f"{folder}: {node.temp_error}", "a writable folder", remedy, node.node)
    found = f"{folder} is writable, {size(node.temp_free_bytes)} free"
    if len(folder) > MOST_TEMP_PATH:
        wanted = f"a path of at most {MOST_TEMP_PATH} characters, got {len(folder)}: Ray appends names of sockets"
        return Finding(name, Verdict.PROBLEM, found, wanted, remedy, node.node)
    if node.temp_free_bytes < LEAST_TEMP_BYTES:
        wanted = f"at least {size(LEAST_TEMP_BYTES)} free for logs and spilled objects"
        return Finding(name, Verdict.NOTE, found, wanted, remedy, node.node)
    return Finding(name, Verdict.OK, found, node=node.node)


def gpu(node: NodeFacts) -> Finding:
    """Judge CUDA and DALI, which only a machine with a GPU needs."""
    name, version = "GPU and DALI", node.version("nvidia-dali-cuda120")
    dali = f"DALI {version or ''} can be imported".replace("  ", " ")
    reinstall = 'pip install "nvidia-dali-cuda120>=2"'
    if not node.gpus and (node.gpu_files or node.cuda_error):
        found = f"{counted(node.gpu_files, 'GPU')} in /dev, and CUDA fails: {node.cuda_error or 'it finds no GPU'}"
        remedy = "nvidia-smi, and check the driver and CUDA_VISIBLE_DEVICES; docker run --gpus all"
        verdict = Verdict.PROBLEM if node.gpu_files else Verdict.NOTE
        return Finding(name, verdict, found, "a driver that works", remedy, node.node)
    if not node.gpus:
        found = "no GPU, so the cpu engine is used; " + (
            dali if not node.dali_error else f"DALI cannot be imported: {node.dali_error}"
        )
        return Finding(name, Verdict.OK, found, node=node.node)
    found = f"{counted(len(node.gpus), 'GPU')} ({', '.join(dict.fromkeys(node.gpus))})"
    if node.dali_error:
        wanted = "a DALI that can be imported: feeds choose it where there is a GPU"
        return Finding(name, Verdict.PROBLEM, f"{found}, DALI fails: {node.dali_error}", wanted, reinstall, node.node)
    if node.cuda_version is not None and node.cuda_version < DALI_CUDA:
        got = ".".join(map(str, node.cuda_version))
        wanted = f"a driver for CUDA {DALI_CUDA[0]} or later"
        return Finding(name, Verdict.PROBLEM, f"{found}, driver for CUDA {got}", wanted, "update the driver", node.node)
    return Finding(name, Verdict.OK, f"{found}, {dali}", node=node.node)


NODE_CHECKS: tuple[Callable[[NodeFacts], Finding], ...] = (
    shared_memory,
    memfd,
    memory,
    object_store,
    cpus,
    open_files,
    temp_folder,
    gpu,
)
"""Checks of each machine, in the order of the report."""


def clock(node: NodeFacts) -> Finding:
    """Judge a node's clock against the one of this machine."""
    name, ahead = "clock", node.clock_ahead_s
    if ahead is None:
        return Finding(name, Verdict.NOTE, "was not compared", "a comparison", "mbaas doctor, again", node.node)
    off = abs(ahead)
    if off < CLOCK_NOTE_S:
        return Finding(name, Verdict.OK, f"within {seconds(max(off, 0.1))} of this machine's", node=node.node)
    verdict = Verdict.PROBLEM if off >= CLOCK_PROBLEM_S else Verdict.NOTE
    found = f"{seconds(off)} {'ahead of' if ahead > 0 else 'behind'} this machine's"
    wanted = f"within {seconds(CLOCK_NOTE_S)}: logs are compared by time, and object stores check it"
    return Finding(name, verdict, found, wanted, "timedatectl set-ntp true", node.node)


# ---- the data ----


def storage(data: StorageFacts) -> Iterator[Finding]:
    """Judge the listing and the reads of the data."""
    name = "storage"
    if data.late:
        reads = counted(len(data.late) + data.failed + data.files, "read")
        found = f"{data.where}: {len(data.late)} of {reads} did not end within {seconds(data.read_s)}, such as "
        found += ", ".join(_of_each_folder(data.late)[:NAMED])
        yield Finding(name, Verdict.PROBLEM, found, "servers and disks that all answer", "check where these files are")
    if data.error and not data.files:
        remedy = "check the path, credentials and permissions; each node needs them"
        yield Finding(name, Verdict.PROBLEM, _named(data, data.error), "data that can be listed and read", remedy)
        return
    if data.failed:
        found = f"{data.where}: {data.failed} of {counted(data.failed + data.files, 'read')} failed: {data.error}"
        yield Finding(name, Verdict.PROBLEM, found, "samples that can all be read", "mbaas check FEED.yaml lists them")
    if data.late:
        return  # the rate of all reads together means nothing
    if not data.was_listed:
        yield Finding(
            name,
            Verdict.NOTE,
            _named(data, f"not listed within {seconds(data.list_s)}"),
            "a listing that is kept, so that only the first start takes long",
            "listing: listing.parquet in the feed file",
        )
        return
    if not data.files:
        yield Finding(name, Verdict.PROBLEM, _named(data, "no file was found to read"), "files", "check the path")
        return
    yield _reads(name, data)


def _of_each_folder(files: Sequence[str]) -> list[str]:
    """Return one file of each folder: folders may be on different servers."""
    return [*{file.rpartition("/")[0]: file for file in files}.values()]


def _named(data: StorageFacts, why: str) -> str:
    return why if data.where in why else f"{data.where}: {why}"


def _reads(name: str, data: StorageFacts) -> Finding:
    per_s = data.read_bytes / max(data.read_s, 1e-9)
    each = f"{size(data.read_bytes / data.files)}, {seconds(data.latency_s)} each"
    found = f"{data.where}: {counted(data.files, 'read')} of {each}, {rate(per_s)} together"
    if data.from_memory > 0.5:
        return Finding(name, Verdict.OK, f"{found}, from memory: {percent(data.from_memory)} were in the page cache")
    if data.samples is not None and data.total_bytes is not None:
        found += f"; {counted(data.samples, 'sample')}, {size(data.total_bytes)}: {seconds(data.total_bytes / per_s)}"
        found += " to read once"
    if data.latency_s > SLOW_READ_S or per_s < SLOW_RATE:
        wanted = f"reads below {seconds(SLOW_READ_S)} and at least {rate(SLOW_RATE)}; caches hide this after one epoch"
        remedy = "a cache for the whole dataset (cache_bytes, disk), storage nearby, or larger files"
        # Small files are bound by latency, not by the rate.
        if data.latency_s > SLOW_READ_S or data.read_bytes / data.files > 50_000:
            return Finding(name, Verdict.NOTE, found, wanted, remedy)
    return Finding(name, Verdict.OK, found)
