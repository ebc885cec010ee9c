"""``python -m reference_torch``."""

import sys

from reference_torch.cli import main

if __name__ == "__main__":  # new processes import this module, too
    sys.exit(main())
