"""The OpenAI client against Octavo: a streamed chat with its usage, then a completion with log-probabilities.

pip install openai
python examples/python/openai_client.py [--base-url http://127.0.0.1:8000/v1] "What is the capital of France?"

OpenAI's API has a port of its own: --base-url gives it, OCTAVO_API_KEY the key where the service asks for one.
"""

import argparse
import math
import os

from openai import OpenAI


def stream_chat(client: OpenAI, model: str, question: str) -> None:
    events = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0.7,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in events:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        if event.usage is not None:  # of the last event, which has no choice
            print(f"\n[{event.usage.prompt_tokens} tokens in, {event.usage.completion_tokens} out]")


def show_logprobs(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Once upon a", max_tokens=4, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    if logprobs is None or not logprobs.tokens or not logprobs.token_logprobs or not logprobs.top_logprobs:
        raise SystemExit("the server gave no log-probabilities")
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        others = ", ".join(f"{other!r} {math.exp(value):.1%}" for other, value in top.items() if other != token)
        print(f"{token!r} {math.exp(logprob or 0.0):.1%} (others: {others})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OCTAVO_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream_chat(client, model, arguments.question)
    show_logprobs(client, model)


if __name__ == "__main__":
    main()
