"""What a consumer waited for, and where its bytes came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from mbaas.client.blame import StallAttribution


@dataclass
class StreamStats:
    """What a consumer's streams cost it.

    Attributes:
        waited_s: seconds that it waited without a block at hand.
        fetch_stalled_s: the part of it without which prep would never have waited for bytes (`StallAttribution`).
        local_bytes, remote_bytes: prepared bytes that were read from the own node's memory, and that came from others.
    """

    waited_s: float = 0.0
    fetch_stalled_s: float = 0.0
    local_bytes: int = 0
    remote_bytes: int = 0
    _blame: StallAttribution = field(default_factory=StallAttribution, repr=False)
    _had_block_at: float | None = field(default=None, repr=False)

    def block_came(self, began: float, ended: float, *, fetch_s: float, prep_s: float) -> None:
        """A block was waited for from ``began`` to ``ended``.

        Args:
            began, ended: seconds of the same clock.
            fetch_s, prep_s: as for `StallAttribution.fetch_stall_s`.
        """
        last = began if self._had_block_at is None else self._had_block_at
        self.waited_s += ended - began
        self.fetch_stalled_s += self._blame.fetch_stall_s(
            ended - began, elapsed_s=ended - last, fetch_s=fetch_s, prep_s=prep_s
        )
        self._had_block_at = ended
