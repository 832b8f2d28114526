"""What the instances of a live stack have run, read from their metrics: what a pass costs on this very machine."""

from collections.abc import Sequence

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

_LIMIT_S = 5.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Of one instance, over a while. Seconds."""

    passes: int
    measured_s: float  # all passes together
    profiled_s: float  # the same passes by the profile's latency
    between_s: float  # from pass to pass, pauses left out

    def since(self, earlier: "Work") -> "Work":
        return Work(
            passes=self.passes - earlier.passes,
            measured_s=self.measured_s - earlier.measured_s,
            profiled_s=self.profiled_s - earlier.profiled_s,
            between_s=self.between_s - earlier.between_s,
        )


def done_so_far(metrics_urls: Sequence[str]) -> list[Work]:
    """Of each instance, since it began; [] where one cannot be asked. Raises ValueError for an address of another."""
    try:
        return [parse_work(httpx.get(url, timeout=_LIMIT_S).text, url) for url in metrics_urls]
    except httpx.HTTPError:
        return []


def parse_work(text: str, url: str) -> Work:
    """From a worker's `/metrics`. Raises ValueError where it is not one's."""
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    try:
        return Work(
            passes=int(samples["tediserve_worker_step_seconds_count"]),
            measured_s=samples["tediserve_worker_step_seconds_sum"],
            profiled_s=samples["tediserve_worker_profiled_seconds_total"],
            between_s=samples["tediserve_worker_between_steps_seconds_total"],
        )
    except KeyError as missing:
        raise ValueError(f"{url} says nothing of {missing.args[0]}: is it a worker's?") from None


def done_since(before: Sequence[Work], now: Sequence[Work]) -> list[Work]:
    """Of the same instances; [] where one could not be asked, or has begun anew meanwhile."""
    if len(before) != len(now):
        return []
    found = [later.since(earlier) for earlier, later in zip(before, now, strict=True)]
    return [] if any(work.passes < 0 for work in found) else found
