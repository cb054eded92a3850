import sys

from asrmask.cli import main

sys.exit(main())
