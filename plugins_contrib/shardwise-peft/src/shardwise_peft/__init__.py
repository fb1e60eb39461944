"""Adapters of peft over placed weights."""

from shardwise_peft.errors import AdapterError, AdapterPlanError
from shardwise_peft.files import load, save
from shardwise_peft.placing import distribute, misplaced, place_adapters

__all__ = ["AdapterError", "AdapterPlanError", "distribute", "load", "misplaced", "place_adapters", "save"]
