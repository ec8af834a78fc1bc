"""For all tests: set before torch is loaded.

Threads that wait for work spin, unless told otherwise; beside other test processes that takes the cores from those that
have work.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
