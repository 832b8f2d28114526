"""What the bench of a large cluster makes of the services' histograms."""

import math

import pytest

from tools.bench.cluster import bucket_quantile

BUCKETS = [(0.001, 50.0), (0.003, 90.0), (math.inf, 100.0)]


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.0005), (0.5, 0.001), (0.7, 0.002), (0.95, 0.003)])
def test_a_quantile_lies_in_proportion_within_its_bucket(share: float, expected: float) -> None:
    assert bucket_quantile(BUCKETS, share) == pytest.approx(expected)


def test_of_nothing_there_is_no_quantile() -> None:
    assert math.isnan(bucket_quantile([], 0.5))
    assert math.isnan(bucket_quantile([(0.001, 0.0), (math.inf, 0.0)], 0.5))
