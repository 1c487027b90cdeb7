"""The batch engine: requests of every strategy decode together, and come and go while it runs."""

from unspool.engine.engine import BatchOutput, Engine
from unspool.engine.request import Request
from unspool.engine.stats import EngineStats

__all__ = ["BatchOutput", "Engine", "EngineStats", "Request"]
