"""Beam search of a whole service on the reference backend: through every door the ids of transformers, in their order."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import BeamParams
from tests.models.test_beam_search import MAX_TOKENS, theirs
from tests.support.architectures import write_with_transformers
from tests.support.frontend_client import Collected
from tests.support.service import Service, free_port
from tests.support.tiny_tokenizers import EOS_ID, byte_level, write_model_folder

PROMPT = [72, 101, 108, 108, 111]
BEAMS = BeamParams(4, 0.5)


def test_every_door_finds_what_transformers_finds(make_service: Callable[[], Service], tmp_path: Path) -> None:
    folder, http_port = write_model_folder(tmp_path / "tiny"), free_port()
    # Ids that the tokenizer does not know would take part in transformers' search alone.
    sizes = {"vocab_size": byte_level().get_vocab_size(), "eos_token_id": EOS_ID}
    oracle = write_with_transformers(folder, "llama", sizes)
    expected = theirs(oracle, PROMPT, BEAMS.width, BEAMS, [EOS_ID])
    service = make_service().serve(str(folder), "--backend", "reference", "--http-port", str(http_port))
    service.wait_until_ready()

    asked = pb.GenerationInput(token_ids=pb.TokenIds(ids=PROMPT))
    asked.sampling.n = asked.sampling.beam_search.width = BEAMS.width
    asked.sampling.beam_search.length_penalty = BEAMS.length_penalty
    asked.stopping.max_tokens = MAX_TOKENS
    asked.output.token_ids = True
    whole = service.generation.Generate(pb.GenerateRequest(input=asked), timeout=60)
    for choice, (ids, score) in zip(whole.choices, expected, strict=True):
        own = list(choice.token_ids)
        assert own == ids[: len(own)]
        assert set(ids[len(own) :]) <= {EOS_ID}, "padding"
        assert choice.cumulative_logprob / len(own) ** BEAMS.length_penalty == pytest.approx(score, rel=1e-5)

    streamed = Collected()
    for event in service.generation.GenerateStream(pb.GenerateStreamRequest(input=asked), timeout=60):
        streamed.add(event)
    found = [list(choice.token_ids) for choice in whole.choices]
    assert [streamed.ids[index] for index in range(BEAMS.width)] == found

    base_url = f"http://127.0.0.1:{http_port}/v1"
    with contextlib.closing(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)) as client:
        answer = client.completions.create(
            model="",
            prompt=PROMPT,
            n=BEAMS.width,
            max_tokens=MAX_TOKENS,
            extra_body={"use_beam_search": True, "length_penalty": BEAMS.length_penalty, "return_token_ids": True},
        )
        assert [(choice.model_extra or {})["token_ids"] for choice in answer.choices] == found
