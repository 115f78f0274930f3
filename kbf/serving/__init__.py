from kbf import _on_demand

__getattr__, __dir__ = _on_demand(__name__)
