"""What simulated callers expect is what the model alone would give them."""

from random import Random

import pytest

from octavo.scheduler.simulate.model import hash_rule
from octavo.scheduler.simulate.scenario import VOCAB_SIZE, draw_scenario
from octavo.scheduler.simulate.solo import solo_run
from octavo.scheduler.simulate.workload import Job, Oracle, Workload, is_sick, make_seed
from octavo.wire.codec import decode_from_peer, encode
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import ServiceFacts
from octavo.wire.prefix import KEY_BYTES

FACTS = ServiceFacts(VOCAB_SIZE, 40, 4, 8, "fcfs", True)


@pytest.mark.parametrize("seed", range(30))
def test_the_oracle_is_the_solo_run(seed: int) -> None:
    random = Random(seed)
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 40))]
    stop_ids = random.sample(range(VOCAB_SIZE), 5)
    min_tokens = random.randint(0, 20)
    alone = solo_run(
        hash_rule(VOCAB_SIZE),
        prompt,
        seed=seed,
        choice=seed % 3,
        max_output=30,
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        vocab_size=VOCAB_SIZE,
    )
    oracle = Oracle(pack_ints(prompt), seed, seed % 3, stop_ids, min_tokens)
    assert [oracle.next() for _ in alone] == alone


def test_sick_seeds_name_choice_and_length() -> None:
    seed = make_seed(3, (2, 17))
    assert is_sick([0] * 17, seed, 2)
    assert not is_sick([0] * 16, seed, 2)
    assert not is_sick([0] * 17, seed, 1)
    assert not is_sick([0] * 1000, make_seed(3, None), 0)


def make_jobs(seed: int) -> list[Job]:
    random = Random(seed)
    scenario = draw_scenario(random)
    workload = Workload(random, scenario.traffic, uses_priorities=False)
    jobs = []
    for _ in range(200):
        job = workload.make(FACTS)
        job.handle = 1
        if job.beams is None:
            job.choices[0].ids.extend(job.choices[0].oracle.next() for _ in range(job.max_tokens))
        workload.remember(job)
        jobs.append(job)
    return jobs


@pytest.mark.parametrize("seed", range(10))
def test_jobs_fit_the_service_unless_they_are_wrong(seed: int) -> None:
    for job in make_jobs(seed):
        assert len(job.prompt) + job.max_tokens <= FACTS.max_model_len
        assert job.is_wrong == any(not 0 <= token < VOCAB_SIZE for token in job.prompt)
        assert all(choice.stop_at is None or choice.stop_at <= job.max_tokens for choice in job.choices)
        request = job.to_request(FACTS, job.submitted_at)
        assert decode_from_peer(encode(request, 1, 1))[1] == request
        assert len(request.prefix_keys) == (len(job.prompt) // 4 * KEY_BYTES if job.root else 0)
        assert request.output_ids == (), "it begins"
        job.started_in = 7
        request = job.to_request(FACTS, job.submitted_at)
        assert request.output_ids, "it goes on, whether or not ids have come of it"
        assert list(unpack_ints(request.output_ids[0])) == ([] if job.beams else list(job.choices[0].ids))


def test_prompts_share_beginnings_and_end_around_the_ends_of_blocks() -> None:
    jobs = [job for seed in range(10) for job in make_jobs(seed)]
    beginnings = [tuple(job.prompt[:8]) for job in jobs if len(job.prompt) >= 8]
    assert len(set(beginnings)) < len(beginnings) / 3
    assert {len(job.prompt) % 4 for job in jobs} == {0, 1, 2, 3}
    assert {job.num_choices for job in jobs} >= {1, 2, 3, 4}
    assert {job.beams.width for job in jobs if job.beams is not None} >= {1, 2, 3, 4}
    assert {job.root for job in jobs} > {b""}
