"""A certificate: for every drafter, rule and warp, does decoding keep the target's law?

    python -m specjax.run --config=configs/exactness.py --workdir=runs/exactness

Some three minutes on two CPU cores, most of it compiling. Every rule judges toys with proposals of every law
under every warp; each drafter of the package is judged under every warp by one rule, in turn one of the
lossless ones that go by the law of its proposals. --config.quick=False has every rule judge every drafter and
draws 50 000 samples a row instead of 1 500, far longer; --config.samples=N draws N. Expect "No row failed"
and exit code 0, with every rule "exact" but typical acceptance (arXiv 2401.10774), which is "lossy, as
declared". A row that failed names its reason, and the exit code is 1.

Certify a drafter or a rule of your own, on a random Llama of 8 tokens:

    python -m specjax.run --config=configs/exactness.py --workdir=runs/mine \
        --config.drafter="{'name': 'my.module', 'draft_length': 2}" --config.verify=my.rule
"""

from ml_collections import ConfigDict

from specjax.config import run_config


def get_config() -> ConfigDict:
    return run_config("exactness")
