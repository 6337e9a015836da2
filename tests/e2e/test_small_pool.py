"""A pool so small that requests preempt each other: what each gets is what it gets alone, id for id."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from octavo.v1 import generation_pb2 as pb
from tests.support.service import Service, request

SYSTEM = list(range(1000, 1020))
NUM_BLOCKS = 12  # of 16 tokens: for about three of the requests below


def sampled(number: int, num_choices: int = 1) -> pb.GenerateStreamRequest:
    """Return a request with a seed and penalties; all begin alike, so that they share blocks too."""
    prompt = SYSTEM + [1100 + (7 * number + i) % 400 for i in range(12 + 5 * number)]
    message = request(prompt, max_tokens=20 + number, ignore_eos=True)
    sampling = message.input.sampling
    sampling.n = num_choices
    sampling.seed = 11 + number
    sampling.temperature = 0.9
    sampling.top_p = 0.95
    sampling.presence_penalty = 0.5
    sampling.repetition_penalty = 1.1
    return message


def read(service: Service, message: pb.GenerateStreamRequest) -> list[list[int]]:
    """Return the ids of each choice."""
    ids: list[list[int]] = [[] for _ in range(message.input.sampling.n)]
    for event in service.generation.GenerateStream(message, timeout=240):
        if event.WhichOneof("event") == "delta":
            assert event.delta.first_token == len(ids[event.delta.index])
            ids[event.delta.index] += event.delta.token_ids
    return ids


def test_outputs_under_preemption_equal_solo_runs(demo_model: object, make_service: Callable[[], Service]) -> None:
    service = make_service()
    service.serve(str(demo_model), "--backend", "reference", "--num-gpu-blocks-override", str(NUM_BLOCKS + 1))
    service.wait_until_ready()
    requests = [sampled(number) for number in range(5)] + [sampled(5, num_choices=4)]
    alone = [read(service, message) for message in requests[:5]]
    # Alone, and without siblings: choice i of n is what nobody else's presence changes.
    alone.append(read(service, requests[5]))
    before = service.wait_until_idle()
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda message: read(service, message), requests))
    after = service.wait_until_idle()
    assert together == alone
    assert after.preemptions > before.preemptions
    assert after.free_blocks == after.total_blocks == NUM_BLOCKS
    assert len({tuple(ids) for ids in alone[5]}) == 4, "the choices differ"
    assert after.failed_checks == 0


def shaped() -> list[pb.GenerateStreamRequest]:
    """Return requests whose past decides what comes next: forms, bad words, beams, prompts that are told."""
    messages = [sampled(number) for number in range(6)]
    schema, regex, words, told, beams, scored = (message.input for message in messages)
    for constrained in (schema, regex):
        constrained.stopping.ignore_eos = False
    schema.sampling.n = 2
    schema.constraint.json_schema = '{"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 9}'
    regex.constraint.regex = "([a-z]{3} [0-9]{2}, ){9}"
    words.sampling.bad_words.extend(["the", " of the", ","])
    told.output.prompt_logprobs = 2
    beams.sampling.Clear()
    beams.sampling.n, beams.sampling.beam_search.width = 2, 2
    scored.output.prompt_logprobs, scored.stopping.max_tokens = 0, 0
    return messages


def read_all(service: Service, message: pb.GenerateStreamRequest) -> list[object]:
    """Return the ids of each choice, and the prompt's log-probabilities."""
    ids: dict[int, list[int]] = {}
    told: list[pb.TokenLogprob] = []
    for event in service.generation.GenerateStream(message, timeout=240):
        if event.WhichOneof("event") == "delta":
            ids.setdefault(event.delta.index, []).extend(event.delta.token_ids)
        elif event.WhichOneof("event") == "prompt_logprobs":
            assert event.prompt_logprobs.first_position == len(told)
            told += event.prompt_logprobs.logprobs
    return [ids, told]


def test_whatever_shapes_an_output_does_so_under_preemption(
    demo_model: object, make_service: Callable[[], Service]
) -> None:
    service = make_service()
    service.serve(str(demo_model), "--backend", "reference", "--num-gpu-blocks-override", str(NUM_BLOCKS + 1))
    service.wait_until_ready()
    requests = shaped()
    alone = [read_all(service, message) for message in requests]
    before = service.wait_until_idle()
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda message: read_all(service, message), requests))
    after = service.wait_until_idle()
    assert together == alone
    assert after.preemptions > before.preemptions
    assert after.free_blocks == after.total_blocks == NUM_BLOCKS
    assert after.failed_checks == 0
