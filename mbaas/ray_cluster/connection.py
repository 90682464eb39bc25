"""Find or start Ray, connect to it, and notice its end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray

from mbaas.base.units import counted, size
from mbaas.errors import ResourceError
from mbaas.ray_cluster.resources import cpus, store_bytes

END_S = 6.0
END_LOOK_S = 0.3
"""Time limit for a shutdown after Ctrl-C or a supervisor's signal, and period of the checks of whether Ray ended
first."""

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
"""Environment of an embedded Ray: memory of dropped minibatches is freed within milliseconds instead of a second, there
are no usage reports, and processes without a GPU keep the variables that list GPUs."""


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
    """Report once which cluster `ensure_ray` joined: it may belong to another user, and end with its program."""
    global _is_news
    if not _is_news:
        return
    _is_news = False
    named = "named by RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "found on this machine"
    address = ray.get_runtime_context().gcs_address
    _say(f"joined the Ray cluster at {address}, {named} ({_described()})")
    if starter := _starter():
        _say(
            f"that cluster ends with {starter}, which started it, and then this program fails; set RAY_ADDRESS=local "
            "to start a separate cluster, or run `ray start --head` before both"
        )


def _starter() -> str | None:
    """Name the program of this machine that started the joined cluster and still runs; None for `ray start`.

    Ray's session name ends in the pid of the process that started the head.
    """
    node: Any = ray._private.worker._global_node  # None with Ray Client; Ray has no public API for this
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    if node is None or host != ray.util.get_node_ip_address():
        return None
    try:
        began, _, pid = node.session_name.rsplit("_", 2)  # the second and its microseconds
        program = psutil.Process(int(pid))
        if program.create_time() > 1 + datetime.strptime(began, "session_%Y-%m-%d_%H-%M-%S").timestamp():
            return None  # the pid of `ray start` now belongs to another process
        command = program.cmdline()
        # `ray start --block` also runs until the cluster ends, but it was started to last.
        return None if "start" in command else f"process {pid} ({' '.join(command[:3])})"
    except (ValueError, psutil.Error):
        return None


def _described() -> str:
    nodes = counted(sum(node["Alive"] for node in ray.nodes()), "node")
    stores = sorted(store_bytes().values()) or [0]
    sizes = " to ".join(dict.fromkeys(map(size, (stores[0], stores[-1]))))
    return f"{nodes}, {counted(cpus(), 'CPU')}, {sizes} object store"


def _say(what: str) -> None:
    # Printed, not logged: a user who named no cluster should see which one it is, whatever the log settings.
    print(f"mbaas: {what}", file=sys.stderr)


def start_ray(num_cpus: int | None = None) -> None:
    """Start Ray on this machine, without a dashboard, even if a cluster is already running here; all CPUs by default.

    Raises `ResourceError` if Ray cannot write its files, or did not start.
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


@contextlib.contextmanager
def separate_ray(num_cpus: int | None = None) -> Iterator[str]:
    """Run a cluster as by `start_ray`, for measurements; yield its address, and end it afterwards."""
    start_ray(num_cpus)
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


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
    """Wait up to `END_S` for this program's shutdown (``has_ended``); after that, kill the Ray that it started.

    A signal to the process group, as sent by `timeout` and systemd, also ends the Ray that this program started. Every
    later call to its GCS would wait a minute for it to come back, so the wait ends early. Return True if Ray was
    killed; the caller must then end this process at once.
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
        # The default in Ray 2.60, which creates a missing token. Set for all versions: a stranger who reaches the ports
        # of a cluster without tokens can run code as the user.
        os.environ["RAY_AUTH_MODE"] = "token"
        reread_token()
    with _kept_sigterm(), _deferred_interrupt(), _private_token():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)


_INTERRUPTED = b"Ray is connecting or starting; the program ends when that is done, or at once after another Ctrl-C\n"


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer the first Ctrl-C to the end of the block, and handle a second one at once.

    An interrupted `ray.init` may leave the processes that it started, or never return. Destructors of its C++ objects
    wait for threads that have not started yet (Ray 2.60).
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


@contextlib.contextmanager
def _private_token() -> Iterator[None]:
    """Let only the user read a token that Ray creates in the block; Ray 2.60 leaves the file's mode to the umask."""
    path = Path("~/.ray/auth_token").expanduser()
    existed = path.exists()
    try:
        yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # Ray created none
                path.chmod(0o600)


def _use_own_token() -> None:
    """Set token mode if the user has a token and RAY_AUTH_MODE is not set.

    `ray start` protects a cluster with that token by default, but `ray.init` does not send it by default. It would be
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
