"""What requests get when they are alone in the world: the reference for every schedule."""

from collections.abc import Sequence

from octavo.scheduler.beams import BeamSearch
from octavo.scheduler.simulate.model import Rule, candidates, draw


def solo_run(
    rule: Rule,
    prompt: Sequence[int],
    *,
    seed: int,
    choice: int,
    max_output: int,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    vocab_size: int,
) -> list[int]:
    """Return what a request gets when it is alone in the world: the reference for every schedule."""
    output: list[int] = []
    while len(output) < max_output:
        masked = stop_ids if len(output) < min_tokens else ()
        output.append(draw(rule([*prompt, *output], seed, choice), masked, vocab_size))
        if output[-1] in stop_ids and len(output) > min_tokens:
            break
    return output


def solo_search(rule: Rule, prompt: Sequence[int], *, seed: int, search: BeamSearch, vocab_size: int) -> BeamSearch:
    """Run a search to its end as if it were alone in the world: the reference for every schedule."""
    beams: list[list[int]] = [list(prompt)]
    while not search.is_over:
        of_beams = [candidates(rule(ids, seed, 0), ids, search.num_candidates, vocab_size) for ids in beams]
        beams = [[*beams[parent], token] for parent, token in search.step(of_beams)]
    return search
