"""Let a target write the text that its drafters learn from.

    python -m specjax.data.generate --config=configs/generate_llama.py --workdir=runs/self_written

It is `python -m specjax.run` for configs of the task 'generate'; see its --help.
"""

import sys

from specjax.run import main

if __name__ == "__main__":
    sys.exit(main())
