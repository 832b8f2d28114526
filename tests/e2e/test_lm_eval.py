"""lm-evaluation-harness against the running server, offline, on a small task of our own: `make test-lm-eval`.

Nothing here knows what the model says: its answers are compared with those that the server gives us for the same
questions at temperature 0, and its score with our own count.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.processes import ROOT

pytestmark = [pytest.mark.lm_eval, pytest.mark.timeout(600)]  # it takes 10 s of processor time to import

TASKS = Path(__file__).parent / "lm_eval"
PROBLEMS = [json.loads(line) for line in (TASKS / "problems.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["chat-completions", "completions"])
def test_a_task(kind: str, base_url: str, client_environment: dict[str, str], tmp_path: Path) -> None:
    with OpenAI(base_url=f"{base_url}/v1", api_key=client_environment["OPENAI_API_KEY"], timeout=60) as client:
        model = client.models.list().data[0].id
        said = [_ask(client, kind, model, problem["question"]) for problem in PROBLEMS]
    command = [os.environ.get("LM_EVAL", str(ROOT / ".venv-lm-eval/bin/lm-eval")), "run"]
    command += ["--model", f"local-{kind}", "--model_args", f"model={model}", "tokenizer_backend=None"]
    command += [f"base_url={base_url}/v1/{kind.replace('-', '/')}", "num_concurrent=4", "max_retries=1"]
    command += [f"ca_cert_path={path}"] if (path := client_environment.get("SSL_CERT_FILE")) else []
    command += ["--apply_chat_template"] if kind == "chat-completions" else []
    command += ["--tasks", "tediserve_arithmetic", "--include_path", str(TASKS.relative_to(ROOT))]
    command += ["--gen_kwargs", "threshold=0.9", "--log_samples", "--output_path", str(tmp_path)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, cwd=ROOT, env=client_environment | offline, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    (results,) = tmp_path.glob("*/results_*.json")
    (samples,) = tmp_path.glob("*/samples_*.jsonl")
    answers = {sample["doc_id"]: sample["resps"][0][0] for sample in map(json.loads, samples.read_text().splitlines())}
    assert [answers[number] for number in range(len(PROBLEMS))] == said
    result: dict[str, Any] = json.loads(results.read_text())["results"]["tediserve_arithmetic"]
    right = [_last_result(answer) == problem["answer"] for answer, problem in zip(said, PROBLEMS, strict=True)]
    assert result["exact_match,last-result"] == pytest.approx(sum(right) / len(right))


def _ask(client: OpenAI, kind: str, model: str, question: str) -> str:
    """As the harness asks."""
    options: dict[str, Any] = {"model": model, "max_tokens": 96, "temperature": 0, "stop": ["\n\n"], "seed": 1234}
    options["extra_body"] = {"threshold": 0.9}
    if kind == "completions":
        return client.completions.create(prompt=question, **options).choices[0].text
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(messages=messages, **options).choices[0].message.content or ""


def _last_result(answer: str) -> str | None:
    found = re.findall(r"#### *(-?[0-9]+)", answer)
    return found[-1] if found else None
