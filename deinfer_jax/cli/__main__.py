"""``python -m deinfer_jax.cli`` is ``deinfer``."""

import sys

from deinfer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
