"""Find or start Ray, query its nodes' resources, and find the actors of feeds by name."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import psutil
import ray

from mbaas.errors import ResourceError
from mbaas.units import counted, seconds, size

NAMESPACE = "mbaas"
"""The Ray namespace in which feeds are registered, so that every job of a cluster finds them."""

CHILDREN = ("prep", "cache", "relay")
"""The kinds of actors that belong to a feed."""

WATCH_S = 3.0
"""Period at which a feed's actors check that the feed still has a coordinator. With `MISSES`, they end 3 to 6 s after
Ray has noticed that the feed's program is gone."""

MISSES = 2
"""Consecutive checks without a coordinator after which an actor ends itself. One miss may be a restart."""

LEFTOVERS_S = 60.0
"""Time limit for the remains of an earlier feed to end, in `serve`; after that its name is still taken."""

LOOK_S = 0.1
"""Pause between two checks of whether something has ended."""

END_S = 6.0
END_LOOK_S = 0.3
"""Time limit for a shutdown after Ctrl-C or a supervisor's signal, and period of the checks of whether Ray ended
first."""

HEAD_RESOURCE = "node:__internal_head__"
"""The resource that only the head node has."""

ABOUT_TOKENS = "a cluster with tokens wants RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
"""Advice for connection errors: with a wrong token, Ray reports only that it cannot connect."""

GCS_LOOK_S = 1.0
"""Timeout of a connection to a cluster's GCS, after which the GCS counts as gone."""

_is_news = False
"""True if `ensure_ray` joined another program's cluster and this has not been reported yet."""

_connecting = threading.Lock()
"""Held while this process connects to Ray: threads may call at the same time, and Ray connects only once."""

_SETTINGS = {
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of an embedded Ray: memory of dropped minibatches is freed within milliseconds instead of a second; no
usage reports; and processes without a GPU keep the variables that list GPUs, without a warning."""


class NoAnswerError(ConnectionError):
    """Nothing accepts connections at the address of a cluster."""


def get(refs: Any, timeout_s: float) -> Any:
    """Call `ray.get`, and keep nothing alive if it raises.

    `ray.get` leaves a reference cycle of exception and frames. Until the next garbage collection the cycle would keep
    these frames' arrays alive, and their blocks in staging.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        traceback.clear_frames(error.__traceback__)
        raise


def ensure_ray(*, start: bool) -> None:
    """Connect to the running cluster; with ``start``, start an embedded one on this machine if none is running.

    RAY_ADDRESS names the cluster; without it, the cluster of this machine is used. "local" requests a new cluster, as
    in `ray.init`.

    Raises:
        ResourceError: the cluster at RAY_ADDRESS does not answer; no cluster runs and ``start`` is false; or tokens are
            required and this program has none.
    """
    with _connecting:
        if not ray.is_initialized():
            _find_or_start(start=start)


def _find_or_start(*, start: bool) -> None:
    global _is_news
    if os.environ.get("RAY_ADDRESS") == "local":
        if not start:
            raise ResourceError('RAY_ADDRESS is "local", which names no cluster that could be joined')
        start_own_ray()
        return
    try:
        _connect("auto")
        _is_news = True
    except ray.exceptions.AuthenticationError as error:
        raise ResourceError(f"Ray has no token for its cluster; {ABOUT_TOKENS}") from error
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            reason = str(error).strip().splitlines()[0]
            hint = "unset RAY_ADDRESS if that cluster is gone" if isinstance(error, NoAnswerError) else ABOUT_TOKENS
            raise ResourceError(
                f"the Ray cluster at RAY_ADDRESS={address} does not answer: {reason}; {hint}"
            ) from error
        if not start:
            raise ResourceError(
                "no Ray cluster is running here; start one with `ray start --head`, or call mbaas.serve, which starts "
                "one on this machine, and join from the same program or from Ray tasks and trials"
            ) from None
        start_ray()
        _say(f"no Ray cluster is running, started one on this machine ({_described()})")


def start_own_ray() -> None:
    """Start Ray on this machine, even if a cluster is already running here, and report it."""
    start_ray()
    _say(f"started a Ray cluster of its own on this machine ({_described()})")


def say_joined() -> None:
    """Report once which cluster `ensure_ray` joined: it may belong to another user, and end at any time."""
    global _is_news
    if not _is_news:
        return
    _is_news = False
    named = "named by RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "found on this machine"
    address = ray.get_runtime_context().gcs_address
    _say(
        f"joined the Ray cluster at {address}, {named} and started by another program, with which it may end "
        f"({_described()})"
    )


def _described() -> str:
    nodes = counted(sum(node["Alive"] for node in ray.nodes()), "node")
    return f"{nodes}, {counted(cpus(), 'CPU')}, {_stores()} object store"


def _stores() -> str:
    stores = sorted(store_bytes().values()) or [0]
    return " to ".join(dict.fromkeys(map(size, (stores[0], stores[-1]))))


def _say(what: str) -> None:
    # Printed, not logged: a user who named no cluster should see which one it is, whatever the log settings.
    print(f"mbaas: {what}", file=sys.stderr)


def start_ray(num_cpus: int | None = None) -> None:
    """Start Ray on this machine, without a dashboard, even if a cluster is already running here.

    Args:
        num_cpus: CPUs that it may hand out; default: all.

    Raises:
        ResourceError: Ray cannot write its files, or did not start.
    """
    try:
        _connect("local", include_dashboard=False, num_cpus=num_cpus)
    except OSError as error:  # ConnectionError has another meaning, but a local start cannot raise it
        hint = "RAY_TMPDIR (or TMPDIR) must be a short path to a writable folder with room"
        raise ResourceError(f"Ray could not be started on this machine: {error}; {hint}") from error
    except Exception as error:  # Ray has no specific class for this, and mostly raises Exception
        reason = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"Ray did not start on this machine: {reason.rstrip('.')}; if the machine is busy, try again; otherwise "
            "see the logs in /tmp/ray/session_latest/logs"
        ) from None  # Ray's traceback has sixty lines without the reason


def owns_ray() -> bool:
    """Return whether this program started the Ray cluster that it is connected to, which then ends with it."""
    return _own_head() is not None


def own_ray_is_broken() -> bool:
    """Return whether the GCS of the cluster started by this program has ended; nothing works without it."""
    head = _own_head()
    if head is None:
        return False
    # By name: `dead_processes` iterates over all, and fails if another thread shuts Ray down at the same time.
    return any(gcs.process.poll() is not None for gcs in head.all_processes.get("gcs_server", ()))


def lost_cluster() -> str | None:
    """Return a clause that names the cluster if it has ended under this program; None while its GCS runs.

    Tests a connection to the GCS port: any Ray call would wait a minute for a GCS that has ended, and then Ray would
    end this program.
    """
    if not ray.is_initialized():
        return None
    if owns_ray():
        return "the Ray cluster that this program started has ended" if own_ray_is_broken() else None
    address = ray.get_runtime_context().gcs_address
    if _answers(address):
        return None
    return f"the Ray cluster at {address}, which this program joined and did not start, has ended"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=GCS_LOOK_S).close()
    except OSError:
        return False
    return True


def _check_answers() -> None:
    """Check that a cluster listens at its address; Ray would try to reach a dead one for minutes.

    A killed cluster leaves its address in Ray's temporary folder, and job scripts may leave it in RAY_ADDRESS.

    Raises:
        NoAnswerError: nothing accepts connections there.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if "://" in named:  # Ray Client, which has its own deadline
        return
    services: Any = ray._private.services
    try:
        address = services.canonicalize_bootstrap_address("auto")
    except (AttributeError, ValueError):  # not public, or no address: `ray.init` reports it
        return
    if address is None or _answers(address) or (":" in named and _answers(named)):  # Ray replaces 127.0.0.1
        return
    raise NoAnswerError(f"nothing listens at {named if ':' in named else address}")


def kill_own_ray() -> None:
    """Kill the processes of the cluster that this program started, if any; its workers end when they notice."""
    if (head := _own_head()) is not None:
        head.kill_all_processes(check_alive=False, allow_graceful=False)


def see_to_the_end(has_ended: threading.Event | None = None) -> bool:
    """Wait up to `END_S` for this program's shutdown; after that, kill the Ray that it started.

    A signal to the process group, as sent by `timeout` and systemd, also ends the Ray that this program started. Every
    later call to its GCS would wait a minute for it to come back, so the wait ends early.

    Args:
        has_ended: set when the shutdown is complete; None: the end of the process also ends this wait.

    Returns:
        True if Ray was killed; the caller must then end this process at once.
    """
    has_ended = has_ended or threading.Event()
    deadline, broken = time.monotonic() + END_S, 0
    # Twice in a row: during an orderly shutdown, Ray has no GCS for a moment.
    while time.monotonic() < deadline and broken < 2:
        if has_ended.wait(END_LOOK_S):
            return False
        broken = broken + 1 if own_ray_is_broken() else 0
    kill_own_ray()
    return True


def _own_head() -> Any | None:
    # Ray has no public API for this. If this program joined a cluster, the node is None or not a head.
    node: Any = ray._private.worker._global_node
    return node if node is not None and node.is_head() else None


def _connect(address: str, **options: Any) -> None:
    # Ray reads its settings when a process connects; the user's values take precedence.
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if address != "local":
        _check_answers()
        _use_own_token()
        _check_token()
    elif "RAY_AUTH_MODE" not in os.environ:
        # The default in Ray 2.60, which creates a missing token. Set for all versions: whoever reaches the ports of
        # a cluster without tokens can run code as the user.
        os.environ["RAY_AUTH_MODE"] = "token"
        reread_token()
    with _kept_sigterm(), _deferred_interrupt():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)


_INTERRUPTED = b"Ray is connecting or starting; the program ends when that is done, or at once after another Ctrl-C\n"


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer the first Ctrl-C to the end of the block, and handle a second one at once.

    An interrupted `ray.init` may leave the processes that it started, or never return: it constructs C++ objects whose
    destructors wait for threads that have not started yet (Ray 2.60).
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        interrupts.append((number, frame))
        if len(interrupts) > 1:
            before(number, frame)
        os.write(2, _INTERRUPTED)  # not print, which is not reentrant

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(interrupts) == 1:  # also after an error: the caller of `ray.init` may handle it and start a cluster
            before(*interrupts[0])


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Keep the program's SIGTERM handler, which Ray would replace by an exit with stack trace and code 15.

    A program that starts Ray and has no handler gets one that exits as Ray's does, but within a time limit.
    """
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is not threading.main_thread():
        return
    if before not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, before)
    elif owns_ray():
        signal.signal(signal.SIGTERM, _ends_within_a_bound())


def _ends_within_a_bound() -> Callable[[int, Any], None]:
    """Return a signal handler that exits, by force if the shutdown takes too long because Ray ended first."""
    program = os.getpid()

    def watch(number: int) -> None:
        see_to_the_end()
        os._exit(number)

    def handle(number: int, _: Any) -> None:
        if os.getpid() == program:  # a forked process, such as a DataLoader worker, inherits the handler, but not Ray
            threading.Thread(target=watch, args=(number,), name="mbaas-ending", daemon=True).start()
        sys.exit(number)

    return handle


def _use_own_token() -> None:
    """Set token mode if the user has a token and RAY_AUTH_MODE is not set.

    `ray start` protects a cluster with that token by default, but `ray.init` does not send it by default: it would be
    refused for half a minute, with a warning each second. A cluster without tokens ignores it.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    raylet: Any = ray._raylet
    with contextlib.suppress(AttributeError):  # not public: as in `ray start` of Ray 2.60
        if raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            os.environ["RAY_AUTH_MODE"] = "token"
            reread_token()


def reread_token() -> None:
    """Make Ray read its token settings from this process's environment again.

    Ray reads the mode on import and the token on first use, and has no public way to repeat this.
    """
    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_token() -> None:
    """Check that the cluster accepts this program's token; Ray would retry for long, and warn each time."""
    services: Any = ray._private.services  # not public; if Ray has changed them, `ray.init` still reports the error
    raylet: Any = ray._raylet
    address = ""
    with contextlib.suppress(AttributeError):
        loader = raylet.AuthenticationTokenLoader.instance()
        if os.environ.get("RAY_AUTH_MODE") == "token" and not loader.has_token(ignore_auth_mode=True):
            # Ray's GCS client would end this program without a message.
            raise ResourceError(f"RAY_AUTH_MODE is token, and this program has no token; {ABOUT_TOKENS}")
    try:
        address = services.canonicalize_bootstrap_address("auto")  # RAY_ADDRESS, or the cluster of this machine
        with _without_warnings_of_gcs():
            raylet.GcsClient(address=address)  # requests the cluster's id, once
    except ray.exceptions.AuthenticationError as error:
        if "InvalidAuthToken" not in str(error):
            raise
        raise ResourceError(
            f"cannot join the Ray cluster at {address}: it wants a token, and this program has none or another one; "
            f"{ABOUT_TOKENS}"
        ) from None
    except Exception:
        return  # `ray.init` fails with the same error, and reports more


@contextlib.contextmanager
def _without_warnings_of_gcs() -> Iterator[None]:
    # Ray's GCS client writes to stderr, and no Ray setting prevents this.
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            # keep the output of other threads
            os.write(2, b"".join(line for line in written if b"gcs_client.cc" not in line))


def store_bytes(*, with_cpus: bool = False) -> dict[str, int]:
    """Return the bytes of the object store of each of the cluster's nodes, by node id.

    Args:
        with_cpus: only nodes that offer CPUs, if there are any. Prep workers and caches run only there: a head that
            runs Ray's services often has a small store and no CPUs.
    """
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    chosen = {node: each for node, each in alive.items() if each.get("CPU", 0) > 0} if with_cpus else {}
    return {node: int(each.get("object_store_memory", 0)) for node, each in (chosen or alive).items()}


def cpus() -> int:
    """Return the number of CPUs of the cluster."""
    return int(ray.cluster_resources().get("CPU", 0))


def free_cpus() -> dict[str, float]:
    """Return the unreserved CPUs of each node, by node id."""
    return {node: each.get("CPU", 0.0) for node, each in ray._private.state.available_resources_per_node().items()}


def gpus() -> int:
    """Return the number of GPUs of the cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray will give up soon, such as reclaimed spot instances and evicted pods.

    Ray's only public API for this is for Ray Train workers. Empty if this Ray version lacks the private one.
    """
    look: Callable[[], Mapping[str, int]] | None = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(look()) if look is not None else frozenset()


def gpus_of(node: str) -> int:
    """Return the number of GPUs of a node, by its id."""
    return next((int(each["Resources"].get("GPU", 0)) for each in ray.nodes() if each["NodeID"] == node), 0)


def cpus_per_gpu() -> float:
    """Return the smallest ratio of CPUs to GPUs among nodes with GPUs; 0 without GPUs."""
    has = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0)]
    return min((each.get("CPU", 0.0) / each["GPU"] for each in has), default=0.0)


def gpu_marker() -> dict[str, float]:
    """Return resources that place an actor on a node with GPUs without reserving any; empty if Ray has no such
    resource.

    Ray gives GPU nodes a resource named after their GPU type for this purpose. With several types, the most frequent
    one is used.
    """
    return {name: 0.001 for name, _ in _gpus_by_type().most_common(1)}


def markable_gpus() -> int:
    """Return the number of GPUs to which `gpu_marker` places actors: all of one type."""
    return sum(amount for _, amount in _gpus_by_type().most_common(1)) or gpus()


def _gpus_by_type() -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ray.nodes():
        gpus = int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0
        found += Counter({name: gpus for name in node["Resources"] if name.startswith("accelerator_type:")})
    return found


def check_cpus(name: str, prep_workers: int) -> None:
    """Raise a `ResourceError` if the cluster has fewer CPUs than prep workers."""
    if prep_workers > cpus():
        raise ResourceError(
            f"feed {name!r} asks for {prep_workers} prep workers of 1 CPU each, the cluster has {cpus()} CPUs"
        )


def lasting_node(*, detached: bool) -> str:
    """Return the id of the safest node for a feed's coordinator, which is least likely to die alone.

    For a detached feed this is the head, which the cluster cannot do without; otherwise it is this program's node.
    """
    if detached:
        heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]]
        if heads:
            return str(heads[0])
    return str(ray.get_runtime_context().get_node_id())


def actor_name(feed: str) -> str:
    """Return the name under which a feed's coordinator is registered."""
    return f"feed:{feed}"


def find_coordinator(feed: str) -> Any | None:
    """Return a feed's coordinator, or None."""
    try:
        return ray.get_actor(actor_name(feed), namespace=NAMESPACE)
    except ValueError:
        return None


def child_options(feed: str, kind: str, name: str) -> dict[str, Any]:
    """Return the options of an actor that belongs to a feed and survives coordinator restarts; see `end_with`."""
    return {
        "name": f"{kind}:{feed}:{name}",
        "namespace": NAMESPACE,
        "lifetime": "detached",  # otherwise it would die with its owner, the coordinator, and lose its cache
        "enable_task_events": False,
    }


def family(kind: str) -> dict[tuple[str, str], Any]:
    """Return all feeds' actors of a kind: (feed, name) -> handle."""
    found = {}
    for name in _names(f"{kind}:"):
        feed, _, own = name.rpartition(":")  # a feed's name may contain colons, an actor's own name does not
        with contextlib.suppress(ValueError):  # it may have ended since it was listed
            found[feed, own] = ray.get_actor(f"{kind}:{name}", namespace=NAMESPACE)
    return found


def children(feed: str, kind: str) -> dict[str, Any]:
    """Return a feed's actors of a kind: name -> handle."""
    return {name: actor for (owner, name), actor in family(kind).items() if owner == feed}


def end_children(feed: str) -> None:
    """Kill the actors of a feed whose coordinator is gone."""
    for kind in CHILDREN:
        for actor in children(feed, kind).values():
            ray.kill(actor)


def clear_leftovers(feed: str) -> bool:
    """End the remains of a feed whose program died, and wait until its names are free.

    Such a program could not end anything itself, and Ray and the feed's actors take seconds to notice.

    Returns:
        True if the name is free; False if a feed with that name runs.

    Raises:
        ResourceError: an actor does not end in time.
    """
    end = time.monotonic() + LEFTOVERS_S
    while (coordinator := find_coordinator(feed)) is not None:
        program = _program_of(coordinator)
        if program is _Program.RUNS:
            return False
        if program is _Program.DEAD:  # only if Ray reports it: a process not found here may run elsewhere
            ray.kill(coordinator)
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)
    while left := _leftovers(feed):
        if time.monotonic() > end:
            raise ResourceError(
                f"waited {seconds(LEFTOVERS_S)} for what is left of an earlier feed {feed!r} to end: "
                f"{', '.join(left)}; serve it again later, or take another name"
            )
        end_children(feed)
        time.sleep(LOOK_S)
    return True


class _Program(enum.Enum):
    RUNS = "the feed goes on with it, or without it because it is detached"
    NOT_SEEN = "its process is not there any more, and Ray has not noticed"
    DEAD = "Ray has noticed that it ended"


def _program_of(coordinator: Any) -> _Program:
    # Ray tells neither in a public way that works without its dashboard.
    actor = ray._private.state.actors(coordinator._actor_id.hex())
    if not actor or actor["IsDetached"]:
        return _Program.RUNS if actor else _Program.NOT_SEEN
    job = next((job for job in ray._private.state.jobs() if job["JobID"] == actor["JobID"]), None)
    if job is None or job["IsDead"]:
        return _Program.DEAD
    here = job["DriverIPAddress"] == ray.util.get_node_ip_address()
    return _Program.NOT_SEEN if here and not _lives(job["DriverPid"]) else _Program.RUNS


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leftovers(feed: str) -> list[str]:
    return [f"{kind}:{feed}:{name}" for kind in CHILDREN for name in children(feed, kind)]


def end_with(coordinator: str) -> None:
    """End the calling actor when the coordinator with this actor id is gone for good.

    A detached actor outlives its coordinator, so that a restarted one can adopt it. Without this, it would run forever
    if the coordinator never came back.
    """
    me = ray.get_runtime_context().current_actor

    def watch() -> None:
        missed = 0
        while missed < MISSES:
            time.sleep(WATCH_S)
            # If Ray does not answer, the coordinator may be alive: check again later.
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
                # By id, through a private API. A look-up by name creates a handle, and Ray imports the
                # coordinator's modules: half a second for each actor of the feed.
                state = ray._private.state.actors(coordinator).get("State", "DEAD")
                missed = missed + 1 if state == "DEAD" else 0
        ray.kill(me)

    threading.Thread(target=watch, name="mbaas-end-with-coordinator", daemon=True).start()


def pid_of(actor: Any) -> int | None:
    """Return the process id of an actor that has its resources, even if it does not answer yet, or None.

    Ray has no public API for this, and a slowly starting actor cannot be called.
    """
    return ray._private.state.actors(actor._actor_id.hex()).get("Pid") or None


def feed_names() -> list[str]:
    """Return the names of the feeds that run on this cluster, sorted."""
    return sorted(_names("feed:"))


def _names(prefix: str) -> list[str]:
    # not `ray.util.state.list_actors`, which needs the dashboard, and an embedded Ray has none
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
