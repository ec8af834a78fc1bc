"""The command line: `longfill demo | run | eval | check | bench | version`."""
