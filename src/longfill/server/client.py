"""The engine as the API process sees it: requests in, streams of deltas out, and whether it is alive.

May import messages, request and zmq. Invariant: every stream ends, with a last delta or with an exception, whatever
happens to the engine.
"""
