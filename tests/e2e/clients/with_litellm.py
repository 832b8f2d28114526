"""A chat through LiteLLM, as its users write it: MODEL QUESTION; tells what came as JSON."""

import json
import sys

import litellm

model, question = sys.argv[1:]
call = {
    "model": f"openai/{model}",
    "messages": [{"role": "user", "content": question}],
    "temperature": 0,
    "timeout": 60,
    "num_retries": 0,
    "extra_body": {"threshold": 0.9},
}
chunks = list(litellm.completion(**call, stream=True, stream_options={"include_usage": True}))
whole = litellm.completion(**call)
told = {
    "plain": whole.choices[0].message.content,
    "finish": whole.choices[0].finish_reason,
    "tokens": whole.usage.completion_tokens,
    "parts": [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content],
    "streamed_tokens": [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)],
}
print(json.dumps(told))
