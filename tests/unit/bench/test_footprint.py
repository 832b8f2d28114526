"""What a process of a live stack takes, by its name and by the request."""

from tools.bench.footprint import Footprint, Run, name_of, report


def test_a_process_is_named_after_what_it_runs() -> None:
    python = "/somewhere/bin/python"
    assert name_of([python, "-m", "services.gateway"]) == "gateway"
    assert name_of([python, "-m", "services.denoiser", "worker", "--lifeline", "3"]) == "denoiser worker"
    assert name_of([python, "-m", "tools.up", "--profile", "tiny"]) == "tools.up"
    assert name_of(["/somewhere/bin/nats-server", "-c", "single.conf"]) == "nats-server"


def test_the_table_divides_by_requests_and_by_time_and_puts_the_dearest_first() -> None:
    footprints = [Footprint("gateway", busy_s=1.0, idle_s=0.05), Footprint("worker", busy_s=4.0, idle_s=0.0)]
    told = report(Run(busy_wall_s=20.0, idle_wall_s=10.0, requests=400, failed=3, footprints=footprints))
    assert "400 requests in 20.0 s, 3 of them" in told
    assert told.splitlines()[-3:] == [
        "| worker | 10.00 | 20.0 | 0.0 |",
        "| gateway | 2.50 | 5.0 | 0.5 |",
        "| all | 12.50 | 25.0 | 0.5 |",
    ]
