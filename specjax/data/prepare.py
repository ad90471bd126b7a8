"""Make training data of texts that the target did not write: documents, chats, files of tokens.

    python -m specjax.data.prepare --config=configs/prepare_llama.py --workdir=runs/prepared

It is `python -m specjax.run` for configs of the task 'prepare'; see its --help.
"""

import sys

from specjax.run import main

if __name__ == "__main__":
    sys.exit(main())
