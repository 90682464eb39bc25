"""A supervisor whose workers, caches and homes come up under a test's control."""

from timed_supervisor import TimedSupervisor

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervisor import Supervisor
from mbaas.core.staging import events as staging


class Feed(TimedSupervisor):
    """Supervisor with a clock, and its last instructions."""

    def __init__(self, own=1, staging_bytes=0, **begin):
        super().__init__(Supervisor(own=own, credit=2, staging_bytes=staging_bytes), **begin)

    def wait(self, seconds):
        return self.advance(seconds)

    def only(self, kind):
        (found,) = self.kinds(kind)
        return found

    def told(self, kind):
        """Events of a kind that are forwarded to the staging core."""
        return [told.event for told in self.kinds(ev.Forward) if isinstance(told.event, kind)]

    def move_homes(self):
        """Complete the placement move that was just requested."""
        move = self.only(ev.MovePlacement)
        self.send(ev.PlacementMoved(move.version, move.workers))
        return move

    def borrow(self, node, owner="other"):
        """Take a worker that another feed offers, and put it to work."""
        self.send(ev.Offered(f"{owner}'s", owner))
        name = self.only(ev.TakeIn).worker
        self.send(ev.WorkerStarted(name, node))
        for cache in self.kinds(ev.StartCache):
            self.send(ev.CacheStarted(node, cache.generation))
            self.move_homes()
        self.send(ev.WorkerBriefed(name, self.supervisor.homes.current.version))
        return name

    def lend(self, target):
        """Give a worker to another feed, which has not answered yet; return its name."""
        self.send(ev.Lend(target))
        (leaves,) = self.told(staging.WorkerLeaves)
        self.send(ev.WorkerDone(leaves.worker))
        assert self.only(ev.HandOver) == ev.HandOver(leaves.worker, target)
        return leaves.worker

    def open(self, *nodes):
        """Start a worker and a cache on each node."""
        for start, node in zip(self.kinds(ev.StartWorker), nodes, strict=True):
            self.send(ev.WorkerStarted(start.worker, node))
        for cache in list(self.supervisor.caches.values()):
            self.send(ev.CacheStarted(cache.node, cache.generation))
        self.move_homes()


def full(*nodes, keeps=100, most=100):
    """Caches of nodes, each with ``keeps`` of at most ``most`` bytes."""
    return ev.CachesMeasured(dict.fromkeys(nodes, (keeps, most)))
