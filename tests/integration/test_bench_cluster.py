"""`make bench-cluster` with a small cluster: real services, simulated instances, one of which falls silent."""

import math

import pytest

from tools.bench.cluster import MEASURED, ClusterJob, measure_cluster, print_cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def test_all_requests_complete_though_an_instance_falls_silent(capsys: pytest.CaptureFixture[str]) -> None:
    job = ClusterJob(instances=8, requests=4, slower=4.0, seconds=6.0, idle_s=1.0, silence=True)
    done = await measure_cluster(job)
    assert done.lost == 0
    assert done.ended == {"finished": done.asked}
    assert done.asked > job.instances * job.requests
    assert done.taken_over >= 1  # what the silent one held went on elsewhere
    assert done.requests_per_s > 0
    assert done.request_steps_per_s > 0
    assert 0.5 <= done.mean_threshold <= 0.9
    assert {service.name for service in done.services} == {"nats", *MEASURED, "fleet-0", "bench"}
    assert all(service.busy > 0 for service in done.services)
    times = [done.placed, done.bus, done.status_lag, *done.deciding.values()]
    assert not any(math.isnan(value) for waits in times for value in waits)
    assert all(done.rates[kind] > 0 for kind in ("reports", "records", "forecasts", "statuses", "placements"))
    print_cluster(done)
    assert f"| 8 | {done.requests_per_s:.1f} | {done.asked} | {done.asked} | 0 | none |" in capsys.readouterr().out
