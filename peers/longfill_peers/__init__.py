"""Other engines that `longfill bench` measures beside longfill, each in a process of its own.

Nothing in `longfill` imports this package: it starts `python -m longfill_peers.NAME`. The engines themselves are
optional (`pip install 'longfill[bench]'`).
"""
