"""Finds or starts Ray, divides what its nodes have, and finds the actors of feeds by their names."""

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

CHILDREN = ("prep", "cache", "relay", "lane")
"""The kinds of actors that belong to a feed."""

WATCH_S = 3.0
"""The period at which an actor of a feed looks whether the feed still has a coordinator: with `MISSES`, what belongs to
a feed ends 3 to 6 s after Ray has noticed that its program is gone.
"""

MISSES = 2
"""Such an actor ends itself after this many looks in a row without a coordinator: one alone may fall into a restart."""

LEFTOVERS_S = 60.0
"""How long `serve` waits for what is left of a feed to end; after that the feed's name cannot be used yet."""

LOOK_S = 0.1
"""Pause between two looks whether something is gone."""

END_S = 6.0
END_LOOK_S = 0.3
"""How long the end may take after Ctrl-C or a supervisor's signal, and how often is looked whether Ray ended first."""

HEAD_RESOURCE = "node:__internal_head__"
"""The resource that Ray gives to the head node alone."""

ABOUT_TOKENS = "a cluster with tokens wants RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
"""Advice for errors in connecting: of a wrong token Ray says no more than that it cannot connect."""

GCS_LOOK_S = 1.0
"""After this long without a connection the GCS of a cluster counts as gone."""

_is_news = False
"""Whether `ensure_ray` joined a cluster that somebody else started, and nobody said so yet."""

_connecting = threading.Lock()
"""Held while this process connects to Ray: threads may call at the same time, and Ray connects only once."""

_SETTINGS = {
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of an embedded Ray: memory of dropped minibatches comes back in milliseconds, not in a second; no usage
is reported; and in processes without a GPU Ray leaves the variables that name GPUs alone, instead of warning of that.
"""


class NoAnswerError(ConnectionError):
    """Nobody takes connections at the address of a cluster."""


def ensure_ray(*, start: bool) -> None:
    """Connect to the running cluster; with ``start``, start an embedded one on this machine if there is none.

    The cluster is the one that RAY_ADDRESS names, else the one that runs on this machine. "local" names none: it asks
    for one that starts now, as it does in `ray.init`.

    Raises:
        ResourceError: the cluster that RAY_ADDRESS names does not answer, or there is none and none may be started, or
            tokens are on and this program has none.
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
    """Start Ray on this machine, also if a cluster runs here already, and say so."""
    start_ray()
    _say(f"started a Ray cluster of its own on this machine ({_described()})")


def say_joined() -> None:
    """Say which cluster `ensure_ray` found and joined, once: it may be somebody else's, and end when they like."""
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
    # Printed, not logged: a user who named no cluster should learn which one it is, whatever becomes of logs.
    print(f"mbaas: {what}", file=sys.stderr)


def start_ray(num_cpus: int | None = None) -> None:
    """Start Ray on this machine, without a dashboard, also if a cluster runs here already.

    Args:
        num_cpus: CPUs that it may give out; default: all.

    Raises:
        ResourceError: Ray cannot put its files where it wants to, or did not come up.
    """
    try:
        _connect("local", include_dashboard=False, num_cpus=num_cpus)
    except OSError as error:  # ConnectionError, which means something else, cannot come from a local start
        hint = "RAY_TMPDIR (or TMPDIR) must be a short path to a writable folder with room"
        raise ResourceError(f"Ray could not be started on this machine: {error}; {hint}") from error
    except Exception as error:  # Ray has no class of its own for this: most often it is Exception itself
        reason = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"Ray did not start on this machine: {reason.rstrip('.')}; if the machine is busy try again, else the logs "
            "below /tmp/ray/session_latest/logs say more"
        ) from None  # its traceback is Ray's own, sixty lines that say nothing of the reason


def owns_ray() -> bool:
    """Return whether this program started the Ray cluster that it is connected to, which then ends with it."""
    return _own_head() is not None


def own_ray_is_broken() -> bool:
    """Return whether the GCS of the cluster that this program started has ended, without which nothing answers."""
    head = _own_head()
    if head is None:
        return False
    # By its name: `dead_processes` walks all of them, and fails if another thread shuts Ray down meanwhile.
    return any(gcs.process.poll() is not None for gcs in head.all_processes.get("gcs_server", ()))


def lost_cluster() -> str | None:
    """Say which cluster has ended under this program, and whose it was; None as long as its GCS is there.

    By a connection to its port: whatever is asked of Ray waits for a GCS that has ended, for a minute, after which Ray
    ends this program.
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
    """Return whether somebody takes connections at an address, "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=GCS_LOOK_S).close()
    except OSError:
        return False
    return True


def _check_answers() -> None:
    """Refuse the address of a cluster that is gone, which Ray would try to reach for minutes.

    A cluster that was killed leaves its address in Ray's temporary folder, and job scripts may leave it in RAY_ADDRESS.

    Raises:
        NoAnswerError: nobody takes connections there.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if "://" in named:  # of Ray's client, which has a deadline of its own
        return
    services: Any = ray._private.services
    try:
        address = services.canonicalize_bootstrap_address("auto")
    except (AttributeError, ValueError):  # not public, or no address: `ray.init` says which
        return
    if address is None or _answers(address) or (":" in named and _answers(named)):  # Ray replaces 127.0.0.1
        return
    raise NoAnswerError(f"nothing listens at {named if ':' in named else address}")


def kill_own_ray() -> None:
    """Kill the processes of the cluster that this program started, if it did; its workers end when they notice."""
    if (head := _own_head()) is not None:
        head.kill_all_processes(check_alive=False, allow_graceful=False)


def see_to_the_end(has_ended: threading.Event | None = None) -> bool:
    """Wait until this program has ended what it was told to end, at most `END_S`; else kill the Ray that it started.

    A signal to the process group, as `timeout` and systemd send it, ends the Ray that this program started, too. What
    asks its GCS from then on would wait a minute for it to come back, so there is nothing to wait for.

    Args:
        has_ended: set when nothing is left to wait for; None: the end of the process ends this, too.

    Returns:
        whether Ray was killed, after which there is nothing to do but to end this process at once.
    """
    has_ended = has_ended or threading.Event()
    deadline, broken = time.monotonic() + END_S, 0
    # Twice in a row: a Ray that is being shut down in good order has no GCS for a moment.
    while time.monotonic() < deadline and broken < 2:
        if has_ended.wait(END_LOOK_S):
            return False
        broken = broken + 1 if own_ray_is_broken() else 0
    kill_own_ray()
    return True


def _own_head() -> Any | None:
    # Ray tells in no public way whether this program started the head; a cluster that it joined leaves this None.
    node: Any = ray._private.worker._global_node
    return node if node is not None and node.is_head() else None


def _connect(address: str, **options: Any) -> None:
    # Ray reads its settings when a process connects; what the user has set stays.
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if address != "local":
        _check_answers()
        _use_own_token()
        _check_token()
    elif "RAY_AUTH_MODE" not in os.environ:
        # Ray 2.60 does so by itself, and writes a token where there is none; whatever another version does, who reaches
        # the ports of a cluster without tokens runs code as the user.
        os.environ["RAY_AUTH_MODE"] = "token"
        reread_token()
    with _kept_sigterm(), _deferred_interrupt():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)


_INTERRUPTED = b"Ray is connecting or starting; the program ends when that is done, or at once after another Ctrl-C\n"


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Handle the first Ctrl-C after the block, and a second one at once.

    An interrupted `ray.init` may leave the processes that it started, or never return: it constructs objects in C++
    whose destructors wait for threads that have not started yet (Ray 2.60).
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
        os.write(2, _INTERRUPTED)  # not print, which a signal must not enter twice

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        before(*interrupts[0])


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Keep what the program does at SIGTERM, if it said so: Ray would end it, with a stack trace and exit code 15.

    If it said nothing, and starts a Ray, it ends as Ray has it end, but within a bound.
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
    """Make a handler that ends this program at a signal: by force if it takes too long because its Ray ended first."""
    program = os.getpid()

    def watch(number: int) -> None:
        see_to_the_end()
        os._exit(number)

    def handle(number: int, _: Any) -> None:
        if os.getpid() == program:  # a forked process, of a DataLoader for instance, has the handler, but not the Ray
            threading.Thread(target=watch, args=(number,), name="mbaas-ending", daemon=True).start()
        sys.exit(number)

    return handle


def _use_own_token() -> None:
    """Join with the user's token, if there is one and nobody said how to join.

    `ray start` protects a cluster with that token, without being told to, but `ray.init` does not show it by itself: it
    would be refused for half a minute, with a warning each second. A cluster without tokens does not mind it.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    raylet: Any = ray._raylet
    with contextlib.suppress(AttributeError):  # not public: as `ray start` does it in Ray 2.60
        if raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            os.environ["RAY_AUTH_MODE"] = "token"
            reread_token()


def reread_token() -> None:
    """Have this process take from its environment whether there are tokens, and which is its own.

    Ray reads both once, in no public way: the one as it is imported, the other when it is needed for the first time.
    """
    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_token() -> None:
    """Refuse to join a cluster that does not take this program's token: Ray would try for long, and warn each time."""
    services: Any = ray._private.services  # not public; where Ray has changed them `ray.init` still tells
    raylet: Any = ray._raylet
    address = ""
    with contextlib.suppress(AttributeError):
        loader = raylet.AuthenticationTokenLoader.instance()
        if os.environ.get("RAY_AUTH_MODE") == "token" and not loader.has_token(ignore_auth_mode=True):
            # Ray's client of the GCS would end this program, without a word.
            raise ResourceError(f"RAY_AUTH_MODE is token, and this program has no token; {ABOUT_TOKENS}")
    try:
        address = services.canonicalize_bootstrap_address("auto")  # RAY_ADDRESS, or what runs on this machine
        with _without_warnings_of_gcs():
            raylet.GcsClient(address=address)  # asks for the cluster's id, once
    except ray.exceptions.AuthenticationError as error:
        if "InvalidAuthToken" not in str(error):
            raise
        raise ResourceError(
            f"cannot join the Ray cluster at {address}: it wants a token, and this program has none or another one; "
            f"{ABOUT_TOKENS}"
        ) from None
    except Exception:
        return  # whatever else it is, `ray.init` meets it again and says more


@contextlib.contextmanager
def _without_warnings_of_gcs() -> Iterator[None]:
    """Leave out what Ray's client of the GCS writes to stderr, which no setting of Ray's prevents."""
    try:
        kept = os.dup(2)
    except OSError:  # this program has no stderr
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
            # other threads may have written, too
            os.write(2, b"".join(line for line in written if b"gcs_client.cc" not in line))


def store_bytes(*, with_cpus: bool = False) -> dict[str, int]:
    """Return the bytes of the object store of each of the cluster's nodes, by the node's id.

    Args:
        with_cpus: only of those that give out CPUs, as far as there are any. Prep workers and a feed's cache are on no
            other: a head that runs Ray's own services often has a small store, and no CPU for anybody.
    """
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    chosen = {node: each for node, each in alive.items() if each.get("CPU", 0) > 0} if with_cpus else {}
    return {node: int(each.get("object_store_memory", 0)) for node, each in (chosen or alive).items()}


def cpus() -> int:
    """Return the number of CPUs of the cluster."""
    return int(ray.cluster_resources().get("CPU", 0))


def free_cpus() -> dict[str, float]:
    """Return the CPUs of each node that nobody has reserved, by the node's id."""
    return {node: each.get("CPU", 0.0) for node, each in ray._private.state.available_resources_per_node().items()}


def gpus() -> int:
    """Return the number of GPUs of the cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray will give up soon: a spot instance that is reclaimed, a pod that is evicted.

    Ray tells it in no public way to others than the workers of Ray Train; a Ray that has none of this tells of none.
    """
    look: Callable[[], Mapping[str, int]] | None = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(look()) if look is not None else frozenset()


def gpus_of(node: str) -> int:
    """Return the number of GPUs of a node, by its id."""
    return next((int(each["Resources"].get("GPU", 0)) for each in ray.nodes() if each["NodeID"] == node), 0)


def cpus_per_gpu() -> float:
    """Return how many CPUs a node with GPUs has for each of these, where that is fewest; 0 if there is none."""
    has = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0)]
    return min((each.get("CPU", 0.0) / each["GPU"] for each in has), default=0.0)


def gpu_marker() -> dict[str, float]:
    """Return resources that bring an actor to a node with GPUs, and take nothing of these; none where Ray has none.

    Ray gives a node with GPUs a resource with their type in its name, for just this. Of several types it is the one of
    which there are most.
    """
    return {name: 0.001 for name, _ in _gpus_by_type().most_common(1)}


def markable_gpus() -> int:
    """Return the number of GPUs to which `gpu_marker` brings actors: all of one type."""
    return sum(amount for _, amount in _gpus_by_type().most_common(1)) or gpus()


def _gpus_by_type() -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ray.nodes():
        gpus = int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0
        found += Counter({name: gpus for name in node["Resources"] if name.startswith("accelerator_type:")})
    return found


def check_cpus(name: str, prep_workers: int) -> None:
    """Refuse at once what the cluster can never give."""
    if prep_workers > cpus():
        raise ResourceError(
            f"feed {name!r} asks for {prep_workers} prep workers of 1 CPU each, the cluster has {cpus()} CPUs"
        )


def lasting_node(*, detached: bool) -> str:
    """Return the id of the node on which a feed's coordinator is least likely to die alone.

    That is the head, without which nothing goes on, if it is to outlive this program; else this program's own.
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
    """Find a feed's coordinator; None if there is none."""
    try:
        return ray.get_actor(actor_name(feed), namespace=NAMESPACE)
    except ValueError:
        return None


def child_options(feed: str, kind: str, name: str) -> dict[str, Any]:
    """Return the options of an actor that belongs to a feed and outlives its coordinator's restarts; see `end_with`."""
    return {
        "name": f"{kind}:{feed}:{name}",
        "namespace": NAMESPACE,
        "lifetime": "detached",  # else it would die with the coordinator, its owner, and its cache with it
        "enable_task_events": False,
    }


def family(kind: str) -> dict[tuple[str, str], Any]:
    """Find the actors of a kind that belong to feeds: (feed, name) -> handle."""
    found = {}
    for name in _names(f"{kind}:"):
        feed, _, own = name.rpartition(":")  # a feed's name may have colons, an actor's own has none
        with contextlib.suppress(ValueError):  # it has ended since its name was listed
            found[feed, own] = ray.get_actor(f"{kind}:{name}", namespace=NAMESPACE)
    return found


def children(feed: str, kind: str) -> dict[str, Any]:
    """Find a feed's actors of a kind: name -> handle."""
    return {name: actor for (owner, name), actor in family(kind).items() if owner == feed}


def end_children(feed: str) -> None:
    """Kill what belongs to a feed whose coordinator is gone."""
    for kind in CHILDREN:
        for actor in children(feed, kind).values():
            ray.kill(actor)


def clear_leftovers(feed: str) -> bool:
    """End what is left of a feed whose program died, and wait until its names are free.

    Such a program could not end anything itself, and Ray and the feed's actors take seconds to notice.

    Returns:
        whether the name is free; if not, a feed of that name runs.

    Raises:
        ResourceError: something does not end in time.
    """
    end = time.monotonic() + LEFTOVERS_S
    while (coordinator := find_coordinator(feed)) is not None:
        program = _program_of(coordinator)
        if program is _Program.RUNS:
            return False
        if program is _Program.DEAD:  # only if Ray says so: a process that is not seen here may live elsewhere
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
    """What became of the program that served a feed."""

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
    """Return names of actors that belong to a feed."""
    return [f"{kind}:{feed}:{name}" for kind in CHILDREN for name in children(feed, kind)]


def end_with(coordinator: str) -> None:
    """End the actor that calls this when the coordinator with this actor id is gone for good.

    A detached actor outlives its coordinator, which is what lets a restarted one adopt it. Nobody else would end it
    where the coordinator never comes back.
    """
    me = ray.get_runtime_context().current_actor

    def watch() -> None:
        missed = 0
        while missed < MISSES:
            time.sleep(WATCH_S)
            # Ray that does not answer says nothing about the coordinator: look again later.
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
                # By its id, as Ray tells in no public way: with its name would come a handle, for which Ray imports all
                # that a coordinator is made of, half a second of work for each actor of the feed.
                state = ray._private.state.actors(coordinator).get("State", "DEAD")
                missed = missed + 1 if state == "DEAD" else 0
        ray.kill(me)

    threading.Thread(target=watch, name="mbaas-end-with-coordinator", daemon=True).start()


def pid_of(actor: Any) -> int | None:
    """Return the process id of an actor that was given its resources, even if it does not answer yet; else None.

    Ray tells this in no public way, and an actor that starts slowly cannot be asked.
    """
    return ray._private.state.actors(actor._actor_id.hex()).get("Pid") or None


def feed_names() -> list[str]:
    """Return the names of the feeds that run on this cluster, sorted."""
    return sorted(_names("feed:"))


def _names(prefix: str) -> list[str]:
    """Return what follows ``prefix`` in the names of actors that mbaas registered."""
    # not `ray.util.state.list_actors`, which needs the dashboard: an embedded Ray has none
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
