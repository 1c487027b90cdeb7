"""Decoding made visible: a call as a sequence of events, one for each token, draft and step of beams."""

from unspool.trace.events import Trace, check_traced, follow
from unspool.trace.tracer import Tracer

__all__ = ["Trace", "Tracer", "check_traced", "follow"]
