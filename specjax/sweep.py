"""Sweep the fields of a config.

    python -m specjax.sweep --config=configs/sweeps/k_and_width.py --workdir=runs/k_and_width

It is `python -m specjax.run` for configs of the task 'sweep'; see its --help. The same command in several
processes, or after an interruption, shares the trials: each is run once.
"""

import sys

from specjax.run import main

if __name__ == "__main__":
    sys.exit(main())
