"""What requests of this gateway took, counted when they have ended, from their final record alone.

So whole, streamed and detached calls count alike, and so do those whose client has left. Of a call with several choices
each is a request. Only an answer has a latency, steps and tokens generated; what was cancelled or failed is counted by
its reason.
"""

from prometheus_client import Counter, Histogram

from contracts.messages import ProgressRecord
from services.gateway.openai_api import Facts
from services.gateway.policy import is_answer, kept_deadline

LATENCY_S = Histogram(
    "tediserve_e2e_request_latency_seconds",
    "From a request's arrival to the end of its answer",
    ["tier"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60, 120, 300),
)
SLO = Counter(
    "tediserve_request_slo",
    "Requests with a deadline that kept it or missed it; those that failed or were refused have missed it",
    ["tier", "outcome"],
)
STEPS = Histogram(
    "tediserve_request_steps",
    "Denoising steps of an answered request",
    buckets=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024),
)
PROMPT_TOKENS = Counter("tediserve_prompt_tokens", "Tokens of the prompts of answered requests")
GENERATION_TOKENS = Counter("tediserve_generation_tokens", "Tokens of the answers")
ENDED = Counter("tediserve_requests_ended", "Requests that ended, by state and reason", ["state", "reason"])


def count(record: ProgressRecord) -> None:
    """Counts the request of this final record."""
    ENDED.labels(record.state, record.reason or record.finish).inc()
    tier = _tier(record)
    kept = kept_deadline(record)
    if kept is not None:
        SLO.labels(tier, "met" if kept else "missed").inc()
    if is_answer(record):
        LATENCY_S.labels(tier).observe(max(record.written_at - record.created_at, 0.0))
        STEPS.observe(sum(block.recompute_steps + block.cache_steps for block in record.blocks))
        PROMPT_TOKENS.inc(record.prompt_tokens)
        GENERATION_TOKENS.inc(len(record.token_ids))


def _tier(record: ProgressRecord) -> str:
    facts = Facts.decode(record.fingerprint)
    return "unknown" if facts is None else facts.tier  # unknown: the record of somebody who is no gateway
