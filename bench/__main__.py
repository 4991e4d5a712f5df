"""`python -m attn_variants.bench`, the command for a checkout that is not installed."""

import sys

from .cli import main

sys.exit(main())
