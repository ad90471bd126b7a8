"""Train a drafter.

    python -m specjax.train --config=configs/train/eagle_llama.py --workdir=runs/train/eagle

It is `python -m specjax.run` for configs of the task 'train'; see its --help. Where JAX_COORDINATOR_ADDRESS,
JAX_NUM_PROCESSES and JAX_PROCESS_ID are set, the processes that have them divide each batch among them.
"""

import sys

from specjax.run import main
from specjax.sharding import join_processes

if __name__ == "__main__":
    join_processes()
    sys.exit(main())
