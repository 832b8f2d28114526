"""A problem checks itself, and has a JSON form."""

import json
from typing import Any

import msgspec
import pytest

from services.reconfigurator.problem import Problem
from tests.unit.reconfigurator.build import make_instances, paper_example


def as_json(**changes: Any) -> bytes:
    whole = json.loads(msgspec.json.encode(paper_example(1.0, today=make_instances((0, 1, 2, 3)))))
    return json.dumps(whole | changes).encode()


def test_json_there_and_back() -> None:
    problem = paper_example(1.0, today=make_instances((0, 1, 2, 3), (7,)))
    again = msgspec.json.decode(msgspec.json.encode(problem), type=Problem)
    assert again == problem
    assert again.layout_today == {1: 1, 4: 1}


ONE = {"name": "a", "rate_per_s": 1.0, "prompt_tokens": 1, "output_tokens": 1}
ON = {"instance_id": "i", "node_id": "n0", "devices": [0]}
COST = {"curve": [[1, 1.0]]}
HIGH, LOW = {"threshold": 0.9, "tokens_per_step": 3.0}, {"threshold": 0.5, "tokens_per_step": 2.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"classes": [ONE | {"rate_per_s": -1.0}]}, ">= 0.0 - at `$.classes[0].rate_per_s`"),
        ({"classes": [ONE | {"slo_s": 0.0}]}, "> 0.0 - at `$.classes[0].slo_s`"),
        ({"classes": [ONE | {"rate": 1.0}]}, "unknown field `rate` - at `$.classes[0]`"),
        ({"classes": [ONE, ONE]}, "classes names a twice"),
        ({"classes": [ONE | {"tokens_per_step": [2.0, 1.0]}]}, "class a: tokens_per_step needs a number for each"),
        ({"thresholds": []}, "$.thresholds"),
        ({"thresholds": [HIGH, LOW]}, "thresholds must be ascending, 0.5 comes after 0.9"),
        ({"thresholds": [LOW, HIGH]}, "a higher threshold never commits more, 3 after 2"),
        ({"batch_tokens": [512, 256]}, "batch_tokens must be ascending, 256 comes after 512"),
        ({"degrees": [{"tp_degree": 16, "cost": COST}]}, "[16]: none fits on a node, the largest has 8 devices"),
        ({"degrees": [{"tp_degree": 1, "cost": COST}] * 2}, "degrees names 1 twice"),
        ({"nodes": [{"node_id": "n0", "devices": [0, 0]}]}, "node n0: devices names 0 twice"),
        ({"today": [ON | {"node_id": "n9"}]}, "instance i is on node n9, which is none of nodes"),
        ({"today": [ON | {"devices": [8]}]}, "instance i is on device 8, which node n0 does not have"),
        ({"today": [ON, ON | {"instance_id": "j"}]}, "instance j is on device 0 of node n0, which i holds"),
        ({"today": [ON | {"devices": [0, 0]}]}, "instance i is on device 0 of node n0, which i holds"),
        ({"planning": {"max_utilisation": 1.5}}, "$.planning.max_utilisation"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(as_json(**changes), type=Problem)
    assert told in str(error.value)
