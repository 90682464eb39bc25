"""What share of a trial's time goes to waiting for data."""

from __future__ import annotations

from collections.abc import Mapping

from mbaas import Loader


def stall_shares(loaders: Mapping[tuple[str, str], Loader]) -> dict[str, float]:
    """Metrics of one trial, each a share from 0 to 1 of the seconds since it joined.

    ``stall_share`` is the time the trial waited for minibatches over that time plus the time it worked
    between them: near 0, the model is the bottleneck; high, data is. Its two parts say where to look:
    fetch (prep waited for bytes; more cache or faster storage would help) and prep (it was computing;
    more workers would).

    Args:
        loaders: by (feed, consumer).
    """
    metrics: dict[str, float] = {}
    waited_s = total_s = 0.0
    for (feed, _), loader in loaders.items():
        report = loader.report()
        busy_s = report.wait_s + report.step_s
        waited_s, total_s = waited_s + report.wait_s, total_s + busy_s
        metrics[f"mbaas/{feed}/stall_share"] = _share(report.wait_s, busy_s)
        metrics[f"mbaas/{feed}/fetch_stall_share"] = _share(report.fetch_stall_s, busy_s)
        metrics[f"mbaas/{feed}/prep_stall_share"] = _share(report.wait_s - report.fetch_stall_s, busy_s)
    metrics["mbaas/stall_share"] = _share(waited_s, total_s)
    return metrics


def _share(part_s: float, total_s: float) -> float:
    return part_s / total_s if total_s > 0 else 0.0
