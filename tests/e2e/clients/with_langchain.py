"""A chat through LangChain, as its users write it: MODEL QUESTION; tells what came as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

model, question = sys.argv[1:]
chat = ChatOpenAI(model=model, temperature=0, timeout=60, max_retries=0, extra_body={"threshold": 0.9})
chunks = list(chat.stream(question, stream_usage=True))
whole = chat.invoke(question)
told = {
    "plain": whole.content,
    "finish": whole.response_metadata["finish_reason"],
    "tokens": whole.usage_metadata["output_tokens"] if whole.usage_metadata else None,
    "parts": [chunk.content for chunk in chunks if chunk.content],
    "streamed_tokens": [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata],
}
print(json.dumps(told))
