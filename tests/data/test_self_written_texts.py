"""The texts that come with the project: none of their prompts is an evaluation prompt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specjax.checkpoints.source import Checkpoint
from specjax.data import instructions, token_store

FOLDER = Path(__file__).parents[2] / "experiments" / "self_written"
REQUEST = re.compile(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n", re.DOTALL)


@pytest.mark.slow
def test_prompts_and_evaluation_prompts_do_not_overlap(smollm2: Checkpoint) -> None:
    texts = [one for path in token_store.token_files(FOLDER) for one in token_store.read_samples(path)]
    assert len(texts) >= 1000
    requests = []
    for one in texts:
        prompt = smollm2.tokenizer.decode(one.tokens[~one.supervised], skip_special_tokens=False)
        found = REQUEST.search(prompt)
        assert found is not None and one.supervised.any()
        requests.append(found[1])
    barred = instructions.evaluation_fingerprints()
    assert not {instructions.fingerprint(request) for request in requests} & barred
    # Case and white space hide nothing, and no prompt comes twice.
    assert len(instructions.for_training(requests)) == len(set(map(instructions.normalized, requests)))
