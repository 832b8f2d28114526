"""LangChain and LiteLLM, unmodified, against the running server: each in a process of its own, as its users have it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from tests.processes import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]  # LiteLLM takes 5 s of processor time to import

CLIENTS = Path(__file__).parent / "clients"
QUESTION = "What is 12 + 30? What is 7 - 2? What is 3 + 3?"
# LiteLLM would fetch its price list from the net as it is imported, LangChain send its runs to LangSmith if told so
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


@pytest.mark.parametrize("script", ["with_langchain.py", "with_litellm.py"])
def test_a_chat_streamed_and_whole(script: str, base_url: str, client_environment: dict[str, str]) -> None:
    api_key = client_environment["OPENAI_API_KEY"]
    with OpenAI(base_url=f"{base_url}/v1", api_key=api_key, timeout=60) as client:
        model = client.models.list().data[0].id
        expected = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            extra_body={"threshold": 0.9},
        )
    command = [sys.executable, str(CLIENTS / script), model, QUESTION]
    environment = client_environment | OFFLINE
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (choice,), usage = expected.choices, expected.usage
    assert usage is not None
    assert told["plain"] == "".join(told["parts"]) == choice.message.content
    assert told["finish"] == choice.finish_reason
    assert told["tokens"] == usage.completion_tokens
    assert told["streamed_tokens"] == [usage.completion_tokens]
